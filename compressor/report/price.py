"""What pruning and quantising would cost, told before anything is made: KL at 3/4, 1/2 and 1/3 of
the bytes."""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from compressor.checkpoint.reader import Size
from compressor.data.batches import Calibration, EvaluationSet
from compressor.divergence.evaluator import Evaluator
from compressor.document.blocks import Block, Table, Text
from compressor.formatting import human_bytes
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.report.sizes import PlannedShare, plan_shares
from compressor.steps.correct.options import Correct
from compressor.steps.job import output_size, untouched
from compressor.steps.prune.options import Prune
from compressor.steps.quantize.choosing import candidates, chosen_layers, sensitivities
from compressor.steps.quantize.matrices import ALL, find_matrices

TARGETS = (Fraction(3, 4), Fraction(1, 2), Fraction(1, 3))  # of the bytes
REDUNDANT = 0.1  # nats per token that the share at 3/4 of the bytes may cost before refitting


@dataclass(frozen=True, slots=True)
class Price:
    """What fits into so many bytes: KL in nats per token with its standard error, infinite where
    nothing fits. Pruning is measured before refitting, which wins back a part; quantising by layer
    is predicted."""

    bytes: int
    experts: int  # of each layer that stay where pruning alone is to fit; 0 if nothing does
    pruned: float
    pruned_error: float
    bits: float  # of a weight where quantising alone is to fit
    quantised: float
    quantised_error: float


def prices(base: OpenModel, data: Calibration, progress: Progress, seed: int) -> tuple[Price, ...]:
    """Price a model on text: the default strategy's plans are measured on what is held out, each
    unit's rounding on the rest."""
    nbytes = Size.of(base.checkpoint.tensors.values()).bytes
    limits = [int(nbytes * target) for target in TARGETS]
    experts = base.architecture.experts
    sizes = {count: output_size(base, count).bytes for count in range(1, experts)}
    counts = [
        max((count for count, size in sizes.items() if size <= limit), default=0)
        for limit in limits
    ]
    shares = [Fraction(count, experts) for count in dict.fromkeys(counts) if count]
    prune = Prune(correct=Correct(method="none"))
    measured = dict[int, tuple[float, float]]()
    with tempfile.TemporaryDirectory() as folder:
        planned, _ = plan_shares(base, [prune], data, progress, seed, shares, Path(folder))
        evaluator = Evaluator(base, [EvaluationSet("held-out", data.heldout_batches)])
        variants = [share.rounded({}, PlannedShare.cut) for share in planned]
        model = planned[0].model if planned else base
        results = evaluator.measure(model, variants, progress=progress) if planned else []
    for share, figures in zip(planned, results, strict=True):
        error = float(figures.kl.std()) / math.sqrt(len(figures.kl))
        measured[share.plan.experts // model.architecture.layers[0].parts] = (
            figures.means["kl"],
            error,
        )
    whole = PlannedShare(Fraction(1), base, untouched(base))
    dense = [matrix for matrix in find_matrices(base, ALL).every if matrix.expert is None]
    units = whole.units(dense)
    schemes = [candidates(unit, ()) for unit in units]
    batches = data.without_heldout().batches
    table = sensitivities(base, units, schemes, batches, whole.stored, progress)
    table = table.of(units, schemes, whole.stored)
    weights = sum(matrix.rows * matrix.columns for unit in units for matrix in unit.matrices)
    finest = chosen_layers(table.formats(table.finest))
    rest = whole.size(finest) - table.total(table.finest)
    found = list[Price]()
    for limit, count in zip(limits, counts, strict=True):
        choice = table.best(limit - rest)
        known = measured.get(count, (math.inf, math.inf))
        bits = quantised = error = math.inf
        if choice is not None:
            bits = 8 * table.total(choice) / weights
            quantised, error = table.predicted(choice), table.standard_error(choice)
        found.append(Price(limit, count, *known, bits, quantised, error))
    return tuple(found)


def price_blocks(found: Sequence[Price], experts: int) -> list[Block]:
    """Return the table of prices, and what to do."""

    def cost(kl: float, error: float) -> str:
        return f"{kl:.4f} ± {error:.4f}" if math.isfinite(kl) else "-"

    rows = []
    for target, price in zip(TARGETS, found, strict=True):
        kept = f"{price.experts} of {experts}" if price.experts else "none fits"
        rows.append(
            (
                f"{target} ({human_bytes(price.bytes)})",
                kept,
                cost(price.pruned, price.pruned_error),
                f"{price.bits:.2f}" if math.isfinite(price.bits) else "-",
                cost(price.quantised, price.quantised_error),
            )
        )
    columns = ("of the bytes", "experts", "KL, not refitted", "or bits", "KL, predicted")
    sentences = []
    first = found[0]
    if not first.pruned <= REDUNDANT:
        sentences.append("This checkpoint has little redundancy: its experts are all in use.")
    if all(price.quantised < price.pruned for price in found):
        sentences.append("Quantise instead: at each of these sizes that costs less than pruning.")
    title = "Price: KL from this model in nats per token ± its standard error"
    return [Table(title, columns, rows), *map(Text, sentences)]
