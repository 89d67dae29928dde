"""Number formats by layer: those that fit into so many bytes at the least KL from the model.

A unit is what gets one format, as servers fuse its matrices: a decoder layer's routed experts, or
its other matrices. Each unit is rounded alone, and the KL of the whole model is measured, in two
formats; in others it follows from the squared error of the weights, as a power of it between the
two, and in proportion below. Units' KLs nearly add up, so that an integer program finds the
formats of least sum. Two such choices are measured beside one format for all; the best is taken."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressor.data.batches import EvaluationSet
from compressor.devices import one_thread_each
from compressor.divergence.evaluator import Evaluator, Figures
from compressor.errors import CompressionError
from compressor.formatting import human_bytes
from compressor.frozen import frozen
from compressor.model.opened import OpenModel
from compressor.model.substitution import LayerTensors, Substitution
from compressor.progress import Progress
from compressor.steps.quantize.matrices import EXPERTS, Matrix
from compressor.steps.quantize.options import FORMATS, ROW, loaders
from compressor.steps.quantize.scheme import GROUPS, Scheme
from compressor.steps.quantize.writing import largest_weights, rounded

PASSES = 1.0  # of the text, that measuring units alone may take
READ = 0.75  # of the text, that they are measured on
CHOOSING = 3  # passes of the text that a choice takes at most, with those of what was chosen
PROBED = 128  # tokens of a sequence of these
MIDDLE = 4  # bits of the second format that is measured
ROWS = 32  # of a matrix, by which formats' errors are compared
FINEST = 8  # bits of the only format whose groups are not chosen, too
LEAST = 1e-9  # nats: a KL of none, for its logarithm
Format = Scheme | None  # None leaves the matrices as they are stored
Formats = Mapping["Unit", Format]


@frozen
class Unit:
    """Matrices that get one format: of a decoder layer its `experts`, or what is `dense`."""

    decoder_layer: str
    part: str
    matrices: tuple[Matrix, ...] = field(compare=False)

    @property
    def weights(self) -> int:
        return sum(matrix.rows * matrix.columns for matrix in self.matrices)


def units_of(matrices: Iterable[Matrix]) -> list[Unit]:
    """Return the units of a model's matrices, in the order of its layers."""
    found = defaultdict[tuple[str, str], list[Matrix]](list)
    for matrix in matrices:
        found[matrix.decoder_layer, matrix.unit].append(matrix)
    return [Unit(*place, tuple(members)) for place, members in found.items()]


def candidates(
    unit: Unit, servers: Sequence[str], names: Sequence[str] = (*FORMATS,)
) -> list[Scheme]:
    """Return the formats of these names, with their groups that divide a unit's matrices, that all
    servers load, the fewest bits first.

    Where no server is named, these are the integers, which stock transformers loads."""
    common = math.gcd(*(matrix.columns for matrix in unit.matrices))
    dividing = [size for size in GROUPS if common % size == 0] or [ROW]
    schemes = []
    for name, known in FORMATS.items():
        if name not in names:
            continue
        if known.group_size is not None:
            sizes = [known.group_size] if common % known.group_size == 0 or not servers else []
        else:
            sizes = dividing[:1] if known.bits == FINEST else dividing
        for size in sizes if servers or name.startswith("int") else []:
            readers = loaders(name, size == ROW)
            if all(server in readers for server in servers):
                schemes.append(Scheme(name, size))
    return sorted(schemes, key=lambda scheme: scheme.bits_per_weight)


@torch.no_grad()
def round_matrices(
    model: Any,
    values: Mapping[str, Tensor],
    matrices: Sequence[Matrix],
    scheme: Scheme,
    dtype: torch.dtype,
    clip: bool = True,
) -> dict[str, Tensor]:
    """Return the entries that hold these matrices of one layer, rounded to nearest.

    `values` are those of the model's entries, which it need not hold itself."""
    copies = {matrix.key: values[matrix.key].detach().clone() for matrix in matrices}
    views = {matrix: matrix.within(model, copies[matrix.key]) for matrix in matrices}
    largest = largest_weights({matrices[0].unit: scheme}, matrices, views.__getitem__)

    def place(matrix: Matrix) -> None:
        value = views[matrix]
        value.copy_(nearest(scheme, value, dtype, largest.get(matrix.together), clip))

    with one_thread_each() as pool:
        list(pool.map(place, matrices))
    return copies


def nearest(
    scheme: Scheme,
    weight: Tensor,
    dtype: torch.dtype,
    largest: Tensor | None = None,
    clip: bool = True,
) -> Tensor:
    """Return the values [O, I] that are loaded of a matrix [O, I], stored in `dtype`, rounded to
    nearest; for NVFP4 with the `largest` [1] weight of what shares its global scale."""
    value = weight.to(dtype)[None]
    pieces = rounded(scheme, value, scheme.ranges(value), dtype, largest, clip)
    return torch.cat([scheme.values(codes, scales)[0] for codes, scales in pieces])


