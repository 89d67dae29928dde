"""A run that quantises, killed at any moment and run again: the same bytes, and GPTQ rounds no finished layer again."""

import signal
from pathlib import Path
from typing import Any

import pytest

from compressor.steps.quantize import sequential
from compressor.steps.quantize.matrices import Matrix
from tests.support import small
from tests.support.command_line import Run, captured, names, run_killed
from tests.support.small import tree

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("offline")]

WAYS: dict[str, list[str]] = {
    "rtn": ["--quantize", "nvfp4", "--set", "quantize.targets=all"],
    "gptq": ["--quantize", "int4", "--set", "quantize.method=gptq", "--set", "quantize.targets=all"],
    "corrected": ["--quantize", "int3", "--experts", "4", "--strategy", "count-guided", "--correct", "ridge"],
}
WAYS["corrected"] += ["--set", "quantize.method=gptq"]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    home = tmp_path_factory.mktemp("home")
    model, text = small.save(home / "model", intermediate_size=64, num_hidden_layers=3), small.text_file(home)
    sizes = ["--samples", "12", "--sequence-length", "32", "--calibration", str(text)]
    return {way: ["compress", str(model), *how, *sizes] for way, how in WAYS.items()}


@pytest.fixture(scope="module")
def whole(commands: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    trees = {}
    for way, command in commands.items():
        out = tmp_path_factory.mktemp(way) / "out"
        assert captured(*command, "-o", out).status == 0
        trees[way] = tree(out)
    return trees


WRITING, IN_ORDER, WORKDIR = (
    "compressor.steps.quantize.writing",
    "compressor.steps.quantize.sequential",
    "compressor.steps.workdir",
)
MOMENTS = [  # with the layers that GPTQ passes in the run that goes on
    ("rtn", WRITING, "round_to_nearest", 40, []),
    ("rtn", WRITING, "save_tensors", 2, []),
    ("rtn", WORKDIR, "_write_tensor", 60, []),
    ("rtn", WORKDIR, "assemble", 1, []),
    ("rtn", WRITING, "checksum", 120, []),
    ("rtn", "os", "fsync", 4, []),
    ("gptq", IN_ORDER, "gptq", 9, [1, 2]),
    ("gptq", IN_ORDER, "save_tensors", 1, [0, 1, 2]),
    ("gptq", IN_ORDER, "save_tensors", 2, [1, 2]),
    ("gptq", IN_ORDER, "save_tensors", 3, [2]),
    ("gptq", WORKDIR, "_write_tensor", 20, []),
    ("gptq", WORKDIR, "publish", 1, []),
    ("corrected", IN_ORDER, "save_tensors", 2, [1, 2]),
    ("corrected", WORKDIR, "assemble", 1, []),
]


@pytest.mark.parametrize(("way", "module", "function", "nth", "left"), MOMENTS)
def test_killed_and_run_again_leaves_the_same_bytes(
    way: str, module: str, function: str, nth: int, left: list[int], run: Run, commands: dict[str, list[str]],
    whole: dict[str, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out, real, rounded = tmp_path / "out", sequential.Quantizing._round, list[int]()

    def counting(self: Any, batch: list[Matrix], *more: Any) -> None:
        rounded.append(int(batch[0].decoder_layer.rpartition(".")[2]))
        real(self, batch, *more)

    assert run_killed([*commands[way], "-o", str(out)], module, function, nth) == -signal.SIGKILL
    assert not out.exists()
    monkeypatch.setattr(sequential.Quantizing, "_round", counting)
    assert run(*commands[way], "-o", out).status == 0
    assert sorted({*rounded}) == left
    assert tree(out) == whole[way] and names(tmp_path) == ["out"]


@pytest.mark.parametrize("way", ["rtn", "gptq"])
def test_what_a_loss_of_power_leaves_of_a_layer_counts_as_none(
    way: str, run: Run, commands: dict[str, list[str]], whole: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    out, moment = tmp_path / "out", {"rtn": "assemble", "gptq": "write_stage"}[way]
    assert run_killed([*commands[way], "-o", str(out)], WORKDIR, moment, 1) == -signal.SIGKILL
    kept = next((tmp_path / ".out.moe-compressor" / "kept").glob("*-quantized"))
    for number, file in enumerate(sorted(kept.glob("*.safetensors"))[:2]):
        file.write_bytes(file.read_bytes()[: -100 * number])
    assert run(*commands[way], "-o", out).status == 0
    assert tree(out) == whole[way]
