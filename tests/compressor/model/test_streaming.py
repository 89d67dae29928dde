"""The streamed pass: what every experts module sees and returns is what it does in a whole stock model."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.loading import PartialModel
from compressor.model.moe_layer import decoder_layer_of
from compressor.model.opened import OpenModel, open_model
from compressor.model.streaming import LayerVisitor, Pass, Replay
from tests.support import zoo
from tests.support.audit import paths_of
from tests.support.opened_models import batches, logits, of_two_layers, opened, plain_calls, watch
from tests.support.sequential_runs import opened_wide, with_heldout

EVERY = pytest.mark.parametrize("name", zoo.sweep(but=zoo.LOOPED))


def loaded(partial: PartialModel) -> set[str]:
    """State-dict entries that hold values."""
    return {key for key, value in partial.model.state_dict().items() if value.device.type != "meta"}


def loaded_units(model: OpenModel) -> set[str]:
    layer_names = model.architecture.decoder_layers
    return {decoder_layer_of(key, layer_names) for key in loaded(model.partial)} - {""}


class Calling(LayerVisitor):
    """Calls functions by what they are to be called at."""

    def __init__(self, **functions: Callable[..., None]) -> None:
        self.functions = functions

    def _call(self, name: str, *args: Any) -> None:
        self.functions.get(name, lambda *_: None)(*args)

    def on_layer_loaded(self, decoder_layer: str) -> None:
        self._call("loaded", decoder_layer)

    def before_layer(self, decoder_layer: str, replay: Replay) -> None:
        self._call("before", decoder_layer, replay)

    def on_batch_start(self, batch: int) -> None:
        self._call("entering", batch)

    def on_layer_end(self, decoder_layer: str) -> None:
        self._call("passed", decoder_layer)


def stream(
    model: OpenModel, parts: tuple[Tensor, ...], activation_budget: int = 2**40, **functions: Callable[..., None]
) -> Generator[str, None, None]:
    layers = Pass(model, parts, activation_budget=activation_budget).layers
    return layers(Calling(**functions)) if functions else layers()


def check_equal(model: OpenModel, stock: Any, parts: tuple[Tensor, ...], **options: Any) -> None:
    """Stream, and compare every call of every layer, batch by batch, with the whole model's."""
    torch.manual_seed(7)  # diffusion_gemma draws the canvas that it fills in
    expected = plain_calls(stock, model.architecture, parts)
    seen = watch(model.partial.model, model.architecture.layers)
    torch.manual_seed(7)
    layer_names = list(stream(model, parts, **options))
    assert layer_names == [
        decoder_layer for decoder_layer in model.architecture.decoder_layers if decoder_layer in layer_names
    ]
    for name, calls in expected.items():
        assert len(seen[name].experts_outputs) == len(calls.experts_outputs), name
        for found, whole in zip(seen[name].experts_arguments, calls.experts_arguments, strict=True):
            for value, reference in zip(found, whole, strict=True):
                torch.testing.assert_close(value, reference, rtol=0, atol=5e-6)
        for found_output, output in zip(seen[name].experts_outputs, calls.experts_outputs, strict=True):
            torch.testing.assert_close(found_output, output, rtol=0, atol=5e-6)
    called = {layer.decoder_layer for layer in model.architecture.layers if expected[layer.name].experts_outputs}
    assert called <= set(layer_names)


@EVERY
def test_experts_see_and_return_what_they_do_in_a_whole_model(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    most: list[set[str]] = []
    check_equal(
        model, stock, batches(stock, (2, 1)),
        loaded=lambda decoder_layer: most.append(loaded_units(model)),
        entering=lambda batch: most.append(loaded_units(model)),
    )  # fmt: skip
    # by number: diffusion_gemma's encoder and decoder are the same weights under two names
    assert max(len({decoder_layer.rpartition(".")[2] for decoder_layer in layer_names}) for layer_names in most) == 1
    assert loaded(model.partial) == set()
    model.partial.resident = True
    for _ in range(2):  # the first one keeps what the second computes with
        check_equal(model, stock, batches(stock, (2, 1)))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "hy_v4", "openai_privacy_filter", "deepseek_v3"])
def test_in_bfloat16_as_the_stock_loader_casts(name: str, tmp_path: Path) -> None:
    """Which parameters stay in float32, and in what dtype hidden states arrive, is the stock loader's choice."""
    zoo.save(name, tmp_path)
    stock = getattr(transformers, zoo.family(name).model_class).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    model = open_model(locate(str(tmp_path)), "bfloat16", "cpu")
    check_equal(model, stock, batches(stock))


@pytest.mark.parametrize("name", ["mixtral", "mixtral-tied", "zaya", "qwen3_next", "gemma4"])
def test_hidden_states_that_wait_in_files_are_the_same(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock, (2, 1))
    with paths_of("tempfile.mkstemp") as spilled:
        check_equal(model, stock, parts, activation_budget=0)
    assert len(spilled) >= len(parts) * len({layer.decoder_layer for layer in model.architecture.layers})


