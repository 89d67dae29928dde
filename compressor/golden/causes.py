"""The likeliest cause of other answers: what happened to the config or the weights of a checkpoint.

Elsewhere it is the fault that, planted in the sound model, gives the answers that were observed.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median

from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.golden.answers import LEAST, GoldenAnswers, GoldenPrompt, Top
from compressor.golden.compare import Answered, is_even
from compressor.golden.faults import Fault, FaultMaker, of_vocabulary
from compressor.golden.fingerprints import cause_of_weights, fingerprints
from compressor.golden.measure import (
    ask_model,
    config_of,
    constants_of,
    open_exactly,
    with_answers,
)
from compressor.model.opened import OpenModel
from compressor.model.substitution import Substitution
from compressor.progress import SILENT, Progress
from compressor.tolerance import stable_argmin

NUDGE = 1.05  # a scale whose effect is linear
FACTORS = (1.0, 1.5, 2.0)  # of a first-order step, since answers move ever less
EXPLAINED = 0.2  # share of the distance that a fault may leave
ONE_EXPERT = (
    "answers that do not depend on some expert are right: look for one that is zero, or scaled"
)
OLD_SERVER = (
    "a server that ignores approximate_experts, as vLLM before 0.33 does, has nothing in "
    "place of such experts"
)
PROMPTS = 4  # on which faults of single layers are tried


class _Trial:
    """Faults planted in a model, and how far the answers of each are from the observed ones; the
    first is none."""

    def __init__(
        self,
        model: OpenModel,
        prompts: Sequence[GoldenPrompt],
        faults: Sequence[Fault],
        rounding: float,
        progress: Progress,
    ) -> None:
        variants = [(fault.variant, fault.inputs) for fault in faults]
        self.answers = ask_model(model, prompts, variants, progress, len(prompts))
        self.distances = list[list[float]]()
        for fault, answers in zip(faults, self.answers, strict=True):
            observed = [top for prompt in prompts for top in prompt.top]
            pairs = zip(answers, observed, strict=True)
            self.distances.append([_error(top, seen, fault.outputs) for top, seen in pairs])
        means = [fmean(distances) for distances in self.distances]
        best = stable_argmin(means)
        # rounding alone makes some distance
        is_near = means[best] <= max(min(rounding, means[0] / 2), EXPLAINED * means[0])
        self.cause = faults[best].sentence or None if is_near else None

    def scale_near(self, number: int) -> float | None:
        """Return the scale that would, to first order, come nearest, by the fault with this number,
        which is a nudge.

        Of the triangle of sound, nudged and observed answers, the sides are known."""
        pairs = zip(self.answers[0], self.answers[number], strict=True)
        effects = [sound.distance(nudged) for sound, nudged in pairs]
        steps = list[float]()  # the median counts: tokens that change experts are few
        for effect, before, after in zip(
            effects, self.distances[0], self.distances[number], strict=True
        ):
            if effect >= median(effects) and effect > 0:
                steps.append((before**2 + effect**2 - after**2) / (2 * effect**2))
        return median(steps) * (NUDGE - 1) if steps else None


def _error(answer: Top, observed: Top, shift: int) -> float:
    """Return the distance of a model's answer from an observed one, by the tokens that are known of
    that."""
    logs = dict(zip(answer.tokens, answer.logs, strict=True))
    total = 0.0
    for token, log in zip(observed.tokens, observed.logs, strict=True):
        if token >= 0:
            expected = logs.get(token - shift, min(log, answer.logs[-1]))
            total += (max(expected, LEAST) - max(log, LEAST)) ** 2
    return math.sqrt(total / max(len(observed.tokens), 1))


def find_cause(
    golden: GoldenAnswers,
    reference: Path,
    answered: Answered,
    rounding: float,
    device: str = "auto",
    progress: Progress = SILENT,
) -> str | None:
    """Return the likeliest cause of a difference; None if no known one explains it.

    `reference` is the folder of the golden answers, which may hold the sound model.
    """
    faulty = answered.model
    config = golden.config if faulty is None else config_of(faulty)
    for name, value in golden.config.items():
        if config.get(name) != value:
            return f"config.json has {name} {config.get(name)}, and the model had {value}"
    if faulty is not None:
        cause = cause_of_weights(golden.fingerprints, fingerprints(faulty))
        if cause is not None or faulty.source.folder.samefile(reference):
            return cause
    try:
        model = open_exactly(ModelSource(str(reference), None, reference), device)
    except CompressionError:  # there is no model
        return None
    constants = constants_of(model)
    prompts = with_answers(golden.prompts, answered.top)
    sound = Substitution(constants=constants)
    layers = model.architecture.layers
    is_local = False  # some answers are right
    with suppress(CompressionError):  # of layers that cannot be changed like this
        everywhere = FaultMaker(model, layers, constants)
        faults = [Fault("", sound), *everywhere.all(), *of_vocabulary(sound)]
        trial = _Trial(model, prompts, faults, rounding, progress)
        if trial.cause is not None:
            return trial.cause
        distances = trial.distances[0]
        is_local = not is_even(distances, [1.0] * len(distances))
        makers = [FaultMaker(model, [layer], constants) for layer in layers]
        faults = [Fault("", sound), *(maker.scaled(NUDGE) for maker in makers)]
        for maker in makers:
            faults += maker.all()
        trial = _Trial(model, prompts[:PROMPTS], faults, rounding, progress)
        if trial.cause is not None:
            return trial.cause
        fitted = [Fault("", sound)]
        for number, maker in enumerate(makers, 1):
            step = trial.scale_near(number)
            if step is not None:
                fitted += [maker.scaled(1 + factor * step) for factor in FACTORS]
        cause = _Trial(model, prompts[:PROMPTS], fitted, rounding, progress).cause
        if cause is not None:
            return cause
    if constants:
        return OLD_SERVER
    return ONE_EXPERT if is_local else None
