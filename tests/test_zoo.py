"""The zoo itself: each tiny model builds, routes, reloads, and its count field cuts the expert-sized keys."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.support import zoo

EVERY = pytest.mark.parametrize("name", zoo.sweep())


def record_calls(model: nn.Module) -> dict[str, Tensor]:
    """Have each experts module note the indices [T, K] of its last call under its name."""
    seen: dict[str, Tensor] = {}
    for name, module in zoo.experts(model).items():
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[1]}))
    return seen


def test_zoo_covers_every_family_with_the_experts_interface() -> None:
    models = Path(transformers.__file__).parent / "models"
    carriers = {
        file.parent.name for file in models.glob("*/modeling_*.py") if "@use_experts_implementation" in file.read_text()
    }
    assert set(zoo.FAMILIES) == carriers | {"step3p7"}  # whose experts lack the interface's flags alone


@EVERY
def test_forward_is_finite_and_routes_tokens_to_different_top_k(name: str) -> None:
    model = zoo.build(name)
    modules = zoo.experts(model)
    seen = record_calls(model)
    output = zoo.logits(model, zoo.tokens(model))
    assert output.dtype == torch.float32
    assert output.isfinite().all()
    assert len(modules) == zoo.family(name).experts_modules
    assert not model.training
    top_k = zoo.family(name).top_k
    expected = [top_k] * len(seen) if isinstance(top_k, int) else list(top_k)
    assert [indices.shape[-1] for indices in seen.values()] == expected
    never_called = set(modules) - set(seen)
    assert all("vision" in module for module in never_called)  # ernie4_5_vl_moe, on text alone
    for indices in seen.values():
        assert len(set(indices.flatten().tolist())) >= 4
        assert len({tuple(sorted(row)) for row in indices.tolist()}) >= 4


@EVERY
def test_dropping_an_expert_moves_the_logits(name: str) -> None:
    model = zoo.build(name)
    ids = zoo.tokens(model)
    seen = record_calls(model)
    before = zoo.logits(model, ids)
    for module_name, indices in dict(seen).items():
        down = model.get_parameter(f"{module_name}.down_proj")
        busiest = int(indices.flatten().mode().values)
        kept = down[busiest].detach().clone()
        with torch.no_grad():
            down[busiest] = 0
            moved = (zoo.logits(model, ids) - before).abs().max()
            down[busiest] = kept
        assert moved > 1e-2, module_name
