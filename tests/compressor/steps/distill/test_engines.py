"""Steps of a distillation: gradients are autograd's, Adam is the textbook's, LoRA is PEFT's, streamed or not."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from compressor.checkpoint.source import locate
from compressor.divergence import teacher_outputs
from compressor.errors import CompressionError
from compressor.model.opened import open_model
from compressor.steps.distill.engines import (
    Engine,
    InMemory,
    LayerState,
    TrainedLayer,
    kept_state,
    stored_dtypes,
    stored_tensors,
    trained_layers,
    update,
)
from compressor.steps.distill.options import Distill
from tests.compressor.model.test_streaming import loaded, loaded_units
from tests.support import quantized, small, zoo
from tests.support.opened_models import opened
from tests.support.small import tree
from tests.support.training_setups import Lesson, close, lesson, options, take_step


def stock_loss(made: Lesson, tokens: Tensor, weights: dict[str, float]) -> Tensor:
    """The loss of a step from stock outputs, in double precision, the whole divergence taken."""
    hidden: list[Any] = []
    last = made.model.architecture.decoder_layers[-1]
    handles = [
        model.get_submodule(last).register_forward_hook(lambda module, args, output: hidden.append(output))
        for model in (made.stock, made.stock_base)
    ]
    logits, wanted = (model(input_ids=tokens).logits.double() for model in (made.stock, made.stock_base))
    for handle in handles:
        handle.remove()
    ours, theirs = (value if isinstance(value, Tensor) else value[0] for value in hidden)
    logs, target = logits.log_softmax(-1), wanted.detach().log_softmax(-1)
    apart = (target.exp() * (target - logs)).sum(-1).mean()
    entropy = cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:])
    off = ((ours - theirs.detach()).square().sum((1, 2)) / theirs.detach().square().sum((1, 2))).mean()
    return (
        weights.get("kl", 1.0) * apart
        + weights.get("cross_entropy", 0.0) * entropy
        + weights.get("hidden_states", 0.0) * off
    )


SMALL = 0.01  # a loss whose gradients need no clipping


def first_gradients(engine: Engine, folder: Path) -> dict[str, Tensor]:
    """Every master's gradient in the first step of Adam, whose first moment is a tenth of it."""
    engine.save(folder)
    found = dict[str, Tensor]()
    for decoder_layer in engine.layers:
        moments = kept_state(folder, decoder_layer, torch.device("cpu")).moments
        found |= {name: 10 * moment["exp_avg"] for name, moment in moments.items()}
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "weights",
    [
        {"kl": SMALL},
        {"kl": 0.0, "cross_entropy": SMALL},
        {"kl": 0.5 * SMALL, "cross_entropy": 0.25 * SMALL, "hidden_states": 3 * SMALL},
        {"kl": 0.0, "hidden_states": SMALL},
    ],
)
def test_gradients_are_autograds_on_the_stock_model(
    weights: dict[str, float], stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_outputs, "KEPT", 96)  # all of the vocabulary
    made = lesson("mixtral", tmp_path)
    wish = options(train="all", stream=stream, optimizer="adam", tokens_per_step=8 * 12, **weights)
    engine, text = made.engine(wish), made.text(wish)
    take_step(engine, text, wish, 0, made.model)
    gradients = first_gradients(engine, tmp_path / "state")
    made.stock.requires_grad_(True)
    stock_loss(made, torch.cat([batch.tokens for batch in text.of_step(0, 8, 0)]), weights).backward()
    parameters = dict(made.stock.named_parameters())
    close(gradients, {name: parameters[name].grad for name in gradients})
    assert len(gradients) == sum(".layers." in name for name in parameters)


@pytest.mark.parametrize("name", ["mixtral", *map(zoo.full, ("deepseek_v3", "gpt_oss"))])
@pytest.mark.parametrize(
    ("method", "optimizer"), [("experts", "adam"), ("lora", "adafactor"), ("router", "adafactor"), ("lora", "adam")]
)
def test_streamed_training_is_that_in_memory(name: str, method: str, optimizer: str, tmp_path: Path) -> None:
    made = lesson(name, tmp_path)
    whole, layerwise = (
        made.trained(options(train=method, optimizer=optimizer, stream=stream), 3) for stream in (False, True)
    )
    close(layerwise, whole, 1e-5)
    before = {key: made.stock.get_parameter(key).detach() for key in whole}
    assert any(not torch.equal(value, before[key]) for key, value in whole.items())