@dataclass(eq=False)
class Sensitivities:
    """The predicted KL of each unit in each of its formats, in nats per token, and its bytes."""

    units: Sequence[Unit]
    schemes: Sequence[Sequence[Format]]  # of each unit
    kl: Sequence[Sequence[float]]
    nbytes: Sequence[Sequence[int]]
    relative: float  # standard error of a predicted KL, over the KL
    # True if all experts get one format: stock transformers reads those of all layers alike
    together: bool = True

    @property
    def finest(self) -> list[int]:
        """The format of most bits of each unit."""
        numbers = []
        for own in self.schemes:
            bits = [scheme.bits_per_weight if scheme else 0.0 for scheme in own]
            numbers.append(int(np.argmax(bits)))
        return numbers

    @property
    def coarsest(self) -> list[int]:
        """The format of fewest bytes of each unit."""
        return [int(np.argmin(sizes)) for sizes in self.nbytes]

    def of(
        self, units: Sequence[Unit], schemes: Sequence[Sequence[Scheme]], dtype: torch.dtype
    ) -> "Sensitivities":
        """Return those of a smaller model's units, which may also stay as they are stored.

        A format that was not measured here counts as the one with the nearest bits."""
        known = dict(zip(self.units, zip(self.schemes, self.kl, strict=True), strict=True))
        kls, sizes = list[list[float]](), list[list[int]]()
        for unit, own in zip(units, schemes, strict=True):
            measured = [(scheme, kl) for scheme, kl in zip(*known[unit], strict=True) if scheme]

            def kl_of(scheme: Scheme, measured: Any = measured) -> float:
                bits = scheme.bits_per_weight
                return float(min(measured, key=lambda one: abs(one[0].bits_per_weight - bits))[1])

            plain = unit.weights * dtype.itemsize
            kls.append([*map(kl_of, own), 0.0])
            sizes.append([*(unit_bytes(unit, scheme, dtype) for scheme in own), plain])
        formats = [[*own, None] for own in schemes]
        return Sensitivities(units, formats, kls, sizes, self.relative, self.together)

    def total(self, choice: Sequence[int]) -> int:
        """Return the bytes of the matrices in these formats, one number for each unit."""
        return sum(sizes[number] for sizes, number in zip(self.nbytes, choice, strict=True))

    def predicted(self, choice: Sequence[int]) -> float:
        """Return the sum of the units' KLs."""
        return sum(kls[number] for kls, number in zip(self.kl, choice, strict=True))

    def best(self, limit: int, unlike: Sequence[int] = ()) -> list[int] | None:
        """Return the format of each unit at the least sum of KLs, in at most so many bytes; None if
        none is so small.

        At least an eighth of the units have other formats than in the choice `unlike`."""
        if not self.together:
            return self._solved(limit, unlike)
        of_experts = [
            {*own}
            for unit, own in zip(self.units, self.schemes, strict=True)
            if unit.part == EXPERTS
        ]
        common = set[Format].intersection(*of_experts) if of_experts else {None}
        choices = [self._solved(limit, unlike, {scheme}) for scheme in common]
        found = [choice for choice in choices if choice is not None]
        return min(found, key=self.predicted, default=None)

    def _solved(
        self, limit: int, unlike: Sequence[int], experts: Collection[Format] | None = None
    ) -> list[int] | None:
        """Solve the integer program, with one of these formats for all experts."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        costs, sizes = np.concatenate(self.kl), np.concatenate(self.nbytes).astype(float)
        counts = [len(kls) for kls in self.kl]
        begins = np.cumsum([0, *counts[:-1]])
        once = np.zeros((len(counts), len(costs)))
        for row, (begin, count) in enumerate(zip(begins, counts, strict=True)):
            once[row, begin : begin + count] = 1
        most = sizes.max()
        limits = [
            LinearConstraint(sizes / most, -np.inf, limit / most),
            LinearConstraint(once, 1, 1),
        ]
        if unlike:
            same = np.zeros(len(costs))
            same[begins + np.asarray(unlike)] = 1
            limits.append(LinearConstraint(same, 0, len(counts) - math.ceil(len(counts) / 8)))
        allowed = [
            experts is None or unit.part != EXPERTS or scheme in experts
            for unit, own in zip(self.units, self.schemes, strict=True)
            for scheme in own
        ]
        found = milp(
            costs / costs.max(), constraints=limits, integrality=np.ones(len(costs)),
            bounds=Bounds(0, np.asarray(allowed, dtype=float)),
            options={"mip_rel_gap": 1e-3, "time_limit": 20},
        )  # fmt: skip
        if found.x is None:
            return None
        rows = np.split(found.x, begins[1:])
        return [int(row.argmax()) for row in rows]

    def alike(self, limit: int) -> list[int] | None:
        """Return the choice of one format for all at the least sum of KLs, in at most so many
        bytes; None if there is none. Units that its groups don't divide have others."""
        choices = list[list[int]]()
        for scheme in filter(None, self.schemes[0]):
            choice = list[int]()
            for own in self.schemes:
                named = [
                    place for place, each in enumerate(own) if each and each.name == scheme.name
                ]
                exact = [at for at in named if own[at] == scheme]
                choice += (exact or named)[:1]
            if len(choice) == len(self.units):
                choices.append(choice)
        fitting = [choice for choice in choices if self.total(choice) <= limit]
        return min(fitting, key=self.predicted, default=None)

    def formats(self, choice: Sequence[int]) -> dict[Unit, Format]:
        """Return the format of each unit."""
        return {
            unit: schemes[number]
            for unit, schemes, number in zip(self.units, self.schemes, choice, strict=True)
        }


