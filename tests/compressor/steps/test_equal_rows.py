"""Equal router rows told apart: no choice of a cut layer hangs on how ties are ordered."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as drawn
from safetensors.torch import load_file

import compressor
from compressor.steps.tensors import STEP, distinct_rows, equal_rows_before
from tests.support import small


@given(rows=drawn.lists(drawn.integers(0, 3), min_size=1, max_size=9))
def test_rows_are_counted_as_a_loop_counts_them(rows: list[int]) -> None:
    made = torch.tensor([[1.0, float(number), 2.0] for number in rows])
    before = [rows[:place].count(number) for place, number in enumerate(rows)]
    assert equal_rows_before(made, 0, len(rows)).tolist() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_further_equal_rows_change_and_rows_of_no_expert_never(dtype: torch.dtype) -> None:
    first, second = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    value = torch.stack([first, second, first, first, second, first])  # the last is of no routed expert
    made = distinct_rows(value, 0, 5)
    assert torch.equal(made[[0, 1, 5]], value[[0, 1, 5]])
    wanted = torch.stack([first, first, second]).float() * torch.tensor([[1 - STEP], [1 - 2 * STEP], [1 - STEP]])
    assert torch.equal(made[2:5], wanted.to(dtype))
    assert torch.equal(distinct_rows(value.T, 1, 5), made.T)
    bias = torch.zeros(5)
    assert distinct_rows(bias, 0, 5) is bias


def test_no_router_of_a_pruned_split_has_equal_rows_whichever_way_it_came(tmp_path: Path) -> None:
    small.save(tmp_path / "model")
    compressor.compress(str(tmp_path / "model"), tmp_path / "split", [compressor.Split(2)])
    for folder, out, parts, experts in (("model", "once", 2, 6), ("split", "twice", 1, 12), ("model", "all", 2, 8)):
        asked = {"split": parts, "experts": experts, "strategy": "model-centric"}
        compressor.compress(str(tmp_path / folder), tmp_path / out, **asked)
    for name, equal in (("once", 0), ("twice", 0), ("all", 8), ("split", 8)):
        routers = [
            value for path in (tmp_path / name).glob("*.safetensors") for key, value in load_file(path).items()
            if key.endswith("gate.weight")
        ]  # fmt: skip
        assert [len(router) - len(router.unique(dim=0)) for router in routers] == [equal] * 2
