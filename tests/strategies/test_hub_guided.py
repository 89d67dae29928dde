"""Hub-guided: by hand, beside its two ends, from the figures that attribute writes, and who shares those."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compressor.attribution import measure
from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration, calibrate, load_tokenizer
from compressor.data.sources import parse_sources
from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import open_model
from compressor.progress import Silent
from compressor.recipe.registry import Strategy
from compressor.statistics.statistics import LayerStatistics
from compressor.steps.correct.options import Correct
from compressor.steps.prune.planning import Planner, PruneSpec
from compressor.steps.prune.selection import keep_best
from strategies.ranked import HubGuided, count_guided, gated_mass, listening_factors
from tests.strategies.test_reap import naive_scores
from tests.support import small, zoo
from tests.support.command_line import Run, names, refused
from tests.support.opened_models import batches, calibration, plain_calls
from tests.support.plans import kept, make_plan, pruned

pytestmark = pytest.mark.usefixtures("offline")

Options, plan = HubGuided.Options, HubGuided.plan
LAYERS = 4
SIZES = ("--samples", 12, "--sequence-length", 32)


def stats(mass: list[float], changes: list[float], counts: list[float] | None = None, **groups: Any) -> LayerStatistics:
    layer = MoeLayer("layers.1.experts", "layers.1", "layers.1.gate", "layers.1", 1, len(mass), 2, **groups)
    given = {"gated_norm_sum": mass, "rank_change": changes, "routed_count": counts or mass}
    values = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in given.items()}
    return LayerStatistics(layer, 9, values)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_a_case_by_hand() -> None:
    """Products 8, 3, 4, 12, 0; with the exponent a half 4, 3, 4, 3.46, 0; with a fifth 2.6, 3, 4, 1.6, 0."""
    found = stats([2, 3, 4, 1, 9], [4, 1, 1, 12, 0])
    made = plan(found, 2)
    assert kept(made) == [0, 3] and made.decided_by == "gated_norm_sum x rank_change"
    assert made.figures == {
        "kept_share_of_saliency": pytest.approx(20 / 27, abs=1e-6),
        "kept_share_of_rank_change": pytest.approx(16 / 18, abs=1e-6),
    }
    assert kept(plan(found, 3)) == [0, 2, 3] and kept(plan(found, 4)) == [0, 1, 2, 3]
    assert kept(plan(found, 2, options=Options(exponent=0.5))) == [0, 2]
    assert kept(plan(found, 3, options=Options(exponent=0.5))) == [0, 2, 3]
    assert kept(plan(found, 2, options=Options(exponent=0.2))) == [1, 2]
    assert kept(plan(found, 2, options=Options(exponent=0.0))) == [2, 4]
    assert kept(plan(found, 2, frozenset({4, 1}))) == [1, 4]
    visited = stats([9, 9, 0, 0, 0], [4, 1, 1, 12, 0], counts=[2, 3, 4, 1, 9])
    assert kept(plan(visited, 2, options=Options(mass="visits"))) == [0, 3]


def test_the_layers_own_scales_do_not_count_nor_overflow() -> None:
    for a, b in ((1e-9, 1e-30), (7, 1e-30), (1e-9, 1e30), (7, 1e30)):
        assert kept(plan(stats([2 * a, 3 * a, 4 * a, a], [4 * b, b, b, 12 * b]), 2)) == [0, 3]
    strong = listening_factors(torch.tensor([1e-30, 1.0, 1e30], dtype=torch.float64), 10.0)
    assert bool(strong.isfinite().all()) and strong.tolist() == sorted(strong.tolist())


@pytest.mark.parametrize("groups", [{}, {"routing_groups": 2, "chosen_groups": 1, "experts_per_group": 2}])
def test_without_later_routers_or_exponent_it_is_gated_mass_or_count_guided(groups: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        mass, changes = torch.rand(2, 8, generator=generator, dtype=torch.float64).tolist()
        counts = torch.randint(0, 4, (8,), generator=generator).double().tolist()
        last = stats(mass, [0.0] * 8, counts, **groups)
        for keep, protected in ((4, frozenset[int]()), (4, frozenset({3})), (6, frozenset({0, 7}))):
            for found, exponent in ((stats(mass, changes, counts, **groups), 0.0), (last, 1.0)):
                made = plan(found, keep, protected, Options(exponent=exponent))
                assert made == gated_mass.plan(found, keep, protected)
                made = plan(found, keep, protected, Options("visits", exponent))
                assert made.groups == count_guided.plan(found, keep, protected).groups


# --- from what attribute writes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    small.save(folder / "model", num_hidden_layers=LAYERS)
    small.text_file(folder)
    small.save(folder / "zaya", "zaya")
    return folder


@pytest.fixture
def data(originals: Path) -> tuple[Any, ...]:
    return ("--calibration", originals / "calibration.txt", *SIZES)


@pytest.fixture
def attributions(monkeypatch: pytest.MonkeyPatch) -> list[Calibration]:
    """What each attribution from now on is shown."""
    seen: list[Calibration] = []
    real = measure.attribute

    def watched(model: Any, data: Calibration, *args: Any) -> Any:
        seen.append(data)
        return real(model, data, *args)

    monkeypatch.setattr(measure, "attribute", watched)
    return seen


@pytest.mark.full
@pytest.mark.parametrize(
    ("mass", "exponent"),
    [("gated-mass", 0.5), zoo.full("gated-mass", 2), zoo.full("visits", 1)],
)
def test_the_score_is_the_product_of_a_plain_forward_and_what_attribute_writes(
    mass: str, exponent: float, run: Run, originals: Path, data: tuple[Any, ...], tmp_path: Path
) -> None:
    assert run("attribute", originals / "model", "-o", tmp_path / "attribution", *data).status == 0
    content = json.loads((tmp_path / "attribution" / "attribution.json").read_text())
    changes = {
        (sender["module"], sender["number"]): sum(value or 0.0 for value in sender["rank_change"])
        for sender in content["senders"] if sender["kind"] == "expert"
    }  # fmt: skip
    options = ("--strategy", "hub-guided", "--option", f"mass={mass}", "--option", f"exponent={exponent}")
    made = run("plan", originals / "model", "-o", tmp_path / "plan.json", "--experts", 4, *options, *data)
    assert made.status == 0, made.err
    stock = AutoModelForCausalLM.from_pretrained(originals / "model")
    model = open_model(locate(str(originals / "model")), "float32", "cpu")
    read = calibrate(
        parse_sources([str(originals / "calibration.txt")]), load_tokenizer(originals / "model"), samples=12, length=32,
        seed=0, vocab=model.vocabulary,
    )  # fmt: skip
    calls = plain_calls(stock, model.architecture, (torch.cat(read.batches),))
    scores = {layer.name: naive_scores(stock, layer, calls[layer.name]) for layer in model.architecture.layers}
    for layer in pruned(json.loads((tmp_path / "plan.json").read_text()))["layers"]:
        name = layer["module"]
        heavy = scores[name]["gated-mass" if mass == "gated-mass" else "frequency"]
        effects = [changes[name, expert] for expert in range(8)]
        factor = [effect**exponent if any(effects) else 1.0 for effect in effects]
        ranked = sorted(range(8), key=lambda e: (-heavy[e] * factor[e], e))
        assert [group["members"] for group in layer["groups"]] == [[expert] for expert in sorted(ranked[:4])]
        assert any(effects) == (layer["layer"] < LAYERS - 1)


# --- who runs the attribution, and on what ----------------------------------------------------------------------------


@pytest.mark.full
def test_one_attribution_serves_hubs_strategies_and_all_rows(
    run: Run, originals: Path, data: tuple[Any, ...], attributions: list[Calibration], tmp_path: Path
) -> None:
    model, made = originals / "model", tmp_path / "plan.json"
    plain = ("plan", model, "-o", made, "--overwrite", "--experts", 4, *data, "--strategy")
    assert run(*plain, "gated-mass").status == 0
    assert run(*plain, "hub-guided", "--option", "exponent=0").status == 0 and not attributions
    for more in (("--protect", "auto"), (), ("--protect", "auto", "--sequential"), ("--correct", "ridge")):
        before = len(attributions)
        assert run(*plain, "hub-guided", *more).status == 0 and len(attributions) == before + 1
    assert [sum(map(len, seen.batches)) for seen in attributions] == [12, 12, 12, 10]  # a correction holds two out
    before = len(attributions)
    result = run(
        "compare", model, "--experts", "6,4", "--strategies", "hub-guided,gated-mass,hub-guided:exponent=2",
        "--correct", "none", "--random-seeds", 1, "--evaluation-samples", 2, "--protect", "auto", "--json", *data,
        "-o", tmp_path / "comparison",
    )  # fmt: skip
    assert result.status == 0 and len(attributions) == before + 1 and not attributions[-1].heldout


def test_what_cannot_be_attributed_is_refused(run: Run, originals: Path, data: tuple[Any, ...], tmp_path: Path) -> None:
    said = "strategy 'hub-guided' needs routing attribution, which others do not: ZayaForCausalLM cannot be attributed"
    arguments = ("--experts", 4, "--strategy", "hub-guided", *data)
    result = run("compress", originals / "zaya", "-o", tmp_path / "out", *arguments)
    refused(result, f"{said}: model.layers.0: its router's logits are not linear")
    more = ("--experts", 4, "--strategies", "hub-guided", "--evaluation-samples", 2, *data)
    refused(run("compare", originals / "zaya", "-o", tmp_path / "out", *more), said)
    assert names(tmp_path) == []
    assert run("compress", originals / "zaya", "-o", tmp_path / "out", *arguments, "--option", "exponent=0").status == 0


def test_all_plans_of_a_run_see_the_original_on_all_sources(originals: Path) -> None:
    """In order, and for each source alone: the same figures, those of the attribution itself."""
    model = open_model(locate(str(originals / "model")), "float32", "cpu")
    rows = batches(zoo.build("mixtral"), (2, 2, 1, 1), length=24)
    data = Calibration(tuple(rows), {"source": "random tokens"}, (0, 0, 1, 1), (0.5, 0.5), frozenset({1, 3}))
    fit = calibration([rows[0], rows[2]])
    expected = {layer.name: torch.zeros(8, dtype=torch.float64) for layer in model.architecture.layers}
    for sender in measure.attribute(model, fit, Silent()).of_kind("expert"):
        expected[sender.module][int(sender.number or 0)] = sum(value or 0.0 for value in sender.rank_change)
    seen: list[tuple[str, Tensor]] = []

    def listening(found: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> Any:
        seen.append((found.layer.name, found.rank_change.clone()))
        return keep_best(found, found.rank_change, keep, protected)

    spec = PruneSpec(Strategy("listening", listening, frozenset({"rank_change"})), 4)
    made = Planner(model, data, Silent()).plans([spec])
    assert len(seen) == LAYERS and len(made) == 1
    ordered = Planner(model, data, Silent()).plan_sequentially(spec, Correct("none"))
    assert len(seen) == 2 * LAYERS
    assert [layer.groups for layer in ordered.layers] == [layer.groups for layer in made[0].plan.layers]
    for name, found in seen:
        torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=0)
    with pytest.raises(CompressionError, match="calibration data; pass --calibration"):
        make_plan(model, spec.strategy, 4, {}, None, Silent())
