"""Calibration sources and held-out tokens in one pass, against passes over each part alone."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.model.opened import OpenModel
from compressor.progress import Silent
from compressor.statistics.statistics import (
    ALL,
    LayerStatistics,
    RouterArguments,
    collect,
)
from tests.support import zoo
from tests.support.opened_models import opened
from tests.support.statistic_groups import DENSE, SAMPLED, SUMS

NAMES = pytest.mark.parametrize("name", zoo.sweep(["mixtral", "zaya", "deepseek_v4", "minimax_m2", "ernie4_5_vl_moe"]))
DATA = ALL - {"weights", "rank_change"}
SHARES = (0.5, 0.25, 0.25)
SOURCES = (0, 1, 0, 2, 2, 0)
HELDOUT = frozenset({2, 4})  # nothing of source 1
SAMPLE = 24


def parts_of(stock: object, seed: int = 3) -> tuple[Tensor, ...]:
    """Six batches of unequal sizes."""
    return torch.split(zoo.tokens(stock, 9, 12, seed=seed), [1, 2, 1, 2, 1, 2])  # type: ignore[arg-type]


def gathered(model: OpenModel, data: Calibration) -> dict[str, LayerStatistics]:
    return {stats.layer.name: stats for stats in collect(model, DATA, data, Silent(), 0)}


def of(parts: Sequence[Tensor], sample_tokens: int = SAMPLE) -> Calibration:
    return Calibration(tuple(parts), {"source": "random tokens"}, sample_tokens=sample_tokens)


def mixed(parts: Sequence[Tensor], heldout: frozenset[int] = HELDOUT) -> Calibration:
    return Calibration(tuple(parts), {"source": "random tokens"}, SOURCES, SHARES, heldout, sample_tokens=SAMPLE)


def same(found: LayerStatistics, expected: LayerStatistics, needs: frozenset[str]) -> None:
    assert found.tokens == expected.tokens and set(found.values) - {"heldout"} == set(expected.values) == needs
    for name, value in expected.values.items():
        check(found.values[name], value, name)


def check(found: Tensor | RouterArguments, expected: Tensor | RouterArguments, name: str) -> None:
    if isinstance(expected, RouterArguments):
        assert isinstance(found, RouterArguments)
        assert found.dims == expected.dims and found.by_keyword.keys() == expected.by_keyword.keys()
        pairs = zip((*found.positional, *found.by_keyword.values()),
                    (*expected.positional, *expected.by_keyword.values()), strict=True)  # fmt: skip
        for one, other in pairs:
            if not isinstance(other, Tensor):
                assert one is other
            elif other.device.type != "meta":
                check(one, other, name)
    else:
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6, msg=name)


@NAMES
def test_heldout_tokens_enter_no_statistic(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = parts_of(stock)
    data = Calibration(parts, {"source": "random tokens"}, heldout=HELDOUT, sample_tokens=SAMPLE)
    whole = gathered(model, data)
    fit = gathered(model, of([part for number, part in enumerate(parts) if number not in HELDOUT]))
    for layer, stats in whole.items():
        same(stats, fit[layer], DATA)
        assert stats.tokens == fit[layer].tokens


@NAMES
def test_the_mix_weights_sums_by_share_and_holds_every_sample(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts, alone = parts_of(stock), list[dict[str, LayerStatistics]]()
    whole = gathered(model, mixed(parts))
    for source, share in enumerate(SHARES):
        mine = [number for number, owner in enumerate(SOURCES) if owner == source and number not in HELDOUT]
        alone.append(gathered(model, of([parts[number] for number in mine], round(SAMPLE * share))))
    for layer, stats in whole.items():
        sources = [seen[layer] for seen in alone]
        for source, part in zip(stats.sources, [part for part in sources if part.tokens], strict=True):
            assert source.tokens == part.tokens
            for key in SUMS:
                check(source.values[key], part.values[key], key)
        assert stats.tokens == sum(part.tokens for part in sources)
        for key in SUMS:
            expected = torch.zeros(stats.values[key].shape, dtype=torch.float64)
            for share, part in zip(SHARES, sources, strict=True):
                if part.tokens:
                    expected += share * stats.tokens * part.values[key] / part.tokens  # its mean per token
            check(stats.values[key], expected, key)
        if stats.tokens:
            for key in (SAMPLED - {"router_arguments"}) | {"expert_outputs"}:
                dim = 1 if key in DENSE else 0
                check(stats.values[key], torch.cat([part.values[key] for part in sources], dim), key)
