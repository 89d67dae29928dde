"""Watching an MoE layer against hooks of torch's own, on stock models; and that nothing of it stays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.model.experts import moe_hooks
from tests.support.opened_models import batches, opened

SOME = pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "qwen3_moe"])


def attached(model: nn.Module) -> tuple[int, int]:
    """Hooks, and modules with a forward of their own."""
    modules = list(model.modules())
    hooks = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in modules)
    return hooks, sum("forward" in vars(module) for module in modules)


@SOME
def test_callbacks_see_what_hooks_see_in_the_order_of_the_call(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    (ids,), layer = batches(stock, (2,)), model.architecture.layers[-1]
    seen, expected = list[tuple[str, Any]](), list[tuple[str, Any]]()
    router, experts, block = (stock.get_submodule(part) for part in (layer.router, layer.name, layer.block))
    handles = [
        router.register_forward_hook(lambda _, args, kwargs, out: expected.append(("router", out)), with_kwargs=True),
        experts.register_forward_pre_hook(lambda _, args: expected.append(("experts", args))),
        experts.register_forward_hook(lambda _, args, out: expected.append(("output", (args[0], out)))),
        block.register_forward_hook(lambda _, args, out: expected.append(("block", out))),
    ]
    plain = stock(input_ids=ids).logits
    for handle in handles:
        handle.remove()
    before = attached(stock)
    watch = moe_hooks(
        stock,
        layer,
        on_router=lambda args, kwargs, out: seen.append(("router", out)),
        on_experts=lambda *call: seen.append(("experts", call)),
        on_output=lambda hidden, out: seen.append(("output", (hidden, out))),
        on_block=lambda args, kwargs, out: seen.append(("block", out)),
    )
    with watch:
        assert torch.equal(stock(input_ids=ids).logits, plain)
        stock(input_ids=ids)
    assert attached(stock) == before
    assert [what for what, _ in expected] == ["router", "experts", "output", "block"]
    assert [what for what, _ in seen] == 2 * [what for what, _ in expected]
    for (_, found), (_, wanted) in zip(seen, 2 * expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    stock(input_ids=ids)
    assert len(seen) == 2 * len(expected)


@SOME
def test_experts_outputs_add_up_to_their_modules_output(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    (ids,), layer = batches(stock, (2,)), model.architecture.layers[0]
    plain, before, totals = stock(input_ids=ids).logits, attached(stock), list[tuple[Tensor, Tensor]]()
    sums: dict[str, Tensor] = {}

    def ran(expert: int, rows: Tensor, weights: Tensor, outputs: Tensor) -> None:
        sums["now"].index_add_(0, rows, outputs * weights[:, None])

    watch = moe_hooks(
        stock,
        layer,
        on_experts=lambda hidden, index, weights: sums.update(now=torch.zeros_like(hidden)),
        on_expert_output=ran,
        on_output=lambda hidden, output: totals.append((sums["now"], output)),
    )
    with torch.no_grad(), watch:
        torch.testing.assert_close(stock(input_ids=ids).logits, plain, rtol=0, atol=1e-4)
    for total, output in totals:
        torch.testing.assert_close(total, output, rtol=1e-5, atol=1e-6)
    assert totals and attached(stock) == before
