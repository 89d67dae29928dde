"""Routing attribution in two streamed passes, exact, holding no component beyond its layer.

Sub-scores are linear in the component until the receiver's norm divides them: the first pass keeps every router's
logits and factors (`stream_maps`), the second projects each component onto all later routers as it appears
(`projecting`).
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from compressor.attribution.figures import KINDS, UNRANKED, Attribution, KeyInfluence, Output, Receiver, Sender
from compressor.attribution.graph import routed_together
from compressor.attribution.keys import key_influence
from compressor.attribution.projecting import Projection, Tally
from compressor.attribution.stream_maps import ObservedRouters, observe_routers, run_traced
from compressor.attribution.unit_trace import parts_of
from compressor.data.batches import Calibration, load_tokenizer
from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.model.architecture import layer_number, layers_by_unit
from compressor.model.opened import OpenModel, shared_experts
from compressor.progress import Progress
from compressor.run_record import versions

logger = logging.getLogger(__name__)

FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-3, 0.25  # share of the largest logit that may stay unexplained


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
    _refuse_not_finite(routers)
    seconds["routers"] = time.perf_counter() - begin
    projection = Projection(model, routers, parts, edges_kept)
    run_traced(model, calibration.batches, projection.visit, progress, "attribution", seed, projection.passed)
    seconds["attribution"] = time.perf_counter() - begin - seconds["routers"]
    receivers = _receivers(model, routers, projection, calibration)
    senders = tuple(_senders(model, projection.tallies.totals, calibration.tokens))
    per_key = _by_key(model, calibration, senders, progress, keys, top) if keys else []
    return Attribution(
        model=model.source.label,
        receivers=receivers,
        senders=senders,
        outputs=tuple(_output(tally) for tally in projection.tallies.totals.values() if tally.kind == "expert"),
        tokens=calibration.tokens,
        calibration=calibration.identity,
        versions=versions(),
        seconds=seconds,
        per_key=tuple(per_key),
        score_edges=projection.score_edges(calibration.tokens),
        together=routed_together(
            routers.chosen.values(), routers.valid, model.architecture.experts, calibration.tokens
        ),
    )


def _by_key(
    model: OpenModel, calibration: Calibration, senders: Sequence[Sender], progress: Progress, keys: int, top: int
) -> list[KeyInfluence]:
    heads = [sender for sender in senders if sender.kind == "head"]
    strongest = sorted(heads, key=lambda head: -head.total_influence)[:top]
    rows = [row for batch in calibration.batches for row in batch.split(1)]
    found = key_influence(model, rows[:keys], strongest, progress, _texts(model)) if strongest else []
    if not found:
        logger.warning("no head of %s can be split by key tokens", model.architecture.model_class)
    return found


def _texts(model: OpenModel) -> Callable[[Sequence[int]], tuple[str, ...]]:
    """What token ids stand for, by the model's tokenizer; nothing if it has none."""
    try:
        tokenizer = load_tokenizer(model.source.folder)
    except CompressionError:
        return lambda tokens: ()
    return lambda tokens: tuple(str(tokenizer.decode([token])) for token in tokens)


def _refuse_not_finite(routers: ObservedRouters) -> None:
    numbers = range(len(routers.layers))
    faults = [sum(not bool(torch.isfinite(own[:, n]).all()) for own in routers.logits.values()) for n in numbers]
    for layer, found in zip(routers.layers, here().all_reduce(torch.tensor(faults)).tolist(), strict=True):
        if found:
            raise CompressionError(
                f"{layer.router}: its logits are not finite on the calibration data; try --dtype float32"
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
    order = {unit: number for number, unit in enumerate(model.architecture.units)}

    def place(tally: Tally) -> tuple[bool, int, int, str, int]:
        return tally.kind != "token", order[tally.unit], KINDS.index(tally.kind), tally.module, tally.number or 0

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


def _output(tally: Tally) -> Output:
    mean = tally.norm / max(1, tally.tokens)
    return Output(
        tally.module, layer_number(tally.unit), tally.number or 0, tally.tokens, mean, tally.max_norm, tally.max_entry
    )
