"""Every statistic against loops over what a whole stock model's modules saw; and that batches can be cut anyhow."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor.data.batches import sample_positions
from compressor.errors import CompressionError
from compressor.model.architecture import discover
from compressor.model.opened import OpenModel
from compressor.progress import Silent
from compressor.statistics import statistics as collecting
from compressor.statistics.meters import mix_tokens
from compressor.statistics.statistics import (
    ALL,
    STATISTICS,
    WEIGHTS,
    Collector,
    LayerStatistics,
    check_needs,
)
from tests.support import zoo
from tests.support.opened_models import (
    Calls,
    batches,
    calibration,
    hidden_states,
    one_expert,
    opened,
    plain_calls,
    statistics,
)
from tests.support.plans import plan_of
from tests.support.statistic_groups import DENSE, SAMPLED, SUMS

NAMES = [
    "mixtral", "qwen3_moe-norm_topk_false", "deepseek_v3", "gpt_oss", "gemma4", "zaya", "minimax_m2", "nemotron_h",
    "ernie4_5_vl_moe", "afmoe", "inkling", "deepseek_v4", "muse_spark",
]  # fmt: skip
SEVERAL = pytest.mark.parametrize("name", zoo.sweep(NAMES))
SAMPLE = 20  # of 36 tokens
SEED = 5
ONE_BY_ONE = SUMS - {  # the others: tests/strategies/test_deleting.py, steps/split/test_neurons.py
    "squared_deletion_sum", "pair_count", "pair_norm_sum", "pair_product_sum", "squared_neuron_sum",
}  # fmt: skip
DATA = ALL - {"weights", "heldout", "rank_change"}


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=2e-5)


def naive_sums(stock: Any, name: str, experts: int, calls: Calls, behind: Tensor) -> dict[str, Tensor]:
    """The sums of one layer, token by token and choice by choice; `behind` [T, H] are the decoder layer's outputs."""
    sums = {key: torch.zeros(experts, dtype=torch.float64) for key in ONE_BY_ONE}
    width = stock.get_submodule(name).down_proj.shape[2 if stock.get_submodule(name).is_transposed else 1]
    sums["squared_gate_output_sum"] = torch.zeros(experts, width, dtype=torch.float64)
    sums["modality_count"] = torch.zeros(experts, 2, dtype=torch.float64)
    if not calls.experts_arguments:
        return sums
    hidden, index, weights = calls.joined()
    outputs = [one_expert(stock.get_submodule(name), expert, hidden) for expert in range(experts)]
    for token in range(len(hidden)):
        for expert, weight in zip(index[token].tolist(), weights[token].tolist(), strict=True):
            if weight == 0.0:  # zaya's skip expert
                continue
            norm = float(outputs[expert][token].double().norm())
            sums["routed_count"][expert] += 1
            sums["modality_count"][expert, 0] += 1  # all is text
            sums["gate_weight_sum"][expert] += weight
            sums["norm_sum"][expert] += norm
            sums["squared_norm_sum"][expert] += norm**2
            sums["gated_norm_sum"][expert] += weight * norm
            sums["squared_gate_sum"][expert] += weight**2
            sums["squared_gate_output_sum"][expert] += weight**2 * outputs[expert][token].double()
            sums["squared_gated_norm_sum"][expert] += (weight * norm) ** 2
            sums["stream_energy_sum"][expert] += (weight * norm / float(behind[token].double().norm())) ** 2
    return sums


def probabilities(calls: Calls, family: str) -> Tensor:
    scores = torch.cat([output[0].reshape(-1, output[0].shape[-1]) for output in calls.router_outputs]).double()
    return scores if family == "gemma4" else scores.softmax(-1)  # gemma4's router hands on probabilities


@SEVERAL
def test_sums_equal_a_loop_over_a_whole_models_tokens(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock)
    found = statistics(model, ONE_BY_ONE, parts)
    behind, calls = hidden_states(stock, model.architecture, parts), plain_calls(stock, model.architecture, parts)
    assert set(found) == {layer.name for layer in model.architecture.layers}
    called = 0
    for layer in model.architecture.layers:
        expected, stats = (
            naive_sums(stock, layer.name, layer.experts, calls[layer.name], behind[layer.decoder_layer]),
            found[layer.name],
        )
        if calls[layer.name].router_outputs:
            expected["probability_sum"] = probabilities(calls[layer.name], name).sum(0)[: layer.experts]
            assert stats.tokens == 36
            called += 1
        else:
            assert stats.tokens == 0 and "vision" in layer.name
        for key, value in expected.items():
            assert getattr(stats, key).dtype == torch.float64
            close(getattr(stats, key), value)
    assert called == (2 if name == "ernie4_5_vl_moe" else len(model.architecture.layers))


