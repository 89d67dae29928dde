"""Runs that are killed or interrupted and run again: the same bytes, and nothing that was finished is done twice."""

import re
import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from compressor.checkpoint.reader import READ_BYTES
from tests.support import small
from tests.support.audit import Moment, happening, paths_of, press_ctrl_c
from tests.support.command_line import Run, captured, names, run_killed
from tests.support.small import tree
from tests.support.training_setups import smaller

pytestmark = pytest.mark.usefixtures("offline", "hasty")

CORRECTED = ["--experts", "4", "--strategy", "count-guided", "--correct", "ridge"]
GPTQ = ["--set", "quantize.method=gptq"]
EVERYTHING = ["--set", "quantize.targets=all"]
WAYS: dict[str, list[str]] = {
    "merged": ["--experts", "4", "--strategy", "data-centric"],
    "split": ["--experts", "4", "--strategy", "gated-mass", "--split", "2", "--correct", "none"],
    "corrected": CORRECTED,
    "corrected in order": [*CORRECTED, "--sequential"],
    "rounded": ["--quantize", "nvfp4", *EVERYTHING],
    "gptq": ["--quantize", "int4", *GPTQ, *EVERYTHING],
    "corrected, then gptq": [*CORRECTED, "--quantize", "int3", *GPTQ],
    "distilled": [],
    "distilled layer by layer": ["--stream"],
    "adapted layer by layer": ["--stream", "--train", "lora"],
}
DISTILLED = [*WAYS][-3:]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    small.save(folder / "layers", shard="60KB", intermediate_size=64, num_hidden_layers=3)
    return smaller(folder, 400)


@pytest.fixture(scope="module")
def command(home: Path) -> Callable[[str, Path], list[str]]:
    text = ["--calibration", str(home / "calibration.txt"), "--sequence-length", "32"]
    distill = ["distill", str(home / "smaller"), "--base", str(home / "model"), "--dtype", "float32", *text]
    distill += ["--tokens-per-step", "128", "--steps", "8"]
    compress = ["compress", str(home / "layers"), "--samples", "12", *text]
    return lambda way, out: [*(distill if way in DISTILLED else compress), *WAYS[way], "-o", str(out)]


@pytest.fixture(scope="module")
def whole(home: Path, command: Callable[[str, Path], list[str]]) -> Callable[[str], dict[str, str]]:
    @cache
    def files(way: str) -> dict[str, str]:
        assert captured(*command(way, home / way)).status == 0
        return tree(home / way)

    return files


def layer(number: int, folder: str = "kept/.*") -> Moment:
    """The moment before a layer's file is put in its place."""
    return Moment(pattern=rf"/{folder}/model\.layers\.{number}\.[\w.]*safetensors$")


STAGED = "step-0"
REST = Moment(pattern=rf"/{STAGED}/rest\.safetensors$")
PUT_IN_PLACE = Moment(pattern="/out$")
MOMENTS: list[tuple[str, Moment, Sequence[int]]] = [  # with the layers that the run that goes on has to do again
    ("merged", Moment(pattern=r"/journal\.json$"), (0, 1, 2)),
    ("merged", Moment(pattern=r"/journal\.json$", nth=2), ()),
    ("merged", Moment("os.pwrite"), (0, 1, 2)),
    ("merged", Moment("os.pwrite", nth=9), (0, 1, 2)),
    ("merged", Moment("os.fsync"), (0, 1, 2)),
    ("merged", layer(1, STAGED), (1, 2)),
    ("merged", REST, ()),
    ("merged", Moment("open", r"/output/compression\.json$", 2), ()),  # output and base have been compared
    ("merged", PUT_IN_PLACE, ()),
    ("split", layer(1, STAGED), ()),
    *((way, layer(0), (0, 1, 2)) for way in ("corrected", "corrected in order", "gptq")),
    *((way, layer(1), (1, 2)) for way in ("corrected", "corrected in order", "gptq")),
    *((way, layer(1, STAGED), (1, 2)) for way in ("corrected", "corrected in order")),
    ("gptq", layer(1, STAGED), ()),
    ("corrected", Moment("os.fsync"), (0, 1, 2)),
    ("corrected", REST, ()),
    ("gptq", PUT_IN_PLACE, ()),
    ("rounded", layer(1, STAGED), ()),
    ("rounded", Moment("open", r"/output/model\.safetensors"), ()),
    ("corrected, then gptq", layer(1, "kept/1/quantized"), (1, 2)),
    ("corrected, then gptq", Moment("open", r"/output/model\.safetensors"), ()),
]


