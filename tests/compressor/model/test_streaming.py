"""The streamed pass: what every experts module sees and returns is what it does in a whole stock model."""

from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.loading import PartialModel
from compressor.model.opened import OpenModel, open_model
from compressor.model.streaming import _Spill, stream_layers
from tests import zoo
from tests.opened import batches, opened, plain_calls, watch

EVERY = pytest.mark.parametrize("name", [*zoo.FAMILIES, *zoo.VARIANTS])
SOME = pytest.mark.parametrize("name", ["mixtral", "mixtral-tied", "zaya", "qwen3_next", "gemma4"])


def loaded(partial: PartialModel) -> set[str]:
    """State-dict entries that hold values."""
    return {key for key, value in partial.model.state_dict().items() if value.device.type != "meta"}


def loaded_units(model: OpenModel) -> set[str]:
    return {unit for unit in model.architecture.units for key in loaded(model.partial) if key.startswith(f"{unit}.")}


def stream(model: OpenModel, parts: tuple[Tensor, ...], **options: Any) -> Generator[str, None, None]:
    wanted = {layer.unit for layer in model.architecture.layers}
    return stream_layers(model.partial, parts, model.architecture.units, wanted, **options)


def check_equal(model: OpenModel, stock: Any, parts: tuple[Tensor, ...], **options: Any) -> None:
    """Stream, and compare every call of every layer, batch by batch, with the whole model's."""
    torch.manual_seed(7)  # diffusion_gemma draws the canvas that it fills in
    expected = plain_calls(stock, model.architecture, parts)
    seen = watch(model.partial.model, model.architecture.layers)
    torch.manual_seed(7)
    units = list(stream(model, parts, **options))
    assert units == [unit for unit in model.architecture.units if unit in units]
    for name, calls in expected.items():
        assert len(seen[name].experts_outputs) == len(calls.experts_outputs), name
        for found, whole in zip(seen[name].experts_arguments, calls.experts_arguments, strict=True):
            for value, reference in zip(found, whole, strict=True):
                torch.testing.assert_close(value, reference, rtol=0, atol=2e-6)
        for found_output, output in zip(seen[name].experts_outputs, calls.experts_outputs, strict=True):
            torch.testing.assert_close(found_output, output, rtol=0, atol=2e-6)
    called = {layer.unit for layer in model.architecture.layers if expected[layer.name].experts_outputs}
    assert called <= set(units)


@EVERY
def test_experts_see_and_return_what_they_do_in_a_whole_model(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    most: list[set[str]] = []
    check_equal(
        model, stock, batches(stock, (2, 1)),
        before=lambda unit: most.append(loaded_units(model)),
        entering=lambda batch: most.append(loaded_units(model)),
    )  # fmt: skip
    # by number: diffusion_gemma's encoder and decoder are the same weights under two names
    assert max(len({unit.rpartition(".")[2] for unit in units}) for units in most) == 1
    assert loaded(model.partial) == set()


@SOME
@pytest.mark.parametrize("sizes", [(1,), (4,), (1, 1, 1, 1), (1, 2, 1)])
def test_one_batch_or_many_of_one_sequence_or_many(name: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    check_equal(model, stock, batches(stock, sizes))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "hy_v4", "openai_privacy_filter", "deepseek_v3"])
def test_in_bfloat16_as_the_stock_loader_casts(name: str, tmp_path: Path) -> None:
    """Which parameters stay in float32, and in what dtype hidden states arrive, is the stock loader's choice."""
    zoo.save(name, tmp_path)
    stock = getattr(transformers, zoo.family(name).model_class).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    model = open_model(locate(str(tmp_path)), "bfloat16", "cpu")
    check_equal(model, stock, batches(stock))


@SOME
def test_hidden_states_that_wait_in_files_are_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spilled: list[int] = []
    original = _Spill._to_file

    def to_file(value: Tensor) -> None:
        spilled.append(value.numel())
        original(value)

    monkeypatch.setattr(_Spill, "_to_file", staticmethod(to_file))
    stock, model = opened(name, tmp_path)
    parts = batches(stock, (2, 1))
    check_equal(model, stock, parts, activation_budget=0)
    assert len(spilled) >= len(parts) * len({layer.unit for layer in model.architecture.layers})


