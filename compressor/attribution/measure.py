"""Routing attribution in two streamed passes, exact, holding no component beyond its layer; and a third by key token.

Sub-scores are linear in the component until the receiver's norm divides them: the first pass keeps every router's
logits and factors (`routers`), the second projects each component onto all later routers as it appears (`projecting`).

By key token: a head's output at query q is sum_k A[q, k] v_k, so its sub-scores split by key, and the variance over
the experts of one part is (A[q, k] * factor[q])^2 * Var(rows v_k). L tokens of a sequence, h size of a head, E experts,
R routers.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compressor.attribution.figures import KINDS, Attribution, KeyInfluence, Receiver, Sender
from compressor.attribution.graph import routed_together
from compressor.attribution.projecting import Projection, Tally
from compressor.attribution.routers import ObservedRouters, observe_routers
from compressor.attribution.tracing import TracedPass, UnitTrace
from compressor.data.batches import Calibration
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel, shared_experts
from compressor.model.streaming import Forward, Pass
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Progress
from compressor.run_record import versions

logger = logging.getLogger(__name__)

FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-3, 0.25  # share of the largest logit that may stay unexplained
PRODUCT_TOLERANCE = 1e-3  # of the largest entry, by which weights times values may miss the projection's input


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
    begin = time.perf_counter()
    routers = observe_routers(model, calibration.batches, progress, seed)
    between = time.perf_counter()
    projection = Projection(routers, edges_kept)
    Pass(model, calibration.batches, progress, "attribution", seed, shared=True).run(projection)
    seconds = {"routers": between - begin, "attribution": time.perf_counter() - between}
    receivers = _receivers(routers, projection, calibration.tokens)
    units, tallies = model.architecture.units, projection.tallies.totals.values()

    def place(tally: Tally) -> tuple[bool, int, int, str, int]:
        return tally.kind != "token", units.index(tally.unit), KINDS.index(tally.kind), tally.module, tally.number or 0

    senders = tuple(tally.sender(calibration.tokens) for tally in sorted(tallies, key=place))
    per_key: Sequence[KeyInfluence] = ()
    if keys:
        heads = [sender for sender in senders if sender.kind == "head"]
        strongest = sorted(heads, key=lambda head: -head.total_influence)[:top]
        rows = [row for batch in calibration.batches for row in batch.split(1)]
        per_key = key_influence(model, rows[:keys], strongest, progress) if strongest else ()
        if not per_key:
            logger.warning("no head of %s can be split by key tokens", model.architecture.model_class)
    together = routed_together(routers.chosen.values(), routers.valid, model.architecture.experts, calibration.tokens)
    return Attribution(
        model=model.source.label,
        receivers=receivers,
        senders=senders,
        outputs=tuple(tally.output() for tally in tallies if tally.kind == "expert"),
        tokens=calibration.tokens,
        calibration=calibration.identity,
        versions=versions(),
        seconds=seconds,
        per_key=tuple(per_key),
        score_edges=projection.score_edges(calibration.tokens),
        together=together,
    )


def _receivers(routers: ObservedRouters, projection: Projection, tokens: int) -> tuple[Receiver, ...]:
    """The routers with what their sums leave unexplained; raises if that is more than rounding."""
    tolerance = FLOAT32_TOLERANCE if routers.model.partial.dtype == torch.float32 else HALF_TOLERANCE
    count = len(routers.layers)
    variances = torch.zeros(count, dtype=torch.float64)  # summed over this rank's tokens
    for _, logits in sorted(routers.logits.items()):
        own = [float(logits[:, number].var(-1, correction=0).sum()) for number in range(count)]
        variances += torch.tensor(own, dtype=torch.float64)
    ends = torch.zeros(2, count, dtype=torch.float64)
    if projection.remainder is not None:  # at the one rank that has run the first batch
        ends = torch.stack([each.abs().amax((0, 2)) for each in (routers.logits[0], projection.remainder)])
    sums, (largest, left) = ranks().all_reduce(variances), ranks().all_reduce(ends.cpu().double())
    unexplained = left / largest.clamp(min=torch.finfo(torch.float32).tiny)
    for layer, share in zip(routers.layers, unexplained.tolist(), strict=True):
        if share > tolerance:
            raise CompressionError(
                f"{layer.router}: the sub-scores miss its logits by {share:.1%} of the largest; "
                "try --dtype float32, or compress without attribution"
            )
    figures = zip(routers.layers, (sums / tokens).tolist(), unexplained.tolist(), strict=True)
    return tuple(Receiver(layer.name, layer.index, variance, share) for layer, variance, share in figures)


Product = tuple[Tensor, Tensor, Tensor]  # attention weights [1, heads, L, L], values [1, heads, L, h], their product


class _Products(TorchFunctionMode):
    """Records matrix products of four dimensions: stock eager attention makes them in the open."""

    def __init__(self, products: list[Product]) -> None:
        super().__init__()
        self.products = products

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ in ("matmul", "__matmul__") and result.dim() == 4:
            self.products.append((args[0], args[1], result))
        return result


@dataclass(slots=True)
class _ByKey(TracedPass):
    """Splits heads by key token, sequence by sequence: those whose input to the projection is a product."""

    routers: ObservedRouters
    heads: Sequence[Sender]
    tokens: Sequence[tuple[int, ...]]  # of each sequence, and their texts
    texts: Sequence[tuple[str, ...]]
    split: dict[tuple[int, int, int], KeyInfluence] = field(default_factory=dict)  # by layer, sequence and head
    products: list[Product] = field(default_factory=list)  # of the layer that is running

    def wrap_forward(self, unit: str, own: Forward) -> Forward:
        """The layer's own forward, traced and with its products recorded."""
        traced = TracedPass.wrap_forward(self, unit, own)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            with _Products(self.products):
                output = traced(*args, **kwargs)
            self.products.clear()
            return output

        return recorded

    def visit(self, unit: str, batch: int, trace: UnitTrace) -> None:
        """Split the heads of a layer on one sequence."""
        for number, head in enumerate(self.heads):
            if head.module not in trace.heads or head.layer is None:
                continue
            if (influence := self._split(unit, batch, trace, head)) is not None:
                total = max(float(influence.sum()), torch.finfo(torch.float32).tiny)
                self.split[head.layer, batch, number] = KeyInfluence(
                    module=head.module,
                    layer=head.layer,
                    head=head.number or 0,
                    sequence=batch,
                    tokens=self.tokens[batch],
                    texts=self.texts[batch],
                    influence=tuple((influence.sum(0) / len(influence)).tolist()),
                    first=float(influence[:, 0].sum()) / total,
                    own=float(influence.diagonal().sum()) / total,
                    previous=float(influence.diagonal(-1).sum()) / total,
                )

    def _split(self, unit: str, batch: int, trace: UnitTrace, head: Sender) -> Tensor | None:
        """[L, L] influence by query and key, summed over the routers; None if no product is the projection's input."""
        heads, number = trace.heads[head.module], head.number or 0
        span = heads.span(number)
        inputs = heads.inputs[:, span].float()
        for weights, values, result in reversed(self.products):
            if result.shape[1:] != (heads.heads, *inputs.shape):
                continue
            if float((result[0, number].float() - inputs).abs().max()) > PRODUCT_TOLERANCE * float(inputs.abs().max()):
                continue
            projection = heads.weight[:, span].float()
            variances, scales = [], []  # [L, r] over the experts of what each key's value would give, and factors
            for view in self.routers.views(unit, batch, trace):
                if (seen := self.routers.look(view, head.module)) is not None:
                    scores = values[0, number].float() @ (seen.rows @ projection).T
                    variances.append(scores.unflatten(-1, (seen.scales.shape[1], -1)).var(-1, correction=0))
                    scales.append(seen.scales)
            factors = weights[0, number].float().square()
            influence: Tensor = factors * (torch.cat(scales, -1).square() @ torch.cat(variances, -1).T)
            return influence
        return None


def key_influence(
    model: OpenModel, sequences: Sequence[Tensor], heads: Sequence[Sender], progress: Progress
) -> list[KeyInfluence]:
    """Split the heads' influence by key on sequences [1, L]; tokens have texts if the model has a tokenizer.

    A head whose attention does not multiply weights with values just before its output projection is left out.
    """
    tokens = [tuple(sequence[0].tolist()) for sequence in sequences]
    try:
        tokenizer = load_tokenizer(model.source.folder)
    except CompressionError:
        tokenizer = None
    texts = [tuple(str(tokenizer.decode([token])) for token in own if tokenizer is not None) for own in tokens]
    live = model.partial.model
    before = live.config._attn_implementation
    live.set_attn_implementation("eager")
    try:
        by_key = _ByKey(observe_routers(model, sequences, progress), heads, tokens, texts)
        Pass(model, sequences, progress, "key tokens", 0, shared=True).run(by_key)
    finally:
        live.set_attn_implementation(before)
    everyone = {place: split for own in ranks().all_gather(by_key.split) for place, split in own.items()}
    return [everyone[place] for place in sorted(everyone)]
