"""Routing attribution in two streamed passes, exact, holding no component beyond its layer; and a
third by key token.

Sub-scores are linear in the component until the receiver's norm divides them: the first pass keeps
every router's logits and factors (`routers`), the second projects each component onto all later
routers as it appears (`projecting`).

By key token: a head's output at query q is sum_k A[q, k] v_k, so its sub-scores split by key, and
the variance over the experts of one part is (A[q, k] * factor[q])^2 * Var(rows v_k). L tokens of a
sequence, h size of a head, E experts, R routers."""

import logging
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from compressor.attribution.blocking import Blocked, read_blocked
from compressor.attribution.figures import (
    KINDS,
    Attribution,
    KeyInfluence,
    Receiver,
    Sender,
    strongest,
)
from compressor.attribution.graph import routed_together
from compressor.attribution.projecting import Projection
from compressor.attribution.routers import ObservedRouters, observe_routers
from compressor.attribution.tracing import LayerTrace, TracedPass
from compressor.data.batches import Calibration
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel, shared_experts
from compressor.model.streaming import TINY, Forward
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Clock, Progress
from compressor.run_record import versions

logger = logging.getLogger(__name__)

# share of the largest logit that may stay unexplained
FLOAT32_TOLERANCE = 1e-3
HALF_TOLERANCE = 0.25
# of the largest entry, by which weights times values may miss the projection's input
PRODUCT_TOLERANCE = 1e-3


def attribute(
    model: OpenModel,
    calibration: Calibration,
    progress: Progress,
    seed: int = 0,
    keys: int = 0,
    top: int = 10,
    edges_kept: int = 0,
    without: Sequence[str] = (),
) -> Attribution:
    """Decompose every router's logits on the calibration tokens.

    On the first `keys` sequences the `top` most influential heads are split by key token, too. If
    `edges_kept` is not 0, influence is measured on every expert's score, too, and so many of those
    edges are kept. Routers choose none of the experts `without` names (L1E9); figures are over all
    experts as ever. Ranks share the batches, and all of them find the same, but for rounding what
    one process finds. Raises `CompressionError` naming the layer and the reason if the
    architecture's logits are no sum over the residual stream, or if sums miss the logits by more
    than rounding; at all ranks alike."""
    shared = shared_experts(model)
    if shared:
        raise CompressionError(
            f"{shared} shares its experts with another layer, so no layer's routing can be "
            "attributed to them"
        )
    batches = calibration.batches
    tokens = calibration.tokens
    architecture = model.architecture
    blocked = read_blocked(architecture, without)
    clock = Clock()
    with clock.phase("routers"):
        routers = observe_routers(model, batches, progress, seed, blocked)
    with clock.phase("attribution"):
        projection = Projection(routers, tokens, edges_kept)
        routers.run_pass(projection, progress, "attribution", seed)
    figures = torch.zeros(3, len(routers.layers), dtype=torch.float64)
    for logits in routers.logits.values():
        figures[0] += logits.var(-1, correction=0).sum(0).cpu()  # summed over tokens
    if projection.remainder is not None:  # at the one rank that has run the first batch
        figures[1] = routers.logits[0].abs().amax((0, 2)).cpu()
        figures[2] = projection.remainder.abs().amax((0, 2)).cpu()
    variances, largest, missed = ranks().all_reduce(figures)
    unexplained = missed / largest.clamp(min=TINY)
    tolerance = FLOAT32_TOLERANCE if model.partial.dtype == torch.float32 else HALF_TOLERANCE
    receivers = []
    for number, layer in enumerate(routers.layers):
        share = float(unexplained[number])
        if share > tolerance:
            raise CompressionError(
                f"{layer.router}: the sub-scores miss its logits by {share:.1%} of the largest; "
                "try --dtype float32, or compress without attribution"
            )
        variance = float(variances[number]) / tokens
        receivers.append(Receiver(layer.name, layer.index, variance, share))
    layer_names = architecture.decoder_layers
    tallies = projection.tallies
    order = sorted(
        tallies,
        key=lambda component: (
            component.kind != "token",
            layer_names.index(component.decoder_layer),
            KINDS.index(component.kind),
            component.module,
            component.number or 0,
        ),
    )
    senders = tuple(tallies[component].sender(component, tokens) for component in order)
    experts = [component for component in tallies if component.kind == "expert"]
    per_key: Sequence[KeyInfluence] = ()
    if keys:
        heads = strongest([sender for sender in senders if sender.kind == "head"], top)
        sequences = [sequence for batch in batches for sequence in batch.split(1)][:keys]
        if heads:
            per_key = key_influence(model, sequences, heads, progress, blocked)
        if not per_key:
            logger.warning("no head of %s can be split by key tokens", architecture.model_class)
    return Attribution(
        model=model.source.label,
        receivers=tuple(receivers),
        senders=senders,
        outputs=tuple(tallies[component].output(component) for component in experts),
        tokens=tokens,
        calibration=calibration.identity,
        versions=versions(),
        seconds=clock.seconds,
        per_key=tuple(per_key),
        score_edges=tuple(projection.score_edges),
        together=routed_together(
            routers.chosen.values(), routers.valid, architecture.experts, tokens
        ),
        without=tuple(label.replace(" ", "") for label in without),
    )