def test_only_what_passes_the_budget_goes_to_files(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    parts = batches(stock, (1, 1, 1))
    one = parts[0].numel() * stock.config.hidden_size * 4
    with paths_of("tempfile.mkstemp") as spilled:
        list(stream(model, parts, activation_budget=2 * one))
    assert len(spilled) == len(model.architecture.decoder_layers)  # the third batch, before each layer


@pytest.mark.parametrize("name", ["mixtral", "mixtral-tied", "gemma4"])
def test_embeddings_and_head_are_not_held_while_layers_pass(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    outside: list[set[str]] = []

    def note(decoder_layer: str) -> None:
        outside.append({key for key in loaded(model.partial) if not key.startswith(f"{decoder_layer}.")})

    whole, reached = model.partial.model, list[str]()
    for part in (name for name in ("model.norm", "lm_head") if name in dict(whole.named_modules())):
        whole.get_submodule(part).register_forward_hook(lambda *_, part=part: reached.append(part))
    list(stream(model, batches(stock), loaded=note))
    vocabulary = stock.get_input_embeddings().weight.shape
    assert all(whole.get_parameter(key).shape != vocabulary for keys in outside for key in keys if "weight" in key)
    assert len(outside) == len(model.architecture.decoder_layers) and reached == []


def test_only_layers_up_to_the_last_wanted_are_loaded(tmp_path: Path) -> None:
    stock, model = opened("qwen3_moe-sparse_step", tmp_path)
    layer_names, entered = model.architecture.decoder_layers, list[str]()
    calling = Calling(loaded=entered.append)
    passed = list(Pass(model, batches(stock), wanted={layer_names[1]}).layers(calling))
    assert passed == entered == list(layer_names[:2])
    assert loaded(model.partial) == set()


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("how", ["close", "consumer", "loaded", "before", "entering", "passed"])
def test_nothing_stays_loaded_when_the_consumer_stops_or_fails(how: str, tmp_path: Path) -> None:
    stock, model = opened("mixtral-tied", tmp_path)
    attached = hooks(model.partial.model)

    def fail(*_: Any) -> None:
        if loaded_units(model):
            raise RuntimeError("out of luck")

    if how in ("close", "consumer"):
        run = stream(model, batches(stock))
        next(run)
        assert loaded_units(model) == {model.architecture.decoder_layers[0]}
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
    parts = [torch.tensor([[2]]), torch.tensor([[3]])]
    with pytest.raises(CompressionError, match=r"different ways through the model at layers\.0"):
        Pass(of_two_layers(Fork()), parts, wanted={"layers.1"}).run()


def test_a_pass_reports_its_layers_and_leaves_the_random_state_alone(tmp_path: Path) -> None:
    stock, model = opened("qwen3_moe-sparse_step", tmp_path)
    layer_names, drawn, reported = model.architecture.decoder_layers, list[float](), list[Any]()
    drawing = Calling(passed=lambda decoder_layer: drawn.append(float(torch.rand(()))))

    class Listening:
        def start(self, phase: str, total: int) -> None:
            reported.append((phase, total))

        def advance(self, detail: str) -> None:
            reported.append(detail)

    torch.manual_seed(1)
    expected = float(torch.rand(()))
    torch.manual_seed(1)
    for _ in range(2):
        Pass(model, batches(stock), Listening(), "try", seed=5, wanted=layer_names[1:2]).run(drawing)
    assert float(torch.rand(())) == expected
    torch.manual_seed(5)
    assert drawn == 2 * [float(torch.rand(())) for _ in range(2)]
    assert reported == 2 * [("try", 2), *layer_names[:2]]


def test_batches_of_an_evaluation_come_last_and_go_to_the_end(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    one, two, three = batches(stock, (1, 1, 2))
    found = logits(Pass(model, [one, two, three], finishing=[2]))
    assert list(found) == [2]
    torch.testing.assert_close(found[2], stock(input_ids=three).logits, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", sorted(zoo.LOOPED))
def test_layers_that_run_twice_give_the_stock_logits_or_are_refused(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock, (1, 2))
    found = logits(Pass(model, parts, to_end=True))
    for number, tokens in enumerate(parts):
        torch.testing.assert_close(found[number], stock(input_ids=tokens).logits, rtol=0, atol=2e-6)
    with pytest.raises(CompressionError, match=r"runs model\.layers\.1 more than once .* needs no calibration"):
        Pass(model, parts).run(Calling(passed=lambda decoder_layer: None))
    assert loaded(model.partial) == set()


@pytest.mark.parametrize(
    "name", ["zaya", "deepseek_v4", "qwen3_next", "jamba", "kimi_linear", "minimax", "lfm2_moe", "granitemoehybrid"]
)
def test_replays_show_what_a_plain_forward_does_and_leave_no_trace(name: str, tmp_path: Path) -> None:
    """Every layer replayed twice: state that a forward leaves behind would show."""
    stock, model = opened_wide(name, tmp_path)
    parts = with_heldout(stock).batches
    expected = plain_calls(stock, model.architecture, parts)
    seen = watch(model.partial.model, model.architecture.layers)
    wanted = {layer.decoder_layer for layer in model.architecture.layers}
    twice = Calling(before=lambda decoder_layer, replay: [replay(range(len(parts))) for _ in range(2)])
    Pass(model, parts, wanted=wanted).run(twice)
    for layer, calls in expected.items():
        assert len(seen[layer].experts_outputs) == 3 * len(parts), layer
        for found, plain in zip(seen[layer].experts_outputs, 3 * calls.experts_outputs, strict=True):
            torch.testing.assert_close(found, plain, rtol=0, atol=2e-6)
