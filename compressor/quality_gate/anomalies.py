"""Scores that say more about how models were asked than about the models.

A base is tested against the score that it should have and against guessing, and a smaller model for
being better than its base. The p-values of all these tests are corrected together (Holm), so that
where nothing is wrong an anomaly is found in at most `FALSE_ALARMS` of samples."""

from collections.abc import Mapping, Sequence

import numpy as np
import scipy

from compressor.answers.scores import ItemScores
from compressor.quality_gate.options import Expectation
from compressor.quality_gate.statistics import holm, ratio_error
from compressor.quality_gate.verdict import Anomaly, Asked, TaskGate

FALSE_ALARMS = 0.05
SURE = 2.0  # standard errors: the tolerance of a score that is given without one
ABOVE_CHANCE = 0.15  # share of items: a base that gets so many more right than guessing is in order
# share of answers that reach the token limit from which this is the likely cause of wrong ones
MANY_CUT = 0.1
NOTICEABLE = 0.1  # p of as many right answers by guessing, below which a base is better than that


def find_anomalies(
    rows: Sequence[TaskGate],
    base: Sequence[ItemScores],
    expectations: Mapping[str, Expectation],
    asked: Asked,
) -> tuple[Anomaly, ...]:
    """Return the anomalies of tasks with the base's scores on them; `asked` names the chat template
    of each task, as far as it is known."""
    suspects = []
    for row, scores in zip(rows, base, strict=True):
        if row.task in expectations:
            expected = expectations[row.task]
            suspects.append(
                (row, f"not {expected.score} as expected", expected_p(row, scores, expected))
            )
        if row.mcnemar is None:
            continue
        if scores.chance is not None:
            suspects.append(
                (
                    row,
                    f"no better than guessing, {scores.chance:.4f}",
                    chance_p(scores, scores.chance),
                )
            )
        if row.gained > row.lost:
            suspects.append(
                (row, f"clearly worse than the compressed model, {row.compressed:.4f}", row.mcnemar)
            )
    corrected = holm(np.array([p for *_, p in suspects])).tolist()
    anomalies = []
    for (row, reason, _), p in zip(suspects, corrected, strict=True):
        if p < FALSE_ALARMS:
            cause = "most often a broken or missing chat template"
            if row.cut is not None and row.cut[0] >= MANY_CUT:
                cause = (
                    f"likely since {row.cut[0]:.1%} of its answers reached the token limit; "
                    f"else {cause}"
                )
            if row.task in asked:
                cause += f"; used was {asked[row.task]['chat_template'] or 'none'}"
            sentence = (
                f"ANOMALOUS: on {row.task} the base scores {row.base:.4f}, {reason} ({cause})"
            )
            anomalies.append(Anomaly(row.task, sentence, p))
    return tuple(anomalies)


def expected_p(row: TaskGate, scores: ItemScores, expected: Expectation) -> float:
    """Return the two-sided p of a base's scores if its true score is within the tolerance: exact if
    right or wrong."""
    values = np.array(scores.values)
    tolerance = expected.tolerance
    if row.mcnemar is None:
        weights = np.array([item.weight for item in scores.items])
        error = ratio_error(values, weights) * (row.base if row.kind == "likelihood" else 1.0)
        # a metric of which less is better is negated
        distance = abs(abs(row.base) - abs(expected.value)) - (
            SURE * error if tolerance is None else tolerance
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            tail = scipy.special.stdtr(max(row.items - 1, 1), -np.nan_to_num(distance / error))
    else:
        right = values.sum()
        tolerance = SURE * 0.5 / row.items**0.5 if tolerance is None else tolerance
        low, high = np.clip([expected.value - tolerance, expected.value + tolerance], 0, 1)
        tail = min(
            scipy.stats.binom.cdf(right, row.items, low),
            scipy.stats.binom.sf(right - 1, row.items, high),
        )
    return min(2 * float(tail), 1.0)


def chance_p(scores: ItemScores, chance: float) -> float:
    """Return the p of so few right answers if many more than by guessing are due; 1 if there are
    noticeably more."""
    right = sum(scores.values)
    items = len(scores.items)
    if scipy.stats.binom.sf(right - 1, items, chance) < NOTICEABLE:
        return 1.0
    return float(scipy.stats.binom.cdf(right, items, min(chance + ABOVE_CHANCE, 1.0)))
