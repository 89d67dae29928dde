from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compressor.model.opened import OpenModel, open_model
from compressor.progress import Silent
from compressor.recipe.plan import LayerPlan, Source
from compressor.report.data import LayerMeasures
from compressor.report.measuring import by_weights as by_weights_of
from compressor.report.measuring import measure_layers, similarity_of
from compressor.statistics.meters import mix_tokens
from compressor.steps.prune.similarity import linear_cka
from tests.support.opened_models import batches, one_expert, opened, plain_calls
from tests.support.plans import Decided
from tests.support.plugins import install


@pytest.fixture(scope="module", params=["mixtral", "gpt_oss"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, OpenModel]:
    return opened(request.param, tmp_path_factory.mktemp(request.param))


def plan_of(model: OpenModel, strategy: str, options: Mapping[str, Any]) -> Decided:
    layers = tuple(LayerPlan.keep(layer, range(layer.experts)) for layer in model.architecture.layers)
    return Decided(Source("model", None, "0"), 8, strategy, options, None, layers)


def measured(both: tuple[Any, OpenModel], plan: Decided) -> list[LayerMeasures]:
    stock, model = both
    again = open_model(model.source, "float32", "cpu")
    return list(measure_layers(again, model, batches(stock), similarity_of(plan), Silent(), plan.seed))


def outputs(both: tuple[Any, OpenModel], mixed: bool) -> dict[str, Tensor]:
    """[E, T, H] outputs of every expert on all tokens that reach a layer, by the stock modules."""
    stock, model = both
    found = {}
    for name, calls in plain_calls(stock, model.architecture, batches(stock)).items():
        hidden = calls.joined()[0]
        hidden = mix_tokens(hidden, 0) if mixed else hidden
        module = stock.get_submodule(name)
        found[name] = torch.stack([one_expert(module, expert, hidden) for expert in range(8)])
    return found


def cka_by_numpy(x: np.ndarray, y: np.ndarray) -> float:
    """||Y^T X||^2 / (||X^T X|| ||Y^T Y||) of centred columns, Frobenius norms."""
    x, y = x - x.mean(0), y - y.mean(0)
    return float(np.linalg.norm(y.T @ x) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)))


@pytest.mark.parametrize("strategy", ["reap", "hc-smoe"])
def test_experts_are_compared_by_their_outputs(both: tuple[Any, OpenModel], strategy: str) -> None:
    wanted = outputs(both, mixed=False)
    for layer in measured(both, plan_of(both[1], strategy, {})):
        assert layer.similarity_label == "linear CKA of expert outputs, 36 tokens"
        values = wanted[layer.module].double().numpy()
        assert np.allclose(layer.similarity or (), [[cka_by_numpy(x, y) for y in values] for x in values], atol=1e-4)


def test_data_centric_experts_are_compared_as_they_were_grouped(both: tuple[Any, OpenModel]) -> None:
    mixed, plain = outputs(both, mixed=True), outputs(both, mixed=False)
    for layer in measured(both, plan_of(both[1], "data-centric", {})):
        assert layer.similarity_label == "linear CKA of expert outputs, 36 random mixtures of tokens"
        assert np.allclose(layer.similarity or (), linear_cka(mixed[layer.module]), atol=1e-4)
        assert not np.allclose(layer.similarity or (), linear_cka(plain[layer.module]), atol=1e-2)
    options = {"similarity": "mean-output", "mix_tokens": False}
    for layer in measured(both, plan_of(both[1], "data-centric", options)):
        means = plain[layer.module].double().mean(1)
        distances = torch.cdist(means, means)
        assert layer.similarity_label.startswith("closeness of mean expert outputs (1 - distance / largest distance)")
        assert np.allclose(layer.similarity or (), 1 - distances / distances.max(), atol=1e-4)


def surrogate(experts: Any, expert: int) -> Tensor:
    """down (gate * up) of a mixtral expert, whose fused tensor holds gate and up one after the other."""
    gate, up = experts.gate_up_proj[expert].detach().double().chunk(2, dim=0)
    return experts.down_proj[expert].detach().double() @ (gate * up)


