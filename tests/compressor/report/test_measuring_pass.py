from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compressor
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Silent
from compressor.recipe.registry import load_strategy
from compressor.report.data import LayerMeasures
from compressor.report.measuring import measure_layers, similarity_of
from tests.support import zoo
from tests.support.opened_models import batches, calibration, opened, plain_calls
from tests.support.plans import Decided, by_hand, make_plan

CASES = {  # the strategy that plans, by family
    "mixtral": "reap",
    "qwen3_moe": "hc-smoe",
    "deepseek_v3": "model-centric",  # routing groups, a shared expert, a dense layer
    "gpt_oss": "reap",  # biases
    "zaya": "hc-smoe",  # a skip expert, and a router state that goes from layer to layer
    "gemma4": "reap",  # the decoder layer itself holds router and experts
    "ernie4_5_vl_moe": "model-centric",  # a block that works on tokens laid end to end, and one without tokens
    "mixtral-tied": "model-centric",
    "nemotron_h": "reap",
}


@dataclass(frozen=True)
class Case:
    stock: Any
    model: OpenModel
    small: Any
    out: OpenModel
    plan: Decided
    parts: tuple[Tensor, ...]

    def layers(self, source: OpenModel | None = None) -> Iterator[LayerMeasures]:
        base, chosen = source or self.model, similarity_of(self.plan)
        return measure_layers(self.out, base, self.parts, chosen, Silent())

    def measured(self) -> dict[str, LayerMeasures]:
        return {layer.module: layer for layer in self.layers()}


def make_case(name: str, folder: Path, strategy: str, keep: int = 4) -> Case:
    stock, model = opened(name, folder / "in")
    parts = batches(stock)
    plan = make_plan(model, load_strategy(strategy), keep, {}, calibration(parts), Silent())
    compressor.apply(by_hand(plan), folder / "out", model=str(folder / "in"))
    small = zoo.reload(name, folder / "out")
    return Case(stock, model, small, open_model(locate(str(folder / "out")), "float32", "cpu"), plan, parts)


@pytest.fixture(scope="module", params=zoo.few(CASES, 4))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp(request.param), CASES[request.param])


def counted(model: Any, architecture: Any, parts: Sequence[Tensor]) -> dict[str, list[float]]:
    """Visits of each expert, one choice at a time, of a plain forward of the whole model."""
    found = {}
    for name, calls in plain_calls(model, architecture, parts).items():
        counts = [0] * architecture.experts
        for _, index, weights in calls.experts_arguments:
            for expert, weight in zip(index.flatten().tolist(), weights.flatten().tolist(), strict=True):
                counts[expert] += weight != 0
        found[name] = [count / max(sum(counts), 1) for count in counts]
    return found


@dataclass
class Call:
    args: Any
    kwargs: Any
    output: Any


@torch.no_grad()
def calls_of(model: nn.Module, names: Sequence[str], run: Callable[[], Any]) -> dict[str, list[Call]]:
    seen: dict[str, list[Call]] = {name: [] for name in names}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda module, args, kwargs, output, name=name: seen[name].append(Call(args, kwargs, output)),
            with_kwargs=True,
        )
        for name in names
    ]
    run()
    for handle in handles:
        handle.remove()
    return seen


def first(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output[0]
    return found


def relative(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Error of (source, ours)."""
    y, z = (torch.cat([first(pair[n]).reshape(-1, 32) for pair in pairs]).double() for n in (0, 1))
    return float((y - z).square().sum() / y.square().sum())


@torch.no_grad()
def block_errors(case: Case, layer: MoeLayer) -> float | None:
    """The output's block on what the stock block was called with; where it is the whole layer, its experts' part."""
    inside = layer.block == layer.decoder_layer
    names = [layer.block, layer.name]

    def forward() -> None:
        for tokens in case.parts:
            case.stock(input_ids=tokens, use_cache=False)

    stock = calls_of(case.stock, names, forward)

    def again() -> None:
        for call in stock[layer.block]:
            case.small.get_submodule(layer.block)(*call.args, **call.kwargs)

    small = calls_of(case.small, names, again)
    key = layer.name if inside else layer.block
    pairs = [(one.output, two.output) for one, two in zip(stock[key], small[key], strict=True)]
    return relative(pairs) if pairs and first(pairs[0][0]).numel() else None


def test_measures_are_those_of_whole_models_in_memory(case: Case) -> None:
    """Visits as a plain forward counts them, and errors of the output's own block."""
    before = counted(case.stock, case.model.architecture, case.parts)
    after = counted(case.small, case.out.architecture, case.parts)
    found = case.measured()
    assert list(found) == [layer.name for layer in case.model.architecture.layers]
    for layer in case.model.architecture.layers:
        measured, wanted = found[layer.name], block_errors(case, layer)
        assert measured.visits_before == pytest.approx(before[layer.name], abs=1e-6)
        assert measured.visits_after == pytest.approx(after[layer.name], abs=1e-6)
        assert sum(measured.visits_before or ()) == pytest.approx(0 if "vision" in layer.name else 1, abs=1e-5)
        if wanted is None:
            assert measured.error is None
        else:
            assert measured.error == pytest.approx(wanted, rel=1e-3, abs=1e-6) and wanted > 1e-3


def test_without_the_source_the_visits_after_are_still_measured(case: Case) -> None:
    similarity = similarity_of(case.plan)
    alone = {each.module: each for each in measure_layers(case.out, None, case.parts, similarity, Silent())}
    both = case.measured()
    assert {name: layer.visits_after for name, layer in alone.items()} == {
        name: layer.visits_after for name, layer in both.items()
    }
    assert all(layer.error is None and layer.visits_before is None for layer in alone.values())


@pytest.mark.parametrize(
    "name", zoo.few(["qwen3_moe", "gemma4", "ernie4_5_vl_moe", "mixtral-tied", "diffusion_gemma"], 2)
)
def test_keeping_everything_changes_nothing(name: str, tmp_path: Path) -> None:
    for layer in make_case(name, tmp_path, "model-centric", 8).measured().values():
        assert layer.visits_before == layer.visits_after
        if "vision" in layer.module:
            assert layer.visits_before == (0.0,) * 8
        else:
            assert layer.error == pytest.approx(0, abs=1e-12)


def test_one_layer_of_each_model_is_in_memory(tmp_path: Path) -> None:
    case = make_case("mixtral", tmp_path, "reap")
    loaded: list[set[str]] = []
    for _ in case.layers():
        for model in (case.model, case.out):
            held = model.partial.model.named_parameters()
            loaded.append({name.split(".")[2] for name, value in held if ".layers." in name and not value.is_meta})
    assert loaded == [{"0"}, set(), {"1"}, set()]  # the output's is gone when all batches have passed
    for model in (case.model, case.out):
        assert all(value.is_meta for value in model.partial.model.parameters())
        assert not any(module._forward_hooks for module in model.partial.model.modules())


def test_models_of_different_depth_are_refused(tmp_path: Path) -> None:
    case = make_case("mixtral", tmp_path, "reap")
    zoo.build("mixtral", num_hidden_layers=1).save_pretrained(tmp_path / "flat")
    flat = open_model(locate(str(tmp_path / "flat")), "float32", "cpu")
    with pytest.raises(CompressionError, match="flat and out have different layers"):
        list(case.layers(flat))
