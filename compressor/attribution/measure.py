"""Routing attribution in two streamed passes, exact, holding no component beyond its layer; and a third by key token.

Sub-scores are linear in the component until the receiver's norm divides them: the first pass keeps every router's
logits and factors (`stream_maps`), the second projects each component onto all later routers as it appears
(`projecting`).

By key token: a head's output at query q is sum_k A[q, k] v_k, so its sub-scores split by key, and the variance over
the experts of one part is (A[q, k] * factor[q])^2 * Var(rows v_k). L tokens of a sequence, h size of a head, E experts,
R routers.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compressor.attribution.figures import KINDS, UNRANKED, Attribution, KeyInfluence, Output, Receiver, Sender
from compressor.attribution.graph import routed_together
from compressor.attribution.projecting import Projection, Tally
from compressor.attribution.stream_maps import ObservedRouters, leaf_map, observe_routers, router_rows, run_traced
from compressor.attribution.tracing import pull_sum
from compressor.attribution.unit_trace import UnitTrace, parts_of
from compressor.data.batches import Calibration
from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.model.architecture import layer_number, layers_by_unit
from compressor.model.opened import OpenModel, shared_experts
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Progress
from compressor.run_record import versions

logger = logging.getLogger(__name__)

FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-3, 0.25  # share of the largest logit that may stay unexplained
PRODUCT_TOLERANCE = 1e-3  # of the largest entry, by which weights times values may miss what the projection is given


def attribute(
    model: OpenModel,
    calibration: Calibration,
    progress: Progress,
    seed: int = 0,
    keys: int = 0,
    top: int = 10,
    edges_kept: int = 0,
) -> Attribution:
    """Decompose every router's logits on the calibration tokens.

    On the first `keys` sequences the `top` most influential heads are split by key token, too. If `edges_kept` is not
    0, influence is measured on every expert's score, too, and so many of those edges are kept.
    Ranks share the batches, and all of them find the same, but for rounding what one process finds.
    Raises `CompressionError` naming the layer and the reason if the architecture's logits are no sum over the
    residual stream, or if sums miss the logits by more than rounding; at all ranks alike.
    """
    if shared := shared_experts(model):
        raise CompressionError(
            f"{shared} shares its experts with another layer, so no layer's routing can be attributed to them"
        )
    architecture = model.architecture
    by_unit = layers_by_unit(architecture.layers)
    meta = model.partial.model
    parts = {unit: parts_of(unit, meta.get_submodule(unit), by_unit.get(unit, ())) for unit in architecture.units}
    seconds = {}
    begin = time.perf_counter()
    routers = observe_routers(model, calibration.batches, progress, seed)
    faults = [
        sum(not bool(torch.isfinite(own[:, number]).all()) for own in routers.logits.values())
        for number in range(len(routers.layers))
    ]
    for layer, found in zip(routers.layers, here().all_reduce(torch.tensor(faults)).tolist(), strict=True):
        if found:
            raise CompressionError(
                f"{layer.router}: its logits are not finite on the calibration data; try --dtype float32"
            )
    seconds["routers"] = time.perf_counter() - begin
    projection = Projection(model, routers, parts, edges_kept)
    run_traced(model, calibration.batches, projection.visit, progress, "attribution", seed, projection.passed)
    seconds["attribution"] = time.perf_counter() - begin - seconds["routers"]
    receivers = _receivers(model, routers, projection, calibration)
    tallies = projection.tallies.totals
    senders = tuple(_senders(model, tallies, calibration.tokens))
    per_key: Sequence[KeyInfluence] = ()
    if keys:
        heads = [sender for sender in senders if sender.kind == "head"]
        strongest = sorted(heads, key=lambda head: -head.total_influence)[:top]
        rows = [row for batch in calibration.batches for row in batch.split(1)]
        per_key = key_influence(model, rows[:keys], strongest, progress) if strongest else ()
        if not per_key:
            logger.warning("no head of %s can be split by key tokens", architecture.model_class)
    return Attribution(
        model=model.source.label,
        receivers=receivers,
        senders=senders,
        outputs=tuple(
            Output(
                each.module,
                layer_number(each.unit),
                each.number or 0,
                each.tokens,
                each.norm / max(1, each.tokens),
                each.max_norm,
                each.max_entry,
            )
            for each in tallies.values()
            if each.kind == "expert"
        ),
        tokens=calibration.tokens,
        calibration=calibration.identity,
        versions=versions(),
        seconds=seconds,
        per_key=tuple(per_key),
        score_edges=projection.score_edges(calibration.tokens),
        together=routed_together(routers.chosen.values(), routers.valid, architecture.experts, calibration.tokens),
    )


def _receivers(
    model: OpenModel, routers: ObservedRouters, projection: Projection, calibration: Calibration
) -> tuple[Receiver, ...]:
    """The routers with what their sums leave unexplained; raises if that is more than rounding."""
    tolerance = FLOAT32_TOLERANCE if model.partial.dtype == torch.float32 else HALF_TOLERANCE
    count = len(routers.layers)
    variances = torch.zeros(count, dtype=torch.float64)  # summed over this rank's tokens
    for _, logits in sorted(routers.logits.items()):
        own = [float(logits[:, number].var(-1, correction=0).sum()) for number in range(count)]
        variances += torch.tensor(own, dtype=torch.float64)
    ends = torch.zeros(2, count, dtype=torch.float64)
    if projection.remainder is not None:  # at the one rank that has run the first batch
        both = routers.logits[0], projection.remainder
        ends = torch.stack([each.abs().amax((0, 2)) for each in both]).double().cpu()
    sums = here().all_reduce(variances).tolist()
    found = []
    for layer, total, largest, left in zip(routers.layers, sums, *here().all_reduce(ends).tolist(), strict=True):
        variance, missed = total / calibration.tokens, left / max(largest, torch.finfo(torch.float32).tiny)
        if missed > tolerance:
            raise CompressionError(
                f"{layer.router}: the sub-scores miss its logits by {missed:.1%} of the largest; "
                "try --dtype float32, or compress without attribution"
            )
        found.append(Receiver(layer.name, layer.index, variance, missed))
    return tuple(found)


def _senders(model: OpenModel, tallies: Mapping[str, Tally], tokens: int) -> list[Sender]:
    units = model.architecture.units

    def place(tally: Tally) -> tuple[bool, int, int, str, int]:
        return tally.kind != "token", units.index(tally.unit), KINDS.index(tally.kind), tally.module, tally.number or 0

    found = []
    for name, tally in sorted(tallies.items(), key=lambda item: place(item[1])):
        reached = tally.reaches.tolist()
        rows = [
            tuple(value if reaches else None for value, reaches in zip(row, reached, strict=True))
            for row in (tally.sums / tokens).tolist()
        ]
        if tally.kind in UNRANKED:
            rows[4] = (None,) * len(reached)
        influence, positive, negative, covariance, ranks = rows
        share = tally.tokens / tokens if tally.kind == "expert" else 1.0
        layer = None if tally.kind == "token" else layer_number(tally.unit)
        own = (name, tally.kind, layer, tally.module, tally.number, share)
        found.append(Sender(*own, influence, positive, negative, ranks, covariance))
    return found


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
    model: OpenModel, sequences: Sequence[Tensor], heads: Sequence[Sender], progress: Progress
) -> list[KeyInfluence]:
    """Split the heads' influence by key on sequences [1, L]; tokens have texts if the model has a tokenizer.

    A head whose attention does not multiply weights with values just before its output projection is left out.
    """
    modules = sorted({head.module for head in heads})
    tokens = [tuple(sequence[0].tolist()) for sequence in sequences]
    try:
        tokenizer = load_tokenizer(model.source.folder)
    except CompressionError:
        tokenizer = None
    texts = [tuple(str(tokenizer.decode([token])) for token in own if tokenizer is not None) for own in tokens]
    found: list[tuple[tuple[int, int, int], KeyInfluence]] = []  # by layer, sequence and head
    with _listening(model.partial.model, modules) as heard:
        routers = observe_routers(model, sequences, progress)

        def visit(unit: str, batch: int, trace: UnitTrace) -> None:
            for number, head in enumerate(heads):
                if head.module in trace.heads and head.module in heard and head.module.startswith(f"{unit}."):
                    influence = _split(routers, unit, batch, trace, head, heard[head.module].found)
                    if influence is None:
                        continue
                    total = max(float(influence.sum()), torch.finfo(torch.float32).tiny)
                    summary = KeyInfluence(
                        module=head.module,
                        layer=head.layer,
                        head=head.number or 0,
                        sequence=batch,
                        tokens=tokens[batch],
                        texts=texts[batch],
                        influence=tuple((influence.sum(0) / len(influence)).tolist()),
                        first=float(influence[:, 0].sum()) / total,
                        own=float(influence.diagonal().sum()) / total,
                        previous=float(influence.diagonal(-1).sum()) / total,
                    )
                    found.append(((routers.order[unit], batch, number), summary))
            heard.clear()  # weights of a layer that is done

        run_traced(model, sequences, visit, progress, "key tokens")
    everyone = sorted((entry for own in here().all_gather(found) for entry in own), key=lambda entry: entry[0])
    return [summary for _, summary in everyone]


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
        if float((result[0, number].float() - given).abs().max()) <= PRODUCT_TOLERANCE * float(given.abs().max()):
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
