"""LoRA on weights as they are, against PEFT's modules: the same factors, the same model, the same gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.steps.distill.engines import InMemory, begin_factors, merged
from tests.lessons import lesson, note_gradients, options, take_step

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


def test_factors_make_the_model_and_get_the_gradients_that_they_do_in_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients, made = note_gradients(monkeypatch), lesson("mixtral", tmp_path)
    wish = options(train="lora", kl=0.0, cross_entropy=1.0)
    engine, text = made.engine(wish), made.text(wish)
    assert isinstance(engine, InMemory)
    generator = torch.Generator().manual_seed(0)
    masters: dict[str, torch.Tensor] = {}
    for state in engine.states.values():
        for name, value in state.masters.items():
            if name.endswith(".lora_B"):
                value.copy_(0.3 * torch.randn(value.shape, generator=generator))
        masters.update(state.masters)
    take_step(engine, text, wish, 0, made.model)
    wrapped = in_peft(made.stock, masters, wish.rank)
    (batch,) = text.of_step(0, wish.sequences, 0)
    output = wrapped(input_ids=batch.tokens, labels=batch.tokens)
    output.loss.backward()
    assert len(factors(masters)) == len(made.model.architecture.units) * (len(ATTENTION) + len(EXPERTS))
    for key, pair in factors(gradients).items():
        first, second = module_of(wrapped, key)
        for found, expected in ((as_peft_first(pair[0]), first), (as_peft_second(pair[1]), second)):
            scale = float(expected.weight.grad.abs().max())
            torch.testing.assert_close(found, expected.weight.grad, rtol=1e-3, atol=1e-4 * scale, msg=key)
    merged = wrapped.merge_and_unload()
    for layer in engine.layers.values():
        for key, value in layer.values(engine.read, engine.states[layer.unit].masters).items():
            torch.testing.assert_close(value, merged.get_parameter(key).detach(), rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 6)])
def test_a_weight_begins_as_it_is(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    first, second = begin_factors(shape, 2, torch.Generator().manual_seed(1))
    assert torch.equal(merged(weight, first, second), weight)
    assert first.abs().max() <= shape[-1] ** -0.5 and first.std() > 0.4 * shape[-1] ** -0.5