@pytest.mark.parametrize("representation", ["surrogate", "vectorized"])
def test_model_centric_experts_are_compared_by_weights(representation: str, tmp_path: Path) -> None:
    both = opened("mixtral", tmp_path)
    plan = plan_of(both[1], "model-centric", {"representation": representation})
    for layer in measured(both, plan):
        experts = both[0].get_submodule(layer.module)
        rows = [
            surrogate(experts, e) if representation == "surrogate"
            else torch.cat([experts.gate_up_proj[e].flatten(), experts.down_proj[e].flatten()]).detach().double()
            for e in range(8)
        ]  # fmt: skip
        flat = torch.stack([row.flatten() for row in rows])
        distances = torch.cdist(flat, flat)
        assert np.allclose(layer.similarity or (), 1 - distances / distances.max(), atol=1e-4)
        assert layer.similarity_label.startswith(f"closeness of {representation} weights")
        assert (layer.similarity, layer.similarity_label) == by_weights(both[1], plan)[layer.module]


def by_weights(model: OpenModel, plan: Decided) -> dict[str, Any]:
    found = by_weights_of(model, similarity_of(plan), Silent())
    return {layer.module: (layer.similarity, layer.similarity_label) for layer in found}


def test_without_text_router_rows_are_compared_where_outputs_would_be(both: tuple[Any, OpenModel]) -> None:
    found = by_weights(both[1], plan_of(both[1], "reap", {}))
    assert found.keys() == {layer.name for layer in both[1].architecture.layers}
    for layer in both[1].architecture.layers:
        rows = both[0].get_submodule(layer.router).weight.detach().double().numpy()  # [E, H]
        rows -= rows.mean(0)
        lengths = np.sqrt((rows**2).sum(1))
        matrix, label = found[layer.name]
        assert "router rows" in label
        np.testing.assert_allclose(matrix, np.clip(rows @ rows.T / np.outer(lengths, lengths), 0, 1), atol=1e-4)
    assert all(value.is_meta for value in both[1].partial.model.parameters())


def test_a_router_without_rows_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = opened("mixtral", tmp_path)[1]
    plan = plan_of(model, "reap", {})
    others = [  # as if its rows were none of an expert's tensors
        replace(layer, tensors=tuple(each for each in layer.tensors if not each.key.startswith(layer.router)))
        for layer in model.architecture.layers
    ]
    found = by_weights(replace(model, architecture=replace(model.architecture, layers=tuple(others))), plan)
    assert set(found.values()) == {(None, "")}
    assert [record.getMessage() for record in caplog.records] == [
        f"{layer.name}: the report lacks the similarity of its experts, which could not be compared: its router has no "
        "matrix with a row for each"
        for layer in others
    ]


THEIRS = """
import torch
from tests.support.plans import Decided
NEEDS = frozenset({{"routed_count"}})
def plan(stats, keep, protected=frozenset()): ...
def similarity_needs(options): return frozenset({{"router_logits"}})
def similarity(stats, options): {body}
"""


def test_a_plugins_likeness_is_asked(both: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "return 'logits on <36>', (stats.router_logits.T.corrcoef() + 1) / 2"
    install(tmp_path, monkeypatch, "theirs", THEIRS.format(body=body))
    stock, model = both
    for layer in measured(both, plan_of(model, "theirs", {})):
        calls = plain_calls(stock, model.architecture, batches(stock))[layer.module]
        logits = torch.cat([output[0].reshape(-1, 8) for output in calls.router_outputs]).double().numpy()
        assert layer.similarity_label == "logits on <36>"
        assert np.allclose(layer.similarity or (), (np.corrcoef(logits.T) + 1) / 2, atol=1e-4)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise IndexError('out of\\nbounds')", "out of bounds"),
        ("return 'a label', torch.ones(8)", "no matrix of 8 x 8 finite numbers"),
        ("return 'a label', torch.full((8, 8), torch.nan)", "no matrix of 8 x 8 finite numbers"),
        ("return stats.norm_sum", "'norm_sum' was not collected"),
        ("return None", "None"),
    ],
)
def test_a_likeness_that_fails_breaks_no_report(
    both: tuple[Any, OpenModel],
    body: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(tmp_path, monkeypatch, "theirs", THEIRS.format(body=body))
    model = both[1]
    found = measured(both, plan_of(model, "theirs", {}))
    assert {(layer.similarity, layer.similarity_label) for layer in found} == {(None, "")}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(found) and all(reason in line for line in said)