def rounding(
    model: OpenModel,
    formats: Formats,
    dtype: torch.dtype,
    cut: LayerTensors = lambda _: None,
    smaller: Any = None,
    clip: bool = True,
) -> Substitution:
    """Return the variant of a model in which these units are rounded to nearest, by searched ranges
    if they `clip`. `cut` returns entries of a layer that are changed before, as in the `smaller`
    stock model."""

    def tensors(decoder_layer: str) -> dict[str, Tensor] | None:
        changed = dict(cut(decoder_layer) or {})
        live = model.partial.model
        for unit, scheme in formats.items():
            if unit.decoder_layer == decoder_layer and scheme is not None:
                keys = {matrix.key for matrix in unit.matrices}
                values = {key: live.get_parameter(key) for key in keys - changed.keys()} | changed
                of = live if smaller is None else smaller
                changed |= round_matrices(of, values, unit.matrices, scheme, dtype, clip)
        return changed or None

    return Substitution(tensors)


def probes_of(batches: Sequence[Tensor], variants: int) -> list[EvaluationSet]:
    """Return sets of text [B, L] from at most `READ` of the batches [B, L], of which one for each
    of so many variants takes `PASSES` of them."""
    tokens = sum(batch.numel() for batch in batches)
    rows = torch.cat([batch[:, :PROBED] for batch in batches])
    count = max(1, round(tokens * PASSES / variants / rows.shape[1]))
    most = max(1, round(tokens * READ / rows.shape[1] / count))  # sets
    sets = [part for part in rows.split(count) if len(part) == min(count, len(rows))][:most]
    return [EvaluationSet(str(number), (part,)) for number, part in enumerate(sets)]


def sensitivities(
    model: OpenModel,
    units: Sequence[Unit],
    schemes: Sequence[Sequence[Scheme]],
    batches: Sequence[Tensor],
    dtype: torch.dtype,
    progress: Progress,
    together: bool = True,
) -> Sensitivities:
    """Measure each unit alone in its smallest format and in one of `MIDDLE` bits, and all units so
    together, side by side in one streamed pass.

    Parts of the text [B, L] take turns, one for each unit. Single KLs don't quite add up, and a
    part differs from the text: units' KLs are scaled so that their sum is that of all together."""
    errors = dict[Unit, list[float]]()

    def measured(unit: Unit, own: Sequence[Scheme], change: Substitution) -> Substitution:
        assert change.tensors is not None
        tensors = change.tensors

        def and_errors(decoder_layer: str) -> Mapping[str, Tensor] | None:
            if unit.decoder_layer == decoder_layer and unit not in errors:
                errors[unit] = errors_of(model.partial.model, unit, own, dtype)
            return tensors(decoder_layer)

        return replace(change, tensors=and_errors)

    variants, whole = [], []
    middle = list[int]()
    for own in schemes:
        middle.append(next((place for place, one in enumerate(own) if one.bits >= MIDDLE), 0))
    levels = [0] * len(units), middle  # the places of each unit's formats
    for places in levels:
        formats = {unit: own[at] for unit, own, at in zip(units, schemes, places, strict=True)}
        whole.append(rounding(model, formats, dtype))
        for unit, own in zip(units, schemes, strict=True):
            alone = rounding(model, {unit: formats[unit]}, dtype)
            variants.append(measured(unit, own, alone))
    sets = probes_of(batches, len(variants))
    evaluator = Evaluator(model, sets)
    parts = list[list[int]]()  # of the evaluator's batches, for each unit
    for number in range(len(units)):
        of_set = number % len(sets)
        parts.append([batch for batch, part in enumerate(evaluator.domains) if part == of_set])
    half = [batch for batch, part in enumerate(evaluator.domains) if part % 2 == 0]
    variants += whole
    only = [*parts, *parts, half, half]
    phase = "round units alone"
    figures = evaluator.measure(model, variants, progress=progress, phase=phase, only=only)
    known = defaultdict[int, list[tuple[float, float]]](list)  # error and KL of a unit's formats
    relative = 0.0
    for level, (places, all_so) in enumerate(zip(levels, figures[-2:], strict=True)):
        mean = max(all_so.means["kl"], LEAST)
        relative = max(relative, all_so.kl_error / mean)
        single = [figure.means["kl"] for figure in figures[level * len(units) :][: len(units)]]
        scale = mean / max(sum(single), LEAST)
        for number, (place, kl) in enumerate(zip(places, single, strict=True)):
            known[number].append((errors[units[number]][place], max(scale * kl, LEAST)))
    kls, nbytes = [], []
    for number, (unit, own) in enumerate(zip(units, schemes, strict=True)):
        kls.append([interpolated(error, known[number]) for error in errors[unit]])
        nbytes.append([unit_bytes(unit, scheme, dtype) for scheme in own])
    return Sensitivities(units, schemes, kls, nbytes, relative, together)


