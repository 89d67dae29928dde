"""Merged experts that the output's dtype does not hold are refused, whichever way the output is made."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import compressor
from compressor.errors import CompressionError
from compressor.recipe.plan import Group
from compressor.recipe.steps_plan import Plan
from tests.support import small
from tests.support.plans import plan_of

LARGE = 40_000.0  # float16 holds it, and not twice as much


def scaled(plan: Plan, scale: float, head: int | None = None) -> Plan:
    """The plan with experts 0 and 1 merged in every layer, their mean times `scale`; aligned with a `head`."""
    merged = Group((0, 1), (0.5, 0.5), (0.5, 0.5), scale, head)
    layers = tuple(replace(layer, groups=(merged, *map(Group.single, (2, 3, 4)))) for layer in plan.expert_plan.layers)
    number = next(number for number, step in enumerate(plan.steps) if step.expert_plan is not None)
    return plan.with_entry(number, decision=replace(plan.expert_plan, layers=layers))


def fill(folder: Path, dtype: torch.dtype, value: float) -> None:
    """Store the model in a dtype, with `value` in all down projections."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = (torch.full_like(tensor, value) if ".w2." in name else tensor).to(dtype)

    small.edit_tensors(folder, change)
    small.edit_json(folder / "config.json", lambda config: config.update(dtype=str(dtype).removeprefix("torch.")))


@pytest.mark.parametrize("head", [None, 0], ids=["stored", "aligned"])
@pytest.mark.parametrize(
    ("dtype", "value", "scale"),
    [(torch.float16, LARGE, 2.0), (torch.bfloat16, 1e10, 1e29), (torch.float32, 1e10, 1e29)],
    ids=str,
)
def test_an_overflow_in_the_outputs_dtype_is_refused(
    dtype: torch.dtype, value: float, scale: float, head: int | None, tmp_path: Path
) -> None:
    model = small.save(tmp_path / "model")
    fill(model, dtype, 1.0)
    plan = plan_of(model, strategy="model-centric", experts=4, split=1)
    fill(model, dtype, value)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(CompressionError, match=f"overflows {name} when its experts are merged"):
        compressor.apply(scaled(plan, scale, head), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    compressor.apply(scaled(plan, 0.5, head), tmp_path / "out")
    written = [tensor for path in (tmp_path / "out").glob("*.safetensors") for tensor in load_file(path).values()]
    assert all(bool(tensor.isfinite().all()) for tensor in written)