def textbook_adam(value: Any, gradients: list[Any], rates: list[float]) -> Any:
    """Kingma and Ba, Algorithm 1."""
    first, second = np.zeros_like(value), np.zeros_like(value)
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        value = value - rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    return value


def test_adam_is_the_textbooks_on_gradients_clipped_for_the_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    masters = {"a": torch.randn(3, 4, generator=generator), "b": torch.randn(5, generator=generator)}
    gradients = [
        {name: scale * torch.randn(value.shape, generator=generator) for name, value in masters.items()}
        for scale in (0.01, 10.0, 0.1)
    ]
    rates, state = [0.1, 0.05, 0.01], LayerState({name: value.clone() for name, value in masters.items()})
    for own, rate in zip(gradients, rates, strict=True):
        update(state, own, "adam", rate)
    norms = [math.sqrt(sum(float(value.square().sum()) for value in own.values())) for own in gradients]
    assert norms[0] < 1 < norms[1]
    for name, value in masters.items():
        clipped = [own[name].double().numpy() / max(1, norm) for own, norm in zip(gradients, norms, strict=True)]
        expected = textbook_adam(value.double().numpy(), clipped, rates)
        np.testing.assert_allclose(state.masters[name].numpy(), expected, rtol=1e-4, atol=1e-6)


def test_adafactor_steps_are_as_long_as_the_rate_and_its_state_is_a_row_and_a_column() -> None:
    generator = torch.Generator().manual_seed(0)
    value = 0.001 * torch.randn(6, 40, 50, generator=generator)
    state = LayerState({"a": value.clone()})
    update(state, {"a": torch.randn(value.shape, generator=generator)}, "adafactor", 0.01)
    moved = float((state.masters["a"] - value).square().mean().sqrt())
    assert 0.008 < moved < 0.0101
    assert sum(own.numel() for own in state.moments["a"].values()) == 6 * (40 + 50) + 1


def test_a_streamed_step_holds_one_layer_and_leaves_nothing_loaded(tmp_path: Path) -> None:
    made, held = lesson("mixtral", tmp_path), list[list[str]]()
    wish = options(stream=True)
    engine, text = made.engine(wish), made.text(wish)
    watching = register_optimizer_step_pre_hook(lambda *_: held.append(sorted(loaded_units(made.model))))
    take_step(engine, text, wish, 0, made.model)
    watching.remove()
    assert held == [[decoder_layer] for decoder_layer in reversed(made.model.architecture.decoder_layers)]
    assert loaded(made.model.partial) == set()
    engine.save(tmp_path / "kept")
    before = tree(tmp_path / "kept")
    take_step(engine, text, wish, 1, made.model)  # which must not write into what was kept
    assert tree(tmp_path / "kept") == before


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("gate_up_proj", "down_proj")


