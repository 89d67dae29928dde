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
from compressor.golden.faults import faults_of, of_vocabulary, scaled
from compressor.golden.fingerprints import cause_of_weights, fingerprints
from compressor.golden.measure import Variant, ask_model, config_of, open_exactly, with_answers
from compressor.model.constant_experts import declared
from compressor.model.opened import OpenModel
from compressor.progress import Progress, Silent
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
_SILENT = Silent()


class _Trial:
    """Plants faults in a model, to see which of them gives the observed answers."""

    def __init__(
        self, model: OpenModel, prompts: Sequence[GoldenPrompt], rounding: float, progress: Progress
    ) -> None:
        self.model = model
        self.layers = model.architecture.layers
        self.prompts = prompts  # with the observed answers
        self.rounding = rounding  # the distance that rounding alone makes
        self.progress = progress
        self.is_local = False  # some answers are right
        self.answers = list[list[Top]]()  # by fault, the first of which is none
        self.distances = list[list[float]]()  # of these from the observed ones

    def find(self) -> str | None:
        """Return the sentence of the fault that explains the answers; None if no known one does."""
        faults = [*faults_of(self.layers), *of_vocabulary()]
        cause = self._try(faults)
        if cause is not None:
            return cause
        single = [scaled(NUDGE, [layer]) for layer in self.layers]
        for layer in self.layers:
            single += faults_of([layer])
        self.is_local = not is_even(self.distances[0], [1.0] * len(self.distances[0]))
        self.prompts = self.prompts[:PROMPTS]
        return self._try(single) or self._try(self._fitted())

    def _try(self, faults: Sequence[Variant]) -> str | None:
        """Return the sentence of the fault with the nearest answers, if they are near enough."""
        variants = [Variant(), *faults]
        self.answers = ask_model(
            self.model, self.prompts, variants, self.progress, len(self.prompts)
        )
        observed = [top for prompt in self.prompts for top in prompt.top]
        self.distances = []
        for variant, answers in zip(variants, self.answers, strict=True):
            pairs = zip(answers, observed, strict=True)
            self.distances.append([_error(top, seen, variant.outputs) for top, seen in pairs])
        means = [fmean(distances) for distances in self.distances]
        best = stable_argmin(means)
        if means[best] > max(min(self.rounding, means[0] / 2), EXPLAINED * means[0]):
            return None
        return variants[best].sentence or None

    def _fitted(self) -> list[Variant]:
        """Return the scale of each layer's experts that would, to first order, come nearest, and
        larger ones.

        Of the triangle of sound, nudged and observed answers, the sides are known.
        """
        sound = self.answers[0]
        faults = list[Variant]()
        for number, layer in enumerate(self.layers, 1):
            nudged = self.answers[number]
            effects = [first.distance(second) for first, second in zip(sound, nudged, strict=True)]
            least = median(effects)
            steps = list[float]()  # the median counts: tokens that change experts are few
            for effect, before, after in zip(
                effects, self.distances[0], self.distances[number], strict=True
            ):
                if effect >= least and effect > 0:
                    steps.append((before**2 + effect**2 - after**2) / (2 * effect**2))
            if steps:
                step = median(steps) * (NUDGE - 1)
                faults += [scaled(1 + factor * step, [layer]) for factor in FACTORS]
        return faults


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
    progress: Progress = _SILENT,
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
        sound = open_exactly(ModelSource(str(reference), None, reference), device)
    except CompressionError:  # there is no model
        return None
    observed = with_answers(golden.prompts, [top or Top((), ()) for top in answered.top])
    trial = _Trial(sound, observed, rounding, progress)
    with suppress(CompressionError):  # of layers that cannot be changed like this
        cause = trial.find()
        if cause is not None:
            return cause
    if declared(sound.checkpoint.raw_config):
        return OLD_SERVER
    return ONE_EXPERT if trial.is_local else None