@pytest.mark.full
@pytest.mark.parametrize(("way", "moment", "again"), MOMENTS)
def test_killed_and_run_again(
    way: str, moment: Moment, again: Sequence[int], run: Run, tmp_path: Path,
    command: Callable[[str, Path], list[str]], whole: Callable[[str], dict[str, str]],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    assert run_killed(command(way, out), moment) == -signal.SIGKILL
    assert not out.exists()
    with paths_of("os.rename", r"/kept/.*/model\.layers\.\d+\.") as kept:
        result = run(*command(way, out))
    assert result.status == 0, result
    numbers = [int(re.findall(r"layers\.(\d+)", path.name)[0]) for path in kept]
    assert sorted(numbers) == list(again), kept
    assert tree(out) == whole(way) and names(tmp_path) == ["out"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "moment"),
    [
        ("distilled", Moment(pattern=r"/steps/state\.safetensors$", nth=4)),
        ("distilled", Moment(pattern=r"/made/layer-00001\.safetensors$")),
        ("distilled layer by layer", Moment(pattern=r"/now/model\.layers\.\d\.safetensors$", nth=9)),
        ("distilled layer by layer", Moment(pattern=r"/step-1/model\.layers\.1\.safetensors$", nth=2)),
        ("adapted layer by layer", Moment(pattern=r"/steps/state\.safetensors$", nth=4)),
    ],
)
def test_training_goes_on_where_it_was_killed(
    way: str, moment: Moment, run: Run, tmp_path: Path,
    command: Callable[[str, Path], list[str]], whole: Callable[[str], dict[str, str]],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    assert run_killed(command(way, out), moment) == -signal.SIGKILL and not out.exists()
    with paths_of("os.rename", r"/kept/") as kept:
        assert run(*command(way, out)).status == 0
    assert not [path for path in kept if path.parent.name.startswith("base-")], "the base was asked again"
    assert len([path for path in kept if path.name == "state.safetensors"]) < 8
    assert tree(out) == whole(way) and names(tmp_path) == ["out"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "moment", "cut"),
    [
        ("gptq", layer(0, STAGED), ["quantized/*.safetensors"]),
        ("distilled", Moment(pattern=r"/steps/state\.safetensors$", nth=4), ["step-*/*", "base-*/*-0000000.*"]),
    ],
)
def test_files_that_a_power_loss_has_cut_short_count_as_none(
    way: str, moment: Moment, cut: Sequence[str], run: Run, tmp_path: Path,
    command: Callable[[str, Path], list[str]], whole: Callable[[str], dict[str, str]],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    assert run_killed(command(way, out), moment) == -signal.SIGKILL
    for pattern in cut:
        files = sorted((tmp_path / ".out.moe-compressor" / "kept").rglob(pattern))
        assert files
        for number, file in enumerate(files[:2]):
            file.write_bytes(file.read_bytes()[: -1 - 100 * number])
    assert run(*command(way, out)).status == 0
    assert tree(out) == whole(way)


def test_what_was_planned_is_not_planned_again_unless_another_request_comes(
    run: Run, tmp_path: Path, command: Callable[[str, Path], list[str]], whole: Callable[[str], dict[str, str]]
) -> None:
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    assert run_killed(command("merged", out), REST) == -signal.SIGKILL
    result = run(*command("merged", out))
    assert result.status == 0 and "calibrate and plan" not in result.err
    assert tree(out) == whole("merged") and names(tmp_path) == ["out"]
    other = ["--experts", "3", "--overwrite"]
    assert run_killed([*command("merged", out), "--overwrite", "--seed", "1"], REST) == -signal.SIGKILL
    result = run(*command("merged", out), *other)
    assert result.status == 0 and "calibrate and plan" in result.err
    assert run(*command("merged", fresh), *other).status == 0
    assert tree(out) == tree(fresh) and names(tmp_path) == ["fresh", "out"]


def test_interrupted_from_the_keyboard(
    run: Run, tmp_path: Path, command: Callable[[str, Path], list[str]], whole: Callable[[str], dict[str, str]]
) -> None:
    out = tmp_path / "out"
    with happening(layer(1, STAGED), press_ctrl_c):
        result = run(*command("merged", out))
    assert result.status == 130 and result.err.endswith("\nInterrupted; run the same command again to go on.\n")
    assert not out.exists() and run(*command("merged", out)).status == 0
    assert tree(out) == whole("merged") and names(tmp_path) == ["out"]


@pytest.mark.full
def test_a_run_killed_in_its_third_step_repeats_none_of_the_others(home: Path, run: Run, tmp_path: Path) -> None:
    recipe, base, out = tmp_path / "recipe.yaml", home / "layers", tmp_path / "out"
    steps = "{prune: {experts: 6}}, {prune: {experts: 4}}, {quantize: {scheme: int4}}"
    text = f"calibration: {{data: [{home / 'calibration.txt'}], samples: 12, sequence_length: 32}}"
    recipe.write_text(f"model: {base}\nsteps: [{steps}]\n{text}\noutput: {{evaluate: false}}\n")
    assert run("compress", recipe, "-o", tmp_path / "whole").status == 0
    assert run_killed(["compress", str(recipe), "-o", str(out)], layer(1, "step-2")) == -signal.SIGKILL
    first = tmp_path / ".out.moe-compressor" / "step-0"
    assert sum(file.stat().st_blocks for file in first.glob("model.*.safetensors")) < sum(
        file.stat().st_size // 512 for file in first.glob("model.*.safetensors")
    )
    READ_BYTES.clear()
    with paths_of("os.rename", r"/step-1/") as written:
        assert run("compress", recipe, "-o", out).status == 0
    experts = [name for folder, name in READ_BYTES if folder == base and ".experts." in name]
    assert not written and not experts
    assert tree(out) == tree(tmp_path / "whole") and names(tmp_path) == ["out", "recipe.yaml", "whole"]
