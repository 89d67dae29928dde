"""The likeliest cause of other answers: what happened to the config or the weights of a checkpoint.

Elsewhere it is the fault that, planted in the sound model, gives the answers that were observed.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import fmean, median

from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.golden.answers import LEAST, GoldenAnswers, GoldenPrompt, Top
from compressor.golden.compare import Answered, is_even
from compressor.golden.faults import Fault, FaultMaker
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


def _plant(
    model: OpenModel,
    prompts: Sequence[GoldenPrompt],
    faults: Sequence[Fault],
    rounding: float,
    progress: Progress,
) -> tuple[list[list[Top]], list[list[float]], str | None]:
    """Plant faults in a model, of which the first is none.

    Return the answers of each, how far these are from the observed ones, and the sentence of the
    fault that explains those, if one does."""
    variants = [(fault.variant, fault.inputs) for fault in faults]
    answers = ask_model(model, prompts, variants, progress, len(prompts))
    observed = [top for prompt in prompts for top in prompt.top]
    distances = list[list[float]]()
    for fault, given in zip(faults, answers, strict=True):
        distances.append([])
        for answer, seen in zip(given, observed, strict=True):
            logs = dict(zip(answer.tokens, answer.logs, strict=True))
            total = 0.0
            for token, log in zip(seen.tokens, seen.logs, strict=True):
                if token >= 0:  # it is known which one
                    expected = logs.get(token - fault.outputs, min(log, answer.logs[-1]))
                    total += (max(expected, LEAST) - max(log, LEAST)) ** 2
            distances[-1].append(math.sqrt(total / max(len(seen.tokens), 1)))
    means = list(map(fmean, distances))
    best = stable_argmin(means)
    # rounding alone makes some distance
    is_near = means[best] <= max(min(rounding, means[0] / 2), EXPLAINED * means[0])
    return answers, distances, faults[best].sentence or None if is_near else None


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
        model = open_exactly(ModelSource.of(reference), device)
    except CompressionError:  # there is no model
        return None
    constants = constants_of(model)
    prompts = with_answers(golden.prompts, answered.top)
    sound = Substitution(constants=constants)
    layers = model.architecture.layers
    is_local = False  # some answers are right
    with suppress(CompressionError):  # of layers that cannot be changed like this
        everywhere = FaultMaker(model, layers, constants)
        faults = [Fault("", sound), *everywhere.all()]
        # of both, prompts alone, and answers alone
        for by, (first, last) in product((1, -1), ((1, 1), (1, 0), (0, 1))):
            faults.append(Fault("the vocabulary is shifted by one", sound, -by * first, by * last))
        _, distances, cause = _plant(model, prompts, faults, rounding, progress)
        if cause is not None:
            return cause
        is_local = not is_even(distances[0], [1.0] * len(distances[0]))
        makers = [FaultMaker(model, [layer], constants) for layer in layers]
        faults = [Fault("", sound), *(maker.scaled(NUDGE) for maker in makers)]
        for maker in makers:
            faults += maker.all()
        answers, distances, cause = _plant(model, prompts[:PROMPTS], faults, rounding, progress)
        if cause is not None:
            return cause
        # The scale that would, to first order, come nearest is known from the nudge: of the
        # triangle of sound, nudged and observed answers, the sides are.
        fitted = [Fault("", sound)]
        for number, maker in enumerate(makers, 1):
            pairs = zip(answers[0], answers[number], strict=True)
            effects = [top.distance(nudged) for top, nudged in pairs]
            sides = zip(effects, distances[0], distances[number], strict=True)
            # the median counts: tokens that change experts are few
            steps = [
                (before**2 + effect**2 - after**2) / (2 * effect**2)
                for effect, before, after in sides
                if effect >= median(effects) and effect > 0
            ]
            if steps:
                step = median(steps) * (NUDGE - 1)
                fitted += [maker.scaled(1 + factor * step) for factor in FACTORS]
        _, _, cause = _plant(model, prompts[:PROMPTS], fitted, rounding, progress)
        if cause is not None:
            return cause
    if constants:
        return OLD_SERVER
    return ONE_EXPERT if is_local else None