@SEVERAL
def test_samples_are_the_same_rows_of_a_whole_models_tensors(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock)
    found = statistics(model, SAMPLED | DENSE, parts, SEED, SAMPLE)
    calls = plain_calls(stock, model.architecture, parts)
    rows = sample_positions(36, SAMPLE, SEED)
    for layer in model.architecture.layers:
        stats, experts = found[layer.name], stock.get_submodule(layer.name)
        if not calls[layer.name].experts_arguments:
            assert stats.inputs.shape[0] == stats.router_logits.shape[0] == stats.top_k_weights.shape[0] == 0
            assert stats.top_k_index.shape == (0, layer.top_k) and stats.top_k_index.dtype == torch.long
            assert stats.expert_outputs.shape[:2] == stats.mixed_outputs.shape[:2] == (layer.experts, 0)
            continue
        hidden, index, weights = calls[layer.name].joined()
        close(stats.inputs, hidden[rows])
        assert torch.equal(stats.top_k_index, index[rows])
        close(stats.top_k_weights, weights[rows])
        outputs = [output[0] for output in calls[layer.name].router_outputs]
        logits = torch.cat([output.reshape(-1, output.shape[-1]) for output in outputs])
        shares = probabilities(calls[layer.name], name)[rows]
        if logits.shape[1] == layer.experts:
            close(stats.router_logits.softmax(-1), shares)
        if name != "gemma4":
            close(stats.router_logits, logits[rows, : layer.experts])
        mixed = mix_tokens(hidden[rows], SEED)
        for expert in range(layer.experts):
            close(stats.expert_outputs[expert], one_expert(experts, expert, hidden[rows]))
            close(stats.mixed_outputs[expert], one_expert(experts, expert, mixed))


@pytest.mark.parametrize("name", zoo.sweep(but=zoo.LOOPED))
def test_the_stock_router_repeats_its_choices_from_the_sampled_arguments(name: str, tmp_path: Path) -> None:
    if name == "diffusion_gemma":
        pytest.skip("runs its experts on a canvas, not on the calibration tokens")
    stock, model = opened(name, tmp_path)
    needs = frozenset({"router_arguments", "top_k_index", "top_k_weights"})
    found = statistics(model, needs, batches(stock), SEED, SAMPLE)
    for layer in model.architecture.layers:
        stats, router = found[layer.name], stock.get_submodule(layer.router)
        if len(stats.top_k_index) == 0:
            continue
        positional, by_keyword = stats.router_arguments.positional, stats.router_arguments.by_keyword
        with torch.no_grad():
            _, weights, index, *_ = router(*(_own(stock, layer.block, value) for value in positional), **by_keyword)
        assert torch.equal(index.reshape(SAMPLE, -1), stats.top_k_index)
        close(weights.reshape(SAMPLE, -1), stats.top_k_weights)


def _own(stock: Any, block: str, value: Any) -> Any:
    """The stock model's tensor for one that the router was handed by the block, which is back on meta by now."""
    tensors = [*stock.get_submodule(block).parameters(), *stock.get_submodule(block).buffers()]
    if isinstance(value, Tensor) and value.device.type == "meta":
        (value,) = [tensor for tensor in tensors if tensor.shape == value.shape]
    return value


def test_a_bias_as_long_as_the_batch_is_not_taken_for_tokens(tmp_path: Path) -> None:
    """minimax_m2 hands its router the block's bias [E]; here a batch has E tokens too."""
    stock, model = opened("minimax_m2", tmp_path)
    parts = batches(stock, (1, 1), length=8)
    for stats in statistics(model, frozenset({"router_arguments"}), parts, sample_tokens=SAMPLE).values():
        hidden, bias = stats.router_arguments.positional
        assert hidden.shape[0] == 16
        assert bias.shape == (8,)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[OpenModel, Tensor]:
    stock, model = opened("deepseek_v3", tmp_path_factory.mktemp("cut"))
    return model, torch.cat(batches(stock, (6,)))


def _once(model: OpenModel, parts: Sequence[Tensor]) -> dict[str, LayerStatistics]:
    return statistics(model, DATA, parts, SEED, SAMPLE)


