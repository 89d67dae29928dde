"""Weights of tokens by the hidden states around a layer, and targets on the way to the base's own, by whole models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer
from compressor.steps.correct import sequential
from compressor.steps.correct.cut_layer import Recording
from compressor.steps.correct.options import Correct
from tests.support import zoo
from tests.support.cut_layers import cut_again, cut_case, stock_output
from tests.support.opened_models import hidden_states
from tests.support.sequential_runs import drops, keeps, opened_wide, run, whole_plan, with_heldout
from tests.support.surgery_reference import cut

FAMILIES = ["mixtral", "deepseek_v3", "gpt_oss", "granitemoe"]
SEVERAL = pytest.mark.parametrize("name", zoo.sweep([*FAMILIES, "gemma4"]))
JOINED = pytest.mark.parametrize("name", zoo.sweep(FAMILIES))


def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recording]:
    """What passes in order record from now on, by layer; nothing is corrected."""
    found = dict[str, Recording]()

    def note(model: Any, layer: MoeLayer, recording: Recording, *more: Any) -> dict[str, Any]:
        found[layer.name] = recording
        return {}

    monkeypatch.setattr(sequential, "correct_layer", note)
    return found


@SEVERAL
def test_tokens_weigh_by_the_hidden_states_of_a_whole_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, model = opened_wide(name, tmp_path)
    data, found = with_heldout(stock), recorded(monkeypatch)
    run(model, keeps(model.architecture), data, correction=Correct(method="ridge"))
    behind = hidden_states(stock, model.architecture, data.batches)
    for layer in model.architecture.layers:
        expected = 1 / behind[layer.decoder_layer].norm(dim=-1) ** 2
        torch.testing.assert_close(found[layer.name].weights, expected, rtol=1e-4, atol=0)


def base_on(stock: PreTrainedModel, small: PreTrainedModel, layer: MoeLayer, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [T, H] of the base's experts, and of its decoder layer, on what enters this layer of a smaller model."""
    called, outputs = list[Any](), list[Tensor]()

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    def note(module: Any, args: Any, kwargs: Any) -> None:
        called.append(([copied(value) for value in args], {key: copied(value) for key, value in kwargs.items()}))

    handle = small.get_submodule(layer.decoder_layer).register_forward_pre_hook(note, with_kwargs=True)
    watching = stock.get_submodule(layer.name).register_forward_hook(lambda _, __, output: outputs.append(output))
    with torch.no_grad():
        small(input_ids=ids, use_cache=False)
        ((args, kwargs),) = called
        hidden = stock.get_submodule(layer.decoder_layer)(*args, **kwargs)
    handle.remove()
    watching.remove()
    hidden = hidden if isinstance(hidden, Tensor) else hidden[0]
    return outputs[0].flatten(0, -2), hidden.flatten(0, -2)


@JOINED
def test_targets_go_toward_the_hidden_states_of_a_whole_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, model = opened_wide(name, tmp_path)
    data, plans, found = with_heldout(stock), drops(model.architecture), recorded(monkeypatch)
    run(model, plans, data, correction=Correct(method="ridge", toward=0.7))
    small = cut(stock, zoo.family(name).count_field, whole_plan(model, plans).to_dict())
    own = hidden_states(stock, model.architecture, data.batches)
    factor = getattr(stock.config, "residual_multiplier", 1.0)
    moved = 0.0
    for layer in model.architecture.layers:
        pairs = [base_on(stock, small, layer, batch) for batch in data.batches]
        output, hidden = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        shift = 0.7 * (own[layer.decoder_layer] - hidden) / factor
        torch.testing.assert_close(found[layer.name].outputs, output + shift, rtol=1e-3, atol=1e-4)
        moved = max(moved, float(shift.abs().max()))
    assert moved > 1e-2  # the smaller model's hidden states are elsewhere


@pytest.mark.parametrize(("name", "toward"), [("deepseek_v3", 0.5), ("gemma4", 0.0), ("hy_v4", 0.0)])
def test_targets_go_half_way_by_default_where_there_is_a_way(
    name: str, toward: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, model = opened_wide(name, tmp_path)
    data, plans, found = with_heldout(stock), drops(model.architecture), recorded(monkeypatch)
    made = run(model, plans, data, correction=Correct(method="ridge"))
    outputs = {layer: recording.outputs for layer, recording in found.items()}
    run(model, plans, data, correction=Correct(method="ridge", toward=toward))
    for layer, recording in found.items():
        assert torch.equal(recording.outputs, outputs[layer])
        assert made[layer].figures["correction"].get("toward", 0.0) == toward


@pytest.mark.parametrize("name", ["gemma4", "hy_v4"])
def test_an_output_that_passes_a_norm_is_refused(name: str, tmp_path: Path) -> None:
    stock, model = opened_wide(name, tmp_path)
    with pytest.raises(CompressionError, match=r"leave out correct\.toward"):
        run(model, drops(model.architecture), with_heldout(stock), correction=Correct(method="ridge", toward=0.5))


def test_an_error_counts_tokens_by_these_weights() -> None:
    found = cut_case("mixtral", heaviest=9)
    cut_layer, rows = cut_again(found), found.heldout
    weights, before = found.recording.weights, found.recording.outputs[rows].double()
    gaps = (stock_output(found, rows)[2].double() - before).square().sum(-1)
    own = weights[rows].double()
    expected = float((own * gaps).sum() / (own * before.square().sum(-1)).sum())
    assert cut_layer.error(rows) == pytest.approx(expected, rel=1e-5)
    scaled = cut_layer.token_weights(rows)
    torch.testing.assert_close(scaled / scaled.sum(), (own / own.sum()).float())
