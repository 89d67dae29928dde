"""Sub-scores by key token: which tokens the strongest attention heads carry to the routers.

A head's output at query q is sum_k A[q, k] v_k, so its sub-scores split by key, and the variance over the experts of
one part is (A[q, k] * factor[q])^2 * Var(rows v_k). L tokens of a sequence, h size of a head, E experts, R routers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compressor.attribution.figures import KeyInfluence, Sender
from compressor.attribution.stream_maps import ObservedRouters, leaf_map, observe_routers, router_rows, run_traced
from compressor.attribution.tracing import pull_sum
from compressor.attribution.unit_trace import UnitTrace
from compressor.distributed.ranks import here
from compressor.model.opened import OpenModel
from compressor.progress import Progress

TOLERANCE = 1e-3  # of the largest entry, by which weights times values may miss what the projection is given


class _Products(TorchFunctionMode):
    """Remembers products of attention weights [1, heads, L, L] with values [1, heads, L, h]."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ in ("matmul", "__matmul__") and result.dim() == 4:
            self.found.append((args[0], args[1], result))
        return result


@contextmanager
def _listening(model: Any, modules: Sequence[str]) -> Iterator[dict[str, _Products]]:
    """Remember the last products of each of these attention modules: stock eager attention makes them in the open."""
    heard: dict[str, _Products] = {}

    def forward(name: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        heard[name] = _Products()
        with heard[name]:
            return own(*args, **kwargs)

    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        for name in modules:
            model.get_submodule(name).forward = partial(forward, name, model.get_submodule(name).forward)
        yield heard
    finally:
        for name in modules:
            model.get_submodule(name).__dict__.pop("forward", None)
        model.set_attn_implementation(before)


def key_influence(
    model: OpenModel,
    sequences: Sequence[Tensor],
    heads: Sequence[Sender],
    progress: Progress,
    texts: Callable[[Sequence[int]], tuple[str, ...]] = lambda tokens: (),
) -> list[KeyInfluence]:
    """Split the heads' influence by key on sequences [1, L]; `texts` says what token ids stand for.

    A head whose attention does not multiply weights with values just before its output projection is left out.
    """
    modules = sorted({head.module for head in heads})
    tokens = [tuple(sequence[0].tolist()) for sequence in sequences]
    found: list[tuple[tuple[int, int, int], dict[str, Any]]] = []  # by layer, sequence and head
    with _listening(model.partial.model, modules) as heard:
        routers = observe_routers(model, sequences, progress)

        def visit(unit: str, batch: int, trace: UnitTrace) -> None:
            for number, head in enumerate(heads):
                if head.module in trace.heads and head.module in heard and head.module.startswith(f"{unit}."):
                    made = _split(routers, unit, batch, trace, head, heard[head.module].found)
                    if made is not None:
                        summary = _summary(head, batch, tokens[batch], texts(tokens[batch]), made)
                        found.append(((routers.order[unit], batch, number), asdict(summary)))
            heard.clear()  # weights of a layer that is done

        run_traced(model, sequences, visit, progress, "key tokens")
    everyone = sorted((entry for own in here().all_gather(found) for entry in own), key=lambda entry: entry[0])
    return [_restored(summary) for _, summary in everyone]


def _split(
    routers: ObservedRouters, unit: str, batch: int, trace: UnitTrace, head: Sender, products: Sequence[Any]
) -> Tensor | None:
    """[L, L] influence by query and key, summed over the routers; None if no product is what the projection got."""
    heads, number = trace.heads[head.module], head.number or 0
    size = heads.inputs.shape[-1] // heads.heads
    own = slice(number * size, (number + 1) * size)
    given = heads.inputs[:, own].float()
    for weights, values, result in reversed(products):
        if result.shape[1] != heads.heads or result.shape[-1] != size or result.shape[2] != len(given):
            continue
        if float((result[0, number].float() - given).abs().max()) <= TOLERANCE * float(given.abs().max()):
            variance, scales = _carried(routers, unit, batch, trace, head, values[0, number].float(), own)
            influence: Tensor = weights[0, number].float().square() * (scales.square() @ variance.T)
            return influence
    return None


def _carried(
    routers: ObservedRouters, unit: str, batch: int, trace: UnitTrace, head: Sender, values: Tensor, own: slice
) -> tuple[Tensor, Tensor]:
    """[L, R] variance over the experts of what each key's value would give every router, and the factors [L, R]."""
    projection = trace.heads[head.module].weight[:, own].float()
    variances, scales = [], []
    for number, layer in enumerate(routers.layers):
        if layer.unit == unit:
            found = leaf_map(trace.logits[layer.name].terms, head.module) if layer.name in trace.logits else None
            base, scale = router_rows(layer, [()], values.device), torch.ones(len(values), device=values.device)
        elif number in routers.later(unit):
            found = leaf_map(trace.terms, head.module)
            base, scale = routers.rows_after(unit, number), routers.scale_after(unit, number, batch)
        else:
            continue
        if found is not None:
            scores = values @ (pull_sum(base, found.chains) @ projection).T
            variances.append(scores.var(-1, correction=0))
            scales.append(scale if found.token is None else scale * found.token)
    return torch.stack(variances, -1), torch.stack(scales, -1)


def _restored(content: Mapping[str, Any]) -> KeyInfluence:
    """What JSON made of it, as it was."""
    made: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
    return KeyInfluence(**made)


def _summary(
    head: Sender, sequence: int, tokens: tuple[int, ...], texts: tuple[str, ...], influence: Tensor
) -> KeyInfluence:
    total = max(float(influence.sum()), torch.finfo(torch.float32).tiny)
    return KeyInfluence(
        module=head.module,
        layer=head.layer,
        head=head.number or 0,
        sequence=sequence,
        tokens=tokens,
        texts=texts,
        influence=tuple((influence.sum(0) / len(influence)).tolist()),
        first=float(influence[:, 0].sum()) / total,
        own=float(influence.diagonal().sum()) / total,
        previous=float(influence.diagonal(-1).sum()) / total,
    )