@pytest.mark.full
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.sets(st.integers(1, 5)))
def test_statistics_do_not_depend_on_how_batches_are_cut(whole: tuple[OpenModel, Tensor], cuts: set[int]) -> None:
    model, tokens = whole
    edges = [0, *sorted(cuts), 6]
    one = _once(model, [tokens])
    other = _once(model, [tokens[begin:end] for begin, end in pairwise(edges)])
    for name, stats in one.items():
        assert stats.tokens == other[name].tokens == 72
        assert torch.equal(stats.routed_count, other[name].routed_count)
        assert torch.equal(stats.top_k_index, other[name].top_k_index)
        for key in DATA - {"router_arguments"}:
            close(getattr(other[name], key), getattr(stats, key))
        (hidden,) = stats.router_arguments.positional
        (other_hidden,) = other[name].router_arguments.positional
        close(other_hidden, hidden)


@pytest.mark.parametrize(("name", "abandoned"), zoo.few([("mixtral", True), *((name, False) for name in NAMES)], 5))
def test_a_pass_leaves_the_stock_modules_as_they_were(name: str, abandoned: bool, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    run: Any = collecting.collect(model, DATA, calibration(batches(stock), SAMPLE), Silent())
    next(run)
    run.close() if abandoned else list(run)
    for module in model.partial.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "forward" not in vars(module)
    assert all(value.device.type == "meta" for value in model.partial.model.state_dict().values())


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "zaya"])
@torch.no_grad()
def test_a_batch_asks_the_device_for_no_number(name: str) -> None:
    """Tensors on meta have shapes alone: `.item()`, `.cpu()`, masks as indices, `nonzero` and the like all raise."""
    model: Any = zoo.build(name).to("meta", torch.bfloat16)
    model.set_experts_implementation("eager")
    layer = discover(model.config).layers[-1]
    collector = Collector(layer, model, DATA, SEED)
    ids = torch.zeros(2, 12, dtype=torch.long)
    hidden = torch.empty(*ids.shape, model.config.hidden_size, dtype=torch.bfloat16, device="meta")
    collector.observe(ids, torch.arange(3))
    model.get_submodule(layer.block)(hidden)
    collector.on_layer_output(hidden)
    collector.detach()
    assert collector.tokens.tolist() == [24]


def test_inputs_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    run: Any = collecting.collect(model, SUMS, calibration(batches(stock)), Silent())
    module = model.partial.model.get_submodule(model.architecture.decoder_layers[1])
    handle = module.register_forward_hook(lambda _, __, output: output * torch.inf)
    first = model.partial.model.get_submodule(model.architecture.layers[1].name)
    other = first.register_forward_pre_hook(lambda _, args: (args[0] * torch.inf, *args[1:]))
    with pytest.raises(CompressionError, match=r"inputs are not finite .* --dtype float32"):
        list(run)
    handle.remove()
    other.remove()


def test_weights_alone_run_no_forward_and_read_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = zoo.save("mixtral", tmp_path / "model")
    monkeypatch.setattr(type(stock), "forward", lambda *_, **__: pytest.fail("no forward is needed"))
    absent = str(tmp_path / "absent.txt")
    plan = plan_of(tmp_path / "model", strategy="model-centric", experts=4, calibration=absent, correct="none")
    assert plan.calibration is None
    assert len(plan.expert_plan.layers) == 2


def test_weights_are_the_live_modules_and_go_back_to_meta(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    count = 0
    for stats in collecting.collect(model, frozenset({"weights"}), None, Silent()):
        weights = stats.weights
        assert weights.experts is model.partial.model.get_submodule(stats.layer.name)
        assert torch.equal(weights.experts.down_proj, stock.get_submodule(stats.layer.name).down_proj)
        assert weights.smaller_router(3).weight.shape == (3, 32)
        count += 1
    assert count == 2
    assert all(value.device.type == "meta" for value in model.partial.model.state_dict().values())


def test_an_undeclared_statistic_is_an_error(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    for stats in statistics(model, frozenset({"routed_count"}), batches(stock)).values():
        with pytest.raises(
            CompressionError, match=r"'norm_sum' was not collected for .*experts; .*declare it in its NEEDS"
        ):
            _ = stats.norm_sum
        with pytest.raises(AttributeError):
            _ = stats.no_such_thing
        with pytest.raises(AttributeError):
            stats.tokens = 3  # type: ignore[misc]
        with pytest.raises(TypeError):
            stats.values["norm_sum"] = None  # type: ignore[index]


def test_an_unknown_need_is_refused_and_known_ones_are_described() -> None:
    with pytest.raises(
        CompressionError, match="'mine' needs the statistic 'routed_cuont', which does not exist; known"
    ):
        check_needs(frozenset({"weights", "routed_cuont"}), "mine")
    check_needs(ALL, "mine")
    assert {"weights"} == WEIGHTS and all(each.meaning and "|" not in each.meaning for each in STATISTICS.values())