def in_peft(stock: Any, masters: dict[str, torch.Tensor], rank: int) -> Any:
    """The stock model with PEFT's adapters on the same tensors, their factors ours."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(ATTENTION),
        target_parameters=[f"experts.{name}" for name in EXPERTS],
    )  # fmt: skip
    wrapped = get_peft_model(stock, config)
    for key, pair in factors(masters).items():
        first, second = module_of(wrapped, key)
        with torch.no_grad():
            first.weight.copy_(as_peft_first(pair[0]))
            second.weight.copy_(as_peft_second(pair[1]))
    return wrapped


def factors(named: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    keys = [name.removesuffix(".lora_A") for name in named if name.endswith(".lora_A")]
    return {key: (named[f"{key}.lora_A"], named[f"{key}.lora_B"]) for key in keys}


def as_peft_first(first: torch.Tensor) -> torch.Tensor:
    return first.reshape(-1, first.shape[-1])


def as_peft_second(second: torch.Tensor) -> torch.Tensor:
    return second if second.dim() == 2 else second.permute(1, 2, 0).reshape(second.shape[1], -1)


def module_of(wrapped: Any, key: str) -> tuple[Any, Any]:
    """PEFT's factors of a tensor: of a module's weight, or of one of the parameters that wrappers around it adapt."""
    name, _, parameter = key.rpartition(".")
    module = wrapped.base_model.model.get_submodule(name)
    while parameter != "weight" and module.parameter_name != parameter:
        module = module.base_layer
    return module.lora_A["default"], module.lora_B["default"]


def test_factors_make_the_model_and_get_the_gradients_that_they_do_in_peft(tmp_path: Path) -> None:
    made = lesson("mixtral", tmp_path)
    wish = options(train="lora", optimizer="adam", kl=0.0, cross_entropy=SMALL)
    engine, text = made.engine(wish), made.text(wish)
    assert isinstance(engine, InMemory)
    generator = torch.Generator().manual_seed(0)
    masters: dict[str, torch.Tensor] = {}
    for state in engine.states.values():
        for name, value in state.masters.items():
            if name.endswith(".lora_B"):
                value.copy_(0.3 * torch.randn(value.shape, generator=generator))
            masters[name] = value.clone()
    take_step(engine, text, wish, 0, made.model)
    gradients = first_gradients(engine, tmp_path / "state")
    wrapped = in_peft(made.stock, masters, wish.rank)
    (batch,) = text.of_step(0, wish.sequences, 0)
    output = wrapped(input_ids=batch.tokens, labels=batch.tokens)
    (SMALL * output.loss).backward()
    assert len(factors(masters)) == len(made.model.architecture.decoder_layers) * (len(ATTENTION) + len(EXPERTS))
    for key, pair in factors(gradients).items():
        first, second = module_of(wrapped, key)
        for found, expected in ((as_peft_first(pair[0]), first), (as_peft_second(pair[1]), second)):
            scale = float(expected.weight.grad.abs().max())
            torch.testing.assert_close(found, expected.weight.grad, rtol=1e-3, atol=1e-4 * scale, msg=key)
    merged = wrapped.merge_and_unload()
    for layer in engine.layers.values():
        for key, value in layer.values(engine.read, masters).items():
            torch.testing.assert_close(value, merged.get_parameter(key).detach(), rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 6)])
def test_a_weight_begins_as_it_is(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layer = TrainedLayer("layer", (), ("weight",))
    masters = layer.begin({"weight": weight}, 2, 1)
    assert torch.equal(layer.values({"weight": weight}, masters)["weight"], weight)
    first = masters["weight.lora_A"]
    assert first.abs().max() <= shape[-1] ** -0.5 and first.std() > 0.4 * shape[-1] ** -0.5


@pytest.mark.parametrize("name", zoo.sweep())
def test_tensors_that_were_not_changed_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    _, model = opened(name, tmp_path)
    if name == "diffusion_gemma":
        with pytest.raises(CompressionError, match="is shared by two layers"):
            trained_layers(model, Distill())
        return
    layers = trained_layers(model, Distill())
    dtypes = stored_dtypes(model, layers)
    model.partial.load(model.partial.keys_under(""))
    state, written = model.partial.model.state_dict(), set[str]()
    for layer in layers:
        for found, value in stored_tensors(model, {key: state[key] for key in layer.keys}, dtypes).items():
            assert torch.equal(value, model.checkpoint.read(found)), found
            written.add(found)
    experts = {entry for entry, role in model.layout.roles.items() if role.layer}
    buffers = {entry for entry in experts if model.partial.keys.targets[entry] not in dict(
        model.partial.model.named_parameters())}  # fmt: skip
    choosing = {entry for entry in experts if entry.endswith("expert_bias")}  # which no gradient reaches
    assert experts - written <= buffers | choosing and written


def test_a_stored_tensor_that_is_none_of_the_stock_names_is_told(tmp_path: Path) -> None:
    small.save(tmp_path)
    model = open_model(locate(str(tmp_path)), "float32", "cpu")
    name = next(name for name in model.checkpoint.tensors if name.endswith("w2.weight"))
    del model.checkpoint.tensors[name]
    with pytest.raises(CompressionError, match="is not stored as transformers would write it"):
        stored_dtypes(model, trained_layers(model, Distill()))


@pytest.mark.parametrize("save", [quantized.save_fp8, quantized.save_mxfp4, quantized.save_compressed_tensors])
def test_quantised_tensors_are_refused_by_name_and_plain_ones_beside_them_are_not(
    save: Callable[[Path], None], tmp_path: Path
) -> None:
    save(tmp_path)
    model = open_model(locate(str(tmp_path)), "auto", "cpu")
    with pytest.raises(CompressionError, match=r"tensor '\S+' is stored quantised.* train: router"):
        stored_dtypes(model, trained_layers(model, Distill()))
    router = stored_dtypes(model, trained_layers(model, Distill("router")))
    assert router and all(dtype.itemsize > 1 for dtype in router.values())
