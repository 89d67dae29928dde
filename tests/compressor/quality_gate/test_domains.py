import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t as student_t

from compressor.divergence.evaluator import Figures
from compressor.document.markdown import markdown
from compressor.errors import CompressionError
from compressor.quality_gate.domain_divergence import DomainDivergence, divergence_blocks
from compressor.quality_gate.domains import domain_divergence
from compressor.records import plain_json, read_as

ONE_TWO = {0: "one", 1: "two"}
RANDOM = np.random.default_rng(0)


def figures(rises: list[float], sequences: int = 40, tokens: int = 64, **more: Any) -> Figures:
    """Of one domain for each rise of the loss, with noise; KL is as large, flips are a tenth."""
    count = sequences * len(rises)
    base = torch.tensor(RANDOM.normal(2.0, 0.3, count))
    rise = torch.tensor(np.repeat(rises, sequences) + RANDOM.normal(0, 0.02, count))
    domain = torch.arange(len(rises)).repeat_interleave(sequences)
    sizes = torch.full((count,), tokens)
    return Figures(rise.abs(), base + rise, rise.abs() / 10, sizes, domain, base, **more)


def test_changes_are_means_over_tokens_with_bounds_of_students_t() -> None:
    given = figures([0.1, 0.3])
    found = domain_divergence(given, ONE_TWO)
    assert [row.domain for row in found.domains] == ["two", "one"]  # the worst first
    for number, row in enumerate(reversed(found.domains)):
        own = given.of({number})
        rises = (own.loss - own.base_loss).numpy()
        error = rises.std(ddof=1) / math.sqrt(len(rises))
        half = error * student_t.isf(0.05, len(rises) - 1)
        assert row.loss.change == pytest.approx(rises.mean()) and row.loss.standard_error == pytest.approx(error)
        assert row.loss.lower == pytest.approx(rises.mean() - half, abs=half / 10)  # beside skewness
        assert row.loss.upper == pytest.approx(rises.mean() + half, abs=half / 10)
        assert row.loss.base == pytest.approx(float(own.base_loss.mean())) and row.kl.base == row.flips.base == 0
        assert row.kl.change == pytest.approx(float(own.kl.mean())) and row.tokens == 40 * 64
    assert found.together is not None and found.together.sequences == 80
    assert found.together.loss.change == pytest.approx(float((given.loss - given.base_loss).mean()))
    uneven = domain_divergence(replace(given, tokens=torch.arange(80) + 1), ONE_TWO)
    weighted = np.average(given.kl[:40], weights=np.arange(40) + 1)
    assert uneven.domains[1].kl.change == pytest.approx(weighted)
    assert read_as(DomainDivergence, plain_json(found)) == found


def test_a_copy_differs_by_nothing_and_its_bounds_shrink_with_tokens() -> None:
    same = figures([0.0])
    zero = same.kl * 0
    (row,) = domain_divergence(replace(same, kl=zero, loss=same.base_loss, flips=zero), {0: "one"}).domains
    assert row.loss.change == row.kl.change == row.flips.change == 0
    assert row.flips.upper == pytest.approx(-math.log(0.05) / (40 * 64)) and row.flips.lower == 0
    assert domain_divergence(figures([0.0]), {0: "one"}).together is None


@pytest.mark.parametrize(
    ("rises", "degraded"),
    [
        ([0.1, 0.1, 0.5], ["c"]),
        ([0.1, 0.1, 0.25], []),
        ([0.1, 0.4], ["b"]),
        ([0.5, 0.5, 0.5], []),
        ([0.0, 0.0, 0.0005], []),  # nothing to speak of
        ([-0.2, 0.0, 0.3], ["c"]),
        ([0.4], []),
    ],
)
def test_a_domain_is_degraded_above_three_times_the_mean_of_the_others(rises: list[float], degraded: list[str]) -> None:
    found = domain_divergence(figures(rises, 400), dict(enumerate("abc"[: len(rises)])))
    assert [each.domain for each in found.degraded] == degraded
    shown = markdown(divergence_blocks(found, "Text"))
    for each in found.degraded:
        others = np.mean([row.loss.change for row in found.domains if row.domain != each.domain])
        assert each.others == pytest.approx(others) and each.change > 3 * max(others, 0)
        assert f"The domain {each.domain} is degraded: its loss rises by" in shown
    assert ("is degraded" in shown) is bool(degraded)


def test_a_difference_within_its_error_is_no_degradation() -> None:
    RANDOM.bit_generator.state = np.random.default_rng(1).bit_generator.state
    few = figures([0.1, 0.1, 0.32], 2)
    few = replace(few, loss=few.loss + torch.tensor([0, 0, 0, 0, -0.2, 0.2]), base_loss=figures([0, 0, 0], 2).base_loss)
    assert "loss" not in {each.measure for each in domain_divergence(few, dict(enumerate("abc"))).degraded}


def test_probabilities_of_ends_are_means_where_they_come_and_elsewhere() -> None:
    due = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    stop_tokens = torch.zeros(4, 1, 5, dtype=torch.float64)
    stop_tokens[:, 0] = torch.stack([due, due * 0.9, due * torch.tensor([0.5, 0.7, 0, 0.6]), due + 0.5, due + 1.0], 1)
    found = domain_divergence(figures([0.1], 4, 10, stop_tokens=stop_tokens), {0: "one"}, ["the end"])
    (mark,) = found.domains[0].stop_tokens
    assert mark.count == 3 and mark.here is not None and mark.elsewhere is not None
    assert mark.here.base == pytest.approx(0.9) and mark.here.compressed == pytest.approx(0.6)
    assert mark.elsewhere.base == pytest.approx(5 / 37) and mark.elsewhere.compressed == pytest.approx(7 / 37)
    assert mark.here.lower < mark.here.change < mark.here.upper < 0
    shown = markdown(divergence_blocks(found, "Answers"))
    assert "token that ends the end" in shown and "0.9000 | 0.6000 | -0.300 (" in shown
    stop_tokens[:, 0, 0] = 0
    without = domain_divergence(figures([0.1], 4, 10, stop_tokens=stop_tokens), {0: "one"}, ["the end"])
    assert without.domains[0].stop_tokens[0].here is None


def test_figures_that_are_no_numbers_are_refused() -> None:
    broken = figures([0.1])
    broken.kl[3] = math.nan
    with pytest.raises(CompressionError, match="on prose the models' losses are not finite"):
        domain_divergence(broken, {0: "prose"})
