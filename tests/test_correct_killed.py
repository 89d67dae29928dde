"""A run that corrects, killed at any moment and run again: the same bytes, and no layer corrected twice."""

import signal
from pathlib import Path
from typing import Any

import pytest

from compressor.steps.correct import sequential
from tests.support import small
from tests.support.command_line import Run, captured, names, run_killed
from tests.support.small import tree

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("offline")]


@pytest.fixture(scope="module", params=["correct", "in order"])
def command(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[str]:
    home = tmp_path_factory.mktemp("home")
    order = ["--sequential"] if request.param == "in order" else []
    model, text = small.save(home / "sharded", shard="60KB"), small.text_file(home)
    sizes = ["--samples", "8", "--sequence-length", "32", "--calibration", str(text)]
    how = ["--experts", "4", "--strategy", "count-guided", "--correct", "ridge"]
    return ["compress", str(model), *how, *sizes, *order]


@pytest.fixture(scope="module")
def whole(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("whole") / "out"
    assert captured(*command, "-o", out).status == 0
    return tree(out)


LAYERS = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
MOMENTS = [  # with the layers that are corrected by the run that goes on
    ("compressor.steps.correct.sequential", "correct_layer", 1, LAYERS),
    ("compressor.steps.correct.sequential", "correct_layer", 2, LAYERS[1:]),
    ("safetensors.torch", "save_file", 2, LAYERS[1:]),
    ("compressor.steps.cutting", "CutFiles.save", 2, LAYERS[1:]),
    ("compressor.steps.workdir", "_write_tensor", 20, []),
    ("os", "fsync", 2, []),
]


@pytest.mark.parametrize(("module", "function", "nth", "left"), MOMENTS)
def test_killed_and_run_again_corrects_no_layer_twice(
    module: str, function: str, nth: int, left: list[str], run: Run, command: list[str], whole: dict[str, str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out, real, corrected = tmp_path / "out", sequential.correct_layer, list[str]()

    def counting(model: Any, layer: Any, *args: Any) -> Any:
        corrected.append(layer.name)
        return real(model, layer, *args)

    assert run_killed([*command, "-o", str(out)], module, function, nth) == -signal.SIGKILL
    assert not out.exists()
    monkeypatch.setattr(sequential, "correct_layer", counting)
    assert run(*command, "-o", out).status == 0
    assert corrected == left
    assert tree(out) == whole and names(tmp_path) == ["out"]
