"""Multi-token-prediction heads in a plan: each is a layer of its own, planned and corrected on its
actual input."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.model.moe_layer import check_count
from compressor.model.mtp import (
    Head,
    acceptances,
    agreement,
    find_heads,
    fitting_heads,
    mtp_stages,
)
from compressor.model.opened import OpenModel, open_alike
from compressor.model.streaming import LayerVisitor
from compressor.progress import Progress
from compressor.recipe.plan import ExpertPlan
from compressor.statistics.statistics import LayerStatistics, collect

logger = logging.getLogger(__name__)

WARNED = "warned of heads"
# by experts module: shares before and after, positions, heldout
Accepted = Mapping[str, Mapping[str, Any]]
ACCEPTANCE = "acceptance"  # of a head, among the figures of its layer


def chosen_heads(
    model: OpenModel, choice: str | int | None, experts: int
) -> tuple[tuple[Head, ...], int]:
    """Return the heads that are kept, and with how many experts: all where they are understood,
    unless they are to be dropped, with as many `experts` as the other layers, unless `choice` says
    whole or a number.

    Raises `CompressionError` where it is to keep heads that the checkpoint lacks, that are not
    understood, or that have too few experts."""
    if choice not in (None, "drop") and model.whole is not None:
        raise CompressionError(
            f"--mtp {choice}: a head cannot be split, or be routed to fewer experts; leave out "
            "--mtp"
        )
    if choice == "drop" or model.whole is not None:
        return (), experts
    if choice is None:
        return fitting_heads(model, experts, cut=True), experts
    try:
        heads = find_heads(model)
    except CompressionError as error:
        raise CompressionError(
            f"--mtp {choice}: {error}; leave it out, or pass --mtp drop"
        ) from error
    if not heads:
        raise CompressionError(
            f"--mtp {choice}: the checkpoint has no multi-token-prediction head; leave it out"
        )
    small = min(heads, key=lambda head: head.layer.experts)
    stored = small.layer.experts
    wanted = choice if isinstance(choice, int) else experts
    if choice == "whole":
        wanted = max(head.layer.experts for head in heads)
    if stored < wanted:
        others = "heads" if choice == "whole" else "layers"
        remedy = f"pass --experts {stored} or fewer"
        if wanted != experts:
            remedy = f"pass --mtp {stored}"
        raise CompressionError(
            f"--mtp {choice}: {small.names.decoder_layer} has {stored} experts, fewer than "
            f"the {wanted} of the other {others}; {remedy}, or --mtp drop"
        )
    for head in heads:
        if wanted < head.layer.experts:
            check_count(head.layer, wanted, head.names.decoder_layer)
    if wanted != experts and WARNED not in model.cached:
        model.cached[WARNED] = True
        logger.warning(
            "multi-token-prediction heads have %d experts and the other layers %d, as "
            "mtp_per_layer_config of the config says; transformers 5.24, vLLM and SGLang build "
            "both with one number, so draft with a tool that reads the heads' own",
            wanted,
            experts,
        )
    return heads, wanted


def acceptance_of(
    plan: ExpertPlan,
    heads: Sequence[Head],
    folder: Path,
    model: OpenModel,
    calibration: Calibration | None,
    changed: bool,
) -> Accepted:
    """Return the acceptance of kept heads before and after: the plan's figures, and measured ones
    if text was read.

    `folder` holds the output that the plan has made of `model`, maybe `changed` by further steps.
    """
    acceptance = {
        layer.module: dict(layer.figures[ACCEPTANCE])
        for layer in plan.layers
        if ACCEPTANCE in layer.figures
    }
    if calibration is None or not heads:
        return acceptance
    acceptance = {head.named.name: acceptance.get(head.named.name, {}) for head in heads}
    # what is held out, or the last batch where nothing is
    evaluated = calibration.heldout or {len(calibration.batches) - 1}
    batches = [calibration.batches[number] for number in sorted(evaluated)]

    def measure(when: str, measured: OpenModel, its_heads: Sequence[Head]) -> None:
        for head, agreed in zip(heads, acceptances(measured, its_heads, batches), strict=True):
            acceptance[head.named.name] |= _figure(agreed, when, calibration)

    if any("before" not in figure for figure in acceptance.values()):
        measure("before", model, heads)
    if changed or any("after" not in figure for figure in acceptance.values()):
        smaller = open_alike(locate(str(folder)), model)
        measure("after", smaller, find_heads(smaller))
    return acceptance


def _figure(agreement: torch.Tensor, when: str, text: Calibration) -> dict[str, Any]:
    agreed, positions = agreement.tolist()
    share = agreed / positions if positions else 0.0
    return {when: round(share, 6), "positions": positions, "heldout": bool(text.heldout)}


def statistics_with_heads(
    model: OpenModel,
    heads: Sequence[Head],
    needs: frozenset[str],
    calibration: Calibration | None,
    progress: Progress,
    seed: int,
    accepted: dict[str, Any],
    along: Sequence[LayerVisitor] = (),
    finishing: Sequence[torch.Tensor] = (),
) -> Iterator[LayerStatistics]:
    """Yield the statistics of the model's MoE layers, then of the heads', each valid until the next
    is asked for.

    The text goes through the model, where visitors go `along` (`collect`), and then its heads. Each
    head's acceptance is put into `accepted`, by experts module, once its statistics have been
    taken."""
    if calibration is None or not heads:
        yield from collect(model, needs, calibration, progress, seed, None, along, finishing)
        for head in heads:
            for stats in collect(head.model, needs, None, progress, seed):
                yield replace(stats, layer=head.named)
        return
    evaluated = calibration.heldout or frozenset({len(calibration.batches) - 1})
    stages = mtp_stages(model, heads, calibration.batches, evaluated)
    for mtp_stage in stages:
        passing = replace(calibration, batches=mtp_stage.batches)
        named = None if mtp_stage.head is None else mtp_stage.head.named
        visitors = along if named is None else ()
        with mtp_stage.hooked():
            for stats in collect(
                mtp_stage.model, needs, passing, progress, seed, mtp_stage, visitors
            ):
                yield stats if named is None else replace(stats, layer=named)
        if named is not None:
            every_rank = ranks().all_reduce(agreement(stages[0], mtp_stage))
            accepted[named.name] = _figure(every_rank, "before", calibration)
