"""What a run will take: the work of each of its parts, at the rates that this machine shows in about a second."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from compressor.data.batches import BATCH_SIZE, Calibration
from compressor.distributed.present import here
from compressor.forecasting.cost import ExpertShape, Text, attention_widths, dense, forward, ridge, tune
from compressor.forecasting.machine import Machine, Product, Slowest
from compressor.model.opened import OpenModel
from compressor.planning.answering import HELDOUT
from compressor.planning.make import Wish
from compressor.planning.request import Request
from compressor.statistics.statistics import (
    DENSE,
    RECONSTRUCTION,
    SAMPLE_TOKENS,
    WEIGHTS,
    needs_attribution,
    needs_data,
)
from compressor.steps.correct.refit import Correction
from compressor.steps.correct.whole_model import WAYS
from compressor.steps.distill.options import Recovery
from compressor.surgery.job import output_size

LEAST = 20.0  # seconds of a run of which nothing is said
LONG = 3600.0  # seconds of tuning on a processor before which it is asked
SUBSETS = 5000  # kept subsets that a strategy tries which reconstructs the layer's output
FORWARD = 1.3  # a streamed pass over its matrix products: norms, activations, gathering tokens by expert
COMPARING = 2.0  # comparing and merging weights over the products of their surrogates
BACKWARD = 3.0  # forward and back over forward


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a run by the name of its phase, and the seconds that it will take."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run will take on a device; `quicker` are options by which it would take so many seconds in all."""

    parts: tuple[Part, ...]
    device: str
    quicker: tuple[tuple[str, float], ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds in all."""
        return sum(part.seconds for part in self.parts)

    @property
    def is_long(self) -> bool:
        """Whether there is anything to say."""
        return self.seconds >= LEAST

    @property
    def asks(self) -> bool:
        """Whether somebody should agree first: to long tuning on a processor, where something quicker would do."""
        tuning = sum(part.seconds for part in self.parts if part.name == "tune")
        return self.device == "cpu" and tuning >= LONG and bool(self.quicker)

    def __str__(self) -> str:
        """One line: 'about 4 min: calibration 2 min, tune 2 min'; parts of less than a twentieth are left out."""
        shown = [part for part in self.parts if part.seconds >= self.seconds / 20]
        told = ", ".join(f"{part.name} {duration(part.seconds)}" for part in shown)
        others = ", ".join(f"{option} about {duration(seconds)}" for option, seconds in self.quicker)
        return f"about {duration(self.seconds)}: {told}" + (f" ({others})" if others else "")


def duration(seconds: float) -> str:
    """Seconds as a person says them: '40 s', '4 min', '2.5 h', '3 days'."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.2g} h" if seconds < 48 * 3600 else f"{round(seconds / 86400)} days"


class Estimate:
    """Counts work on one opened model, and measures what it needs to know of the machine for it.

    Several ranks share the passes over text, the projections of an attribution, and correcting; all else is one's.
    """

    def __init__(self, model: OpenModel, machine: Machine | None = None) -> None:
        self.model, self.machine = model, machine or Machine(model.partial.device)
        self.ranks = here().size
        stored = model.checkpoint.tensors.values()
        largest = max(stored, key=lambda tensor: tensor.nbytes)
        self.bytes = sum(tensor.nbytes for tensor in stored)
        self.reading = self.bytes / self.machine.reading_rate(model.source.folder / largest.file)
        self.shapes = [ExpertShape.of(model, layer) for layer in model.architecture.layers]

    def seconds(self, products: Iterable[Product]) -> float:
        """Seconds of matrix products one after the other."""
        return sum(map(self.machine.seconds, products))

    def passing(self, text: Text, head: bool = False) -> float:
        """Seconds of a streamed forward of the text, without reading."""
        return FORWARD * self.seconds(forward(self.model, text, head)) / self.ranks

    def choosing(self, wish: Wish) -> float:
        """Seconds that a strategy takes beyond the pass: dense samples, comparing weights, reconstructing outputs."""
        needs, dtype, found = wish.strategy.needs, self.model.partial.dtype, 0.0
        for shape in self.shapes:
            if needs & DENSE:
                found += FORWARD * self.seconds(dense(shape, SAMPLE_TOKENS, dtype))
            if needs & WEIGHTS and not needs_data(needs):
                found += COMPARING * self.seconds([Product(shape.hidden, shape.inner, shape.hidden, shape.experts)])
            if needs >= RECONSTRUCTION:
                tried = min(SUBSETS, math.comb(shape.experts, wish.experts))
                found += self.seconds([Product(SAMPLE_TOKENS, shape.top_k, shape.hidden, tried)])
        return found

    def correcting(self, correction: Correction, kept: int, text: Text) -> float:
        """Seconds of refitting every layer: the layer twice more, ridge, tuning steps and the optimiser's updates.

        In the end the held-out text runs through the original, the corrected and the uncorrected model.
        """
        if not correction.wanted:
            return 0.0
        judged = round(text.tokens * HELDOUT)
        fit, found = text.tokens - judged, 2 * self.passing(text) + self.reading
        found += WAYS * HELDOUT * self.passing(text, head=True) + self.reading
        for shape in self.shapes:
            found += self.seconds(ridge(shape, kept, fit, judged, 4 * kept * shape.weights)) / self.ranks
            if correction.method == "tune":
                found += FORWARD * self.seconds(tune(shape, kept, fit, correction)) / self.ranks
                beside = self._updating(shape, kept) + self._around(shape, min(correction.tokens, fit))
                found += correction.steps * beside / self.ranks
        return found

    def _around(self, shape: ExpertShape, tokens: int) -> float:
        """Seconds of what lies around a tuning step's products: gathering tokens, activations, comparing outputs.

        It is about what the optimiser's step takes on as many elements.
        """
        elements = tokens * (shape.hidden + shape.top_k * shape.into)
        return self.machine.update_seconds(shape.into, shape.hidden) * elements / (shape.into * shape.hidden)

    def _updating(self, shape: ExpertShape, kept: int) -> float:
        """Seconds of a step of the optimiser on a layer's experts."""
        into, out = (shape.into, shape.hidden), (shape.hidden, shape.inner)
        return kept * (self.machine.update_seconds(*into) + self.machine.update_seconds(*out))

    def attributing(self, text: Text) -> float:
        """Seconds of attribution: two passes, and every component of a layer projected onto all later routers."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None) or 0
        found = 2 * (self.passing(text) + self.reading)
        rows, width = max(1, min(text.batch, text.sequences)) * text.length, attention_widths(self.model.config)[1]
        for number, shape in enumerate(self.shapes):
            later = sum(other.experts for other in self.shapes[number + 1 :])
            components = heads + shape.top_k + 2
            batches = text.tokens / rows
            projected = Product(rows, shape.hidden, max(later, 1), batches * components)
            apart = Product(rows, width // max(heads, 1) or 1, shape.hidden, batches * heads)
            found += FORWARD * self.seconds([projected, apart]) / self.ranks
        return found

    def training(self, options: Recovery, kept: int) -> float:
        """Seconds of a recovery: the teacher, the student forward and back, and the optimiser, step by step."""
        text = Text(options.sequences * options.steps, options.length, options.sequences)
        found = self.passing(text, head=True) * (1 + BACKWARD)
        if options.method in ("experts", "all"):
            found += options.steps * sum(self._updating(shape, kept) for shape in self.shapes)
        return found + 2 * self.reading * (options.steps if options.stream else 1)


def announce_long(
    announce: Callable[[Forecast], None] | None, made: Callable[[Machine | None], Forecast], model: OpenModel
) -> None:
    """Tell a listener, if there is one, of a forecast; nothing is measured for a run that is short on any machine."""
    if announce is not None and model.checkpoint.tensors and made(Slowest(model.partial.device)).is_long:
        announce(made(None))


def forecast_attribution(model: OpenModel, text: Text, machine: Machine | None = None) -> Forecast:
    """What `attribute` takes on a text."""
    estimate = Estimate(model, machine)
    return Forecast((Part("attribution", estimate.attributing(text)),), model.partial.device.type)


def forecast_recovery(model: OpenModel, options: Recovery, machine: Machine | None = None) -> Forecast:
    """What `recover` takes for a smaller model."""
    seconds = Estimate(model, machine).training(options, model.architecture.experts)
    return Forecast((Part("training", seconds),), model.partial.device.type)


def forecast_plan(
    model: OpenModel,
    request: Request,
    wish: Wish,
    machine: Machine | None = None,
    calibration: Calibration | None = None,
) -> Forecast:
    """What `plan` takes: statistics and choice, and the correction too where it is planned in order."""
    estimate, text = Estimate(model, machine), _text(request, calibration)
    return Forecast(_planning(estimate, request, wish, text, request.sequential), model.partial.device.type)


def forecast_compression(
    model: OpenModel,
    request: Request,
    wish: Wish,
    folder: Path,
    machine: Machine | None = None,
    calibration: Calibration | None = None,
) -> Forecast:
    """What `compress` takes, writing into a folder of this file system included.

    Without the `calibration` that it reads the text counts as long as the request allows.
    """
    estimate, text = Estimate(model, machine), _text(request, calibration)
    parts = list(_planning(estimate, request, wish, text, False))
    written = output_size(model, wish.experts).bytes
    rest = [Part("write", estimate.reading + written / estimate.machine.writing_rate(folder))]
    if request.recovers:
        options = Recovery(str(request.recover), steps=request.recover_steps, stream=request.recover_stream)
        rest.append(Part("recover", estimate.training(options, wish.experts)))
    if request.bakes:
        baked = Text(request.bake_sequences, 256, BATCH_SIZE)
        rest.append(Part("bake", estimate.passing(baked, head=True) * (1 + BACKWARD)))
    parts += rest
    correction, device = wish.correction, model.partial.device.type
    quicker: list[tuple[str, float]] = []
    if correction.wanted:
        parts.append(Part(correction.method, estimate.correcting(correction, wish.experts, text)))
    if correction.method == "tune" and parts[-1].seconds >= LONG:
        others = sum(part.seconds for part in parts[:-1])
        ridged = estimate.correcting(Correction("ridge"), wish.experts, text)
        quicker = [("with --correct ridge", others + ridged), ("with --correct none", others)]
    return Forecast(tuple(parts), device, tuple(quicker))


def _text(request: Request, calibration: Calibration | None) -> Text:
    """The text that was read, or the most that a request reads."""
    if calibration is None:
        return Text(request.samples, request.sequence_length, BATCH_SIZE)
    return Text.of(calibration)


def _planning(estimate: Estimate, request: Request, wish: Wish, text: Text, in_order: bool) -> tuple[Part, ...]:
    found = []
    if needs_attribution(wish.strategy.needs) or request.protects_what_data_shows:
        found.append(Part("attribution", estimate.attributing(text)))
    if estimate.model.is_split and wish.reads:
        found.append(Part("neurons", estimate.passing(text) + estimate.reading))
    if needs_data(wish.strategy.needs):
        found.append(Part("calibration", estimate.passing(text) + estimate.reading))
    elif wish.strategy.needs:
        found.append(Part("reading", estimate.reading))
    found.append(Part("choice", estimate.choosing(wish)))
    if in_order and wish.correction.wanted:
        found.append(Part(wish.correction.method, estimate.correcting(wish.correction, wish.experts, text)))
    return tuple(found)
