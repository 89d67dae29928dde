"""What pruning and quantising would cost, told before anything is made: KL at 3/4, 1/2 and 1/3 of
the bytes."""

import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from compressor.checkpoint.reader import Size
from compressor.data.batches import Calibration, EvaluationSet
from compressor.divergence.evaluator import FEWEST, Evaluator
from compressor.document.blocks import Block, Table, Text
from compressor.formatting import human_bytes
from compressor.frozen import frozen
from compressor.pipeline.resolve import HELDOUT, Session, read_calibration
from compressor.recipe.step import TextOptions
from compressor.records import finite
from compressor.report.sizes import RIDGE, PlannedShare, dense_matrices, plan_shares
from compressor.steps.job import output_size, untouched
from compressor.steps.prune.options import Prune
from compressor.steps.quantize.choosing import candidates, chosen_layers, sensitivities

TARGETS = (Fraction(3, 4), Fraction(1, 2), Fraction(1, 3))  # of the bytes
MOST_TOKENS = 32768  # that a price is measured on; a run on as many takes minutes
REDUNDANT = 0.1  # nats per token that 3/4 of the bytes may cost a model with redundant experts


@frozen
class Cost:
    """KL from the model in nats per token, and its standard error over sequences."""

    kl: float
    standard_error: float | None  # None of one sequence

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.4f}"
        return f"{self.kl:.4f}{error}"


@frozen
class Price:
    """What fits into so many bytes: by pruning alone, measured after refitting in closed form,
    beside which `tune` wins back more; or by bits by layer alone, predicted. None where nothing
    fits."""

    share: Fraction
    bytes: int
    experts: int | None  # of each layer, that stay
    pruned: Cost | None
    bits: float | None  # of a weight, scales included
    quantised: Cost | None


def prices(session: Session, text: TextOptions) -> list[Price]:
    """Price an opened model on at most `MOST_TOKENS` of a text: plans of the default strategy are
    measured on what is held out, the rounding of each layer's experts and other matrices on the
    rest."""
    base = session.model
    samples = min(text.samples, max(MOST_TOKENS // text.sequence_length, 2 * FEWEST))
    few = text.model_copy(update={"samples": samples})
    data = read_calibration(session, few, 0, max(HELDOUT, min(FEWEST / samples, 0.5)))
    nbytes = Size.of(base.checkpoint.tensors.values()).bytes
    pruned = _pruned(session, data, [int(nbytes * target) for target in TARGETS])
    whole = PlannedShare(Fraction(1), base, untouched(base))
    units = whole.units(dense_matrices(base))
    schemes = [candidates(unit, ()) for unit in units]
    batches = data.without_heldout().batches
    table = sensitivities(base, units, schemes, batches, whole.stored, session.progress)
    table = table.of(units, schemes, whole.stored)  # what may stay as it is stored
    rest = whole.size(chosen_layers(table.formats(table.finest))) - table.total(table.finest)
    weights = sum(unit.weights for unit in units)
    found = []
    for target in TARGETS:
        limit = int(nbytes * target)
        bits = cost = None
        choice = table.best(limit - rest)
        if choice is not None:
            bits = 8 * table.total(choice) / weights
            kl = table.predicted(choice)
            cost = Cost(kl, finite(kl * table.relative))
        found.append(Price(target, limit, *pruned[limit], bits, cost))
    return found


def _pruned(
    session: Session, data: Calibration, limits: Sequence[int]
) -> dict[int, tuple[int | None, Cost | None]]:
    """Return by limit of bytes how many experts of a layer fit, and what that costs."""
    base = session.model
    experts = base.architecture.experts
    sizes = {count: output_size(base, count).bytes for count in range(1, experts)}
    counts = dict[int, int]()
    for limit in limits:
        fitting = [count for count, size in sizes.items() if size <= limit]
        if fitting:
            counts[limit] = max(fitting)
    costs = dict[int, Cost]()
    prune = Prune(correct=RIDGE)
    shares = [Fraction(count, experts) for count in counts.values()]
    with tempfile.TemporaryDirectory() as folder:
        given = data, session.progress, 0, shares, Path(folder)
        planned, _ = plan_shares(base, [prune], *given)
        variants = [share.rounded({}, PlannedShare.cut) for share in planned]
        evaluator = Evaluator(base, [EvaluationSet("held-out", data.heldout_batches)])
        if variants:
            results = evaluator.measure(base, variants, progress=session.progress)
            for share, figures in zip(planned, results, strict=True):
                cost = Cost(figures.means["kl"], finite(figures.kl_error))
                costs[share.plan.experts] = cost
    return {limit: (counts.get(limit), costs.get(counts.get(limit, 0))) for limit in limits}


def price_blocks(found: Sequence[Price], experts: int) -> list[Block]:
    """Return the table of prices of a model with so many experts, and what to do."""
    rows = []
    for price in found:
        kept = f"{price.experts} of {experts}" if price.experts else "none fits"
        bits = f"{price.bits:.2f}" if price.bits else "none fits"
        costs = (str(cost or "-") for cost in (price.pruned, price.quantised))
        pruned, quantised = costs
        size = f"{price.share} ({human_bytes(price.bytes)})"
        rows.append((size, kept, pruned, bits, quantised))
    columns = ("of the bytes", "experts", "KL, refitted", "or bits", "KL, predicted")
    title = "Price: KL from this model in nats per token ± its standard error"
    blocks: list[Block] = [Table(title, columns, rows)]
    first = found[0].pruned
    if first is None or first.kl - 2 * (first.standard_error or 0.0) > REDUNDANT:
        blocks.append(Text("This checkpoint has little redundancy: its experts are all in use."))
    pairs = [(price.pruned, price.quantised) for price in found]
    if all(cut is None or (cost and cost.kl < cut.kl) for cut, cost in pairs):
        blocks.append(
            Text("Quantise instead: at each of these sizes that costs less than pruning.")
        )
    return blocks