def test_only_what_passes_the_budget_goes_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spilled: list[int] = []
    monkeypatch.setattr(_Spill, "_to_file", staticmethod(lambda value: spilled.append(value.numel())))
    stock, model = opened("mixtral", tmp_path)
    parts = batches(stock, (1, 1, 1))
    one = parts[0].numel() * stock.config.hidden_size * 4
    list(stream(model, parts, activation_budget=2 * one))
    assert len(spilled) == len(model.architecture.units)  # the third batch, before each layer


@pytest.mark.parametrize("name", ["mixtral", "mixtral-tied", "gemma4"])
def test_embeddings_and_head_are_not_held_while_layers_pass(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    outside: list[set[str]] = []

    def note(unit: str) -> None:
        outside.append({key for key in loaded(model.partial) if not key.startswith(f"{unit}.")})

    list(stream(model, batches(stock), before=note))
    whole = model.partial.model
    vocabulary = stock.get_input_embeddings().weight.shape
    assert all(whole.get_parameter(key).shape != vocabulary for keys in outside for key in keys if "weight" in key)
    assert len(outside) == len(model.architecture.units)


def test_streaming_twice_gives_the_same(tmp_path: Path) -> None:
    stock, model = opened("deepseek_v3", tmp_path)
    check_equal(model, stock, batches(stock))
    for module in stock.modules():
        module._forward_hooks.clear()
    for module in model.partial.model.modules():
        module._forward_hooks.clear()
    check_equal(model, stock, batches(stock))


def test_only_layers_up_to_the_last_wanted_are_loaded(tmp_path: Path) -> None:
    stock, model = opened("qwen3_moe-sparse_step", tmp_path)
    units, entered = model.architecture.units, list[str]()
    passed = list(stream_layers(model.partial, batches(stock), units, {units[1]}, before=entered.append))
    assert passed == entered == list(units[:2])
    assert loaded(model.partial) == set()


@pytest.mark.parametrize("name", ["mixtral", "mixtral-tied"])
def test_no_batch_goes_on_to_the_head(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    whole = model.partial.model
    reached: list[str] = []
    for part in ("model.norm", "lm_head"):
        whole.get_submodule(part).register_forward_hook(lambda *_, part=part: reached.append(part))
    assert len(list(stream(model, batches(stock)))) == len(model.architecture.units)
    assert reached == []


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("how", ["close", "consumer", "before", "entering"])
def test_nothing_stays_loaded_when_the_consumer_stops_or_fails(how: str, tmp_path: Path) -> None:
    stock, model = opened("mixtral-tied", tmp_path)
    attached = hooks(model.partial.model)

    def fail(*_: Any) -> None:
        if loaded_units(model):
            raise RuntimeError("out of luck")

    if how in ("close", "consumer"):
        run = stream(model, batches(stock))
        next(run)
        assert loaded_units(model) == {model.architecture.units[0]}
        if how == "close":
            run.close()
        else:
            with pytest.raises(RuntimeError, match="out of luck"):
                run.throw(RuntimeError("out of luck"))
    else:
        with pytest.raises(RuntimeError, match="out of luck"):
            list(stream(model, batches(stock), **{how: fail}))
    assert loaded(model.partial) == set()
    assert hooks(model.partial.model) == attached
    check_equal(model, stock, batches(stock))  # and it can be run again


class Fork(nn.Module):
    """Two layers, the first of which only an even token visits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        hidden: Tensor = self.embed(input_ids)
        return self.layers[1](self.layers[0](hidden) if int(input_ids[0, 0]) % 2 == 0 else hidden)  # type: ignore[no-any-return]


def test_batches_that_take_different_ways_are_refused() -> None:
    nothing: Any = lambda *_: ()  # noqa: E731
    partial: Any = SimpleNamespace(
        model=Fork(), device=torch.device("cpu"), load=nothing, release=nothing, keys_under=nothing, tied={}
    )
    parts = [torch.tensor([[2]]), torch.tensor([[3]])]
    with pytest.raises(CompressionError, match=r"different ways through the model at layers\.0"):
        list(stream_layers(partial, parts, ("layers.0", "layers.1"), {"layers.1"}))
