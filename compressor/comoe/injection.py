"""Putting LoRA experts beside the linear layers of any causal language model, dense or Mixture-of-Experts."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from compressor.comoe.layer import LoraExperts, comoe_layers
from compressor.comoe.options import TARGETS, ComoeConfig
from compressor.errors import CompressionError

Model = TypeVar("Model", bound=nn.Module)


def inject(
    model: Model,
    r: int = 16,
    experts: int = 4,
    top_k: int = 2,
    targets: Sequence[str] = TARGETS,
    *,
    alpha: float | None = None,
    dropout: float = 0.05,
    seed: int = 0,
) -> Model:
    """Put LoRA experts with a router beside every `nn.Linear` whose name ends with a target; all else is frozen.

    The model is changed in place and returned; what it computes is the same until it is trained. `alpha` is 2 r by
    default. Raises `CompressionError` where a target names no layer, or the model has experts of this kind already.
    """
    return inject_config(model, ComoeConfig(r, experts, top_k, tuple(targets), alpha, dropout, seed))


def inject_config(model: Model, config: ComoeConfig) -> Model:
    """The same, from a config."""
    refuse_injected(model)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in config.targets:
        if not any(_ends_with(name, target) for name in linear):
            ends = sorted({name.rpartition(".")[2] for name in linear})
            known = f"they end with {', '.join(ends)}" if ends else "it has none"
            raise CompressionError(f"no linear layer of the model has a name that ends with {target!r}; {known}")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(config.seed)
    for name in linear:
        if any(_ends_with(name, target) for target in config.targets):
            parent, _, last = name.rpartition(".")
            base = model.get_submodule(name)
            assert isinstance(base, nn.Linear)
            made = LoraExperts(base, config, generator)
            setattr(model.get_submodule(parent), last, made.train(base.training))
    return model


def refuse_injected(model: nn.Module) -> None:
    """Refuse a model that has LoRA experts."""
    if comoe_layers(model):
        raise CompressionError("the model has LoRA experts already; load it anew before putting others in")


def _ends_with(name: str, target: str) -> bool:
    """Whether the last parts of a module's name are the target's."""
    return f".{name}".endswith(f".{target}")