class _Products(TorchFunctionMode):
    """Records matrix products of four dimensions: stock eager attention makes them in the open.

    Attention weights [1, heads, L, L], values [1, heads, L, h] and their product.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ == "matmul" and result.dim() == 4:
            self.products.append((*args, result))
        return result


@dataclass
class _ByKey(TracedPass):
    """Splits heads by key token, sequence by sequence: those whose input to the projection is a
    product."""

    routers: ObservedRouters
    heads: Sequence[Sender]
    sequences: Sequence[Tensor]
    tokenizer: Any
    # by layer, sequence and head
    split: dict[tuple[int, int, int], KeyInfluence] = field(default_factory=dict)
    recorded: _Products = field(default_factory=_Products)  # of the layer that is running

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        """The layer's own forward, traced and with its products recorded."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.recorded.products.clear()
            with self.recorded:
                return layer_forward(*args, **kwargs)

        return TracedPass.wrap_forward(self, decoder_layer, recorded)

    def visit(self, decoder_layer: str, batch: int, trace: LayerTrace) -> None:
        """Split the heads of a layer on one sequence."""
        tokens = self.sequences[batch][0].tolist()
        texts = (
            [str(self.tokenizer.decode([token])) for token in tokens]
            if self.tokenizer is not None
            else ()
        )
        for number, head in enumerate(self.heads):
            if head.module not in trace.heads:
                continue
            assert head.layer is not None and head.number is not None
            heads = trace.heads[head.module]
            inputs = heads.inputs[:, head.number].float()
            projection = heads.weight[:, head.number].float()
            # The last product that is the projection's input is that of its weights and values.
            for recorded in reversed(self.recorded.products):
                product = recorded[-1]
                if product.shape[1:] != (heads.inputs.shape[1], *inputs.shape):
                    continue
                missed = (product[0, head.number].float() - inputs).abs().max()
                if missed > PRODUCT_TOLERANCE * inputs.abs().max():
                    continue
                break
            else:
                continue
            weights, values, _ = recorded
            # [L, r] over the experts of what each key's value would give, and factors
            variances = []
            scales = []
            for view in self.routers.views(decoder_layer, batch, trace):
                seen = view.component(head.module)
                if seen is not None:
                    scores = values[0, head.number].float() @ (seen.rows @ projection).T
                    scores = scores.unflatten(-1, (seen.scales.shape[1], -1))
                    variances.append(scores.var(-1, correction=0))
                    scales.append(seen.scales)
            by_router: Tensor = torch.cat(scales, -1).square() @ torch.cat(variances, -1).T
            # It is [L, L] by query and key, summed over the routers.
            influence = weights[0, head.number].float().square() * by_router
            total = max(float(influence.sum()), TINY)
            self.split[head.layer, batch, number] = KeyInfluence(
                module=head.module,
                layer=head.layer,
                head=head.number,
                sequence=batch,
                tokens=tuple(tokens),
                texts=tuple(texts),
                influence=tuple((influence.sum(0) / len(influence)).tolist()),
                last=tuple(influence[-1].tolist()),
                first=float(influence[:, 0].sum()) / total,
                own=float(influence.diagonal().sum()) / total,
                previous=float(influence.diagonal(-1).sum()) / total,
            )


def key_influence(
    model: OpenModel,
    sequences: Sequence[Tensor],
    heads: Sequence[Sender],
    progress: Progress,
    blocked: Blocked,
) -> list[KeyInfluence]:
    """Split the heads' influence by key on sequences [1, L]; tokens have texts if the model has a
    tokenizer.

    A head whose attention does not multiply weights with values just before its output projection
    is left out."""
    try:
        tokenizer = load_tokenizer(model.source.folder)
    except CompressionError:
        tokenizer = None
    live = model.partial.model
    before = live.config._attn_implementation
    live.set_attn_implementation("eager")
    try:
        routers = observe_routers(model, sequences, progress, 0, blocked)
        by_key = _ByKey(routers, heads, sequences, tokenizer)
        routers.run_pass(by_key, progress, "key tokens")
    finally:
        live.set_attn_implementation(before)
    split = dict(ChainMap(*ranks().all_gather(by_key.split)))
    return [split[key] for key in sorted(split)]