def unit_bytes(unit: Unit, scheme: Scheme, dtype: torch.dtype) -> int:
    """Return the bytes of a unit's matrices as they are stored in a format."""
    return sum(scheme.nbytes(matrix.rows, matrix.columns, dtype) for matrix in unit.matrices)


@torch.no_grad()
def errors_of(model: Any, unit: Unit, schemes: Sequence[Scheme], dtype: torch.dtype) -> list[float]:
    """Return the squared error of a unit's weights in each format, by some rows of each matrix."""
    totals = [0.0] * len(schemes)
    for matrix in unit.matrices:
        weight = matrix.of(model)
        rows = weight[:: max(1, len(weight) // ROWS)].float()
        for number, scheme in enumerate(schemes):
            totals[number] += float((nearest(scheme, rows, dtype) - rows).square().sum())
    return totals


def interpolated(error: float, known: Sequence[tuple[float, float]]) -> float:
    """Return the KL of a format with this squared error from those of one or two others: in
    proportion to it below the smaller one, a power of it above."""
    (coarse, most), (fine, least) = known[0], known[-1]
    if error <= fine or coarse <= fine:
        return least * error / fine if fine else least
    power = math.log(max(most, least) / least) / math.log(coarse / fine)
    return float(least * (error / fine) ** power)


@frozen
class Tried:
    """A choice of formats that was measured against the model, on held-out text."""

    name: str
    formats: Formats
    nbytes: int
    predicted: float  # KL in nats per token
    figures: Figures

    @property
    def kl(self) -> float:
        return self.figures.means["kl"]


def choose(
    model: OpenModel,
    table: Sensitivities,
    limit: int,
    heldout: Sequence[Tensor],
    dtype: torch.dtype,
    progress: Progress,
) -> list[Tried]:
    """Return two choices within `limit` bytes of the quantised matrices and one format for all,
    measured on held-out text [B, L], the best first.

    Raises `CompressionError` naming the smallest possible."""
    first = table.best(limit)
    if first is None:
        least = table.total(table.coarsest)
        raise CompressionError(
            f"quantize: {human_bytes(limit)} are too few for these weights; the smallest possible "
            f"is {human_bytes(least)}"
        )
    named: dict[str, list[int] | None] = {
        "by layer": first,
        "by layer, another way": table.best(limit, unlike=first),
    }
    alike = table.alike(limit)
    if alike is not None:
        widest = table.schemes[0][alike[0]]
        assert widest is not None
        named[f"{widest.label} for all"] = alike
    choices = {name: choice for name, choice in named.items() if choice is not None}
    variants = [rounding(model, table.formats(choice), dtype) for choice in choices.values()]
    evaluator = Evaluator(model, [EvaluationSet("held-out", tuple(heldout))])
    results = evaluator.measure(model, variants, progress=progress, phase="compare choices")
    tried = [
        Tried(name, table.formats(choice), table.total(choice), table.predicted(choice), figures)
        for (name, choice), figures in zip(choices.items(), results, strict=True)
    ]
    return sorted(tried, key=lambda one: one.kl if math.isfinite(one.kl) else math.inf)


def chosen_layers(formats: Formats) -> dict[str, dict[str, str]]:
    """Return formats as a decision, and the option `layers`, hold them."""
    layers = defaultdict[str, dict[str, str]](dict)
    for unit, scheme in formats.items():
        if scheme is not None:
            layers[unit.decoder_layer][unit.part] = scheme.label
    return dict(layers)
