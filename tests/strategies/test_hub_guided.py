"""Hub-guided: by hand, beside its two ends, from the figures that attribute writes, and who shares those."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import compressor
from compressor.attribution import measure
from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.errors import CompressionError
from compressor.model.opened import open_model
from compressor.progress import Silent
from compressor.recipe.registry import Strategy
from compressor.recipe.step import TextOptions
from compressor.statistics.statistics import LayerStatistics
from compressor.steps.correct.options import Correct
from compressor.steps.prune.planning import Planner, PruneSpec
from compressor.steps.prune.selection import keep_best
from strategies.ranked import HubGuided, count_guided, gated_mass
from tests.support import small, zoo
from tests.support.command_line import Run, names, refused
from tests.support.opened_models import batches, calibration
from tests.support.plans import kept, make_plan, recipe_of
from tests.support.strategy_runs import GROUPED, layer_statistics

pytestmark = pytest.mark.usefixtures("offline")

Options, plan = HubGuided.Options, HubGuided.plan
LAYERS = 4
SIZES = ("--samples", 12, "--sequence-length", 32)


def stats(mass: list[float], changes: list[float], counts: list[float] | None = None, **groups: Any) -> LayerStatistics:
    values = {"gated_norm_sum": mass, "rank_change": changes, "routed_count": counts or mass}
    return layer_statistics(values, experts=len(mass), **groups)


def test_a_case_by_hand() -> None:
    """Products 8, 3, 4, 12, 0; with the exponent a half 4, 3, 4, 3.46, 0; with a fifth 2.6, 3, 4, 1.6, 0."""
    found = stats([2, 3, 4, 1, 9], [4, 1, 1, 12, 0])
    made = plan(found, 2)
    assert kept(made) == [0, 3] and made.decided_by == "gated_norm_sum x rank_change"
    assert made.figures == {
        "kept_share_of_saliency": pytest.approx(20 / 27, abs=1e-6),
        "kept_share_of_rank_change": pytest.approx(16 / 18, abs=1e-6),
    }
    assert kept(plan(found, 2, options=Options(exponent=0.5))) == [0, 2]
    assert kept(plan(found, 2, options=Options(exponent=0.2))) == [1, 2]
    assert kept(plan(found, 2, options=Options(exponent=0.0))) == [2, 4]
    assert kept(plan(found, 2, frozenset({4, 1}))) == [1, 4]
    visited = stats([9, 9, 0, 0, 0], [4, 1, 1, 12, 0], counts=[2, 3, 4, 1, 9])
    assert kept(plan(visited, 2, options=Options(mass="visits"))) == [0, 3]


def test_the_layers_own_scales_do_not_count_nor_overflow() -> None:
    for a, b in ((1e-9, 1e-30), (7, 1e-30), (1e-9, 1e30), (7, 1e30)):
        assert kept(plan(stats([2 * a, 3 * a, 4 * a, a], [4 * b, b, b, 12 * b]), 2)) == [0, 3]
    strong = HubGuided.score(stats([1.0] * 3, [1e-30, 1.0, 1e30]), Options(exponent=10.0))
    assert bool(strong.isfinite().all()) and strong.tolist() == sorted(strong.tolist())


@pytest.mark.parametrize("groups", [{}, GROUPED])
def test_without_later_routers_or_exponent_it_is_gated_mass_or_count_guided(groups: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        mass, changes = torch.rand(2, 8, generator=generator, dtype=torch.float64).tolist()
        counts = torch.randint(0, 4, (8,), generator=generator).double().tolist()
        last = stats(mass, [0.0] * 8, counts, **groups)
        for keep, protected in ((4, frozenset[int]()), (4, frozenset({3})), (6, frozenset({0, 7}))):
            for found, exponent in ((stats(mass, changes, counts, **groups), 0.0), (last, 1.0)):
                made = plan(found, keep, protected, Options(exponent=exponent))
                assert made == gated_mass.plan(found, keep, protected)
                made = plan(found, keep, protected, Options(mass="visits", exponent=exponent))
                assert made.groups == count_guided.plan(found, keep, protected).groups


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    small.save(folder / "model", num_hidden_layers=LAYERS)
    small.text_file(folder)
    small.save(folder / "zaya", "zaya")
    return folder


@pytest.fixture
def data(originals: Path) -> tuple[Any, ...]:
    return ("--calibration", originals / "calibration.txt", *SIZES)


@dataclass
class Attributions(Silent):
    """Counts the passes that attribute routing."""

    count: int = 0

    def start(self, phase: str, total: int) -> None:
        self.count += phase == "attribution"


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"strategy": "gated-mass"}, 0),
        ({"strategy": "hub-guided", "options": {"exponent": 0}}, 0),
        ({"strategy": "hub-guided"}, 1),
        ({"strategy": "hub-guided", "protect": "auto"}, 1),
        ({"strategy": "hub-guided", "protect": "auto", "sequential": True}, 1),
        ({"strategy": "hub-guided", "correct": "ridge"}, 1),
    ],
)
def test_one_attribution_serves_hubs_and_strategies(options: dict[str, Any], count: int, originals: Path) -> None:
    text: dict[str, Any] = {"calibration": str(originals / "calibration.txt"), "samples": 12, "sequence_length": 32}
    seen = Attributions()
    compressor.plan(recipe_of(originals / "model", experts=4, **options, **text), device="cpu", progress=seen)
    assert seen.count == count


@pytest.mark.full
def test_one_attribution_serves_all_rows_of_a_comparison(originals: Path) -> None:
    seen = Attributions()
    text = TextOptions(data=[str(originals / "calibration.txt")], samples=12, sequence_length=32)
    grid: dict[str, Any] = {"experts": [6, 4], "strategies": ["hub-guided", "gated-mass", "hub-guided:exponent=2"]}
    grid |= {"corrections": ["none"], "random_seeds": 1, "evaluation_samples": 2, "protect": "auto"}
    compressor.compare(str(originals / "model"), calibration=text, device="cpu", progress=seen, **grid)
    assert seen.count == 1


def test_what_cannot_be_attributed_is_refused(run: Run, originals: Path, data: tuple[Any, ...], tmp_path: Path) -> None:
    said = "strategy 'hub-guided' needs routing attribution, which others do not: ZayaForCausalLM cannot be attributed"
    arguments = ("--experts", 4, "--strategy", "hub-guided", *data)
    result = run("compress", originals / "zaya", "-o", tmp_path / "out", *arguments)
    refused(result, f"{said}: model.layers.0: its router's logits are not linear")
    more = ("--experts", 4, "--strategies", "hub-guided", "--evaluation-samples", 2, *data)
    refused(run("compare", originals / "zaya", "-o", tmp_path / "out", *more), said)
    assert names(tmp_path) == []
    assert run("compress", originals / "zaya", "-o", tmp_path / "out", *arguments, "--option", "exponent=0").status == 0


def test_all_plans_of_a_run_see_the_original_on_all_sources_but_what_is_held_out(originals: Path) -> None:
    """One attribution gives the plan of one pass and the plan in order the same figures, its own."""
    model = open_model(locate(str(originals / "model")), "float32", "cpu")
    rows = batches(zoo.build("mixtral"), (2, 2, 1, 1), length=24)
    data = Calibration(tuple(rows), {"source": "random tokens"}, (0, 0, 1, 1), (0.5, 0.5), frozenset({1, 3}))
    fit = calibration([rows[0], rows[2]])
    expected = {layer.name: torch.zeros(8, dtype=torch.float64) for layer in model.architecture.layers}
    for sender in measure.attribute(model, fit, Silent()).of_kind("expert"):
        expected[sender.module][int(sender.number or 0)] = sum(value or 0.0 for value in sender.rank_change)
    seen: list[tuple[str, Tensor]] = []

    def listening(found: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> Any:
        seen.append((found.layer.name, found.rank_change.clone()))
        return keep_best(found, found.rank_change, keep, protected)

    spec = PruneSpec(Strategy("listening", listening, frozenset({"rank_change"})), 4)
    passes = Attributions()
    planner = Planner(model, data, passes)
    made = planner.plans([spec, spec])
    ordered = planner.plan_sequentially(spec, Correct("none"))
    assert len(seen) == 3 * LAYERS and len(made) == 2 and passes.count == 1
    assert [layer.groups for layer in ordered.layers] == [layer.groups for layer in made[0].plan.layers]
    for name, found in seen:
        torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=0)
    with pytest.raises(CompressionError, match="calibration data; pass --calibration"):
        make_plan(model, spec.strategy, 4, {}, None, Silent())
