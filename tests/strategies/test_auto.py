"""Auto: plans by energy in the name of the strategy, and is corrected by tune."""

from pathlib import Path

from compressor.progress import Silent
from compressor.recipe.registry import load_strategy
from tests.support.opened_models import batches, calibration, opened
from tests.support.plans import make_plan


def test_every_layer_is_planned_by_energy(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    data = calibration(batches(stock, (3, 2, 2)))
    made, alone = (make_plan(model, load_strategy(name), 4, {}, data, Silent()) for name in ("auto", "energy"))
    for layer, wanted in zip(made.layers, alone.layers, strict=True):
        assert layer.groups == wanted.groups and layer.figures == {**wanted.figures, "won": "energy"}


def test_needs_and_correction() -> None:
    strategy = load_strategy("auto")
    assert strategy.correction == "tune" and load_strategy("auto").options is None
    assert strategy.needs == load_strategy("energy").needs
