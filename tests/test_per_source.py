"""`moe-compress plan --per-source`: a plan for each calibration source, each corrected on its own text, all or none."""

import json
from pathlib import Path
from typing import Any

import pytest

from compressor.recipe.steps_plan import source_files
from compressor.steps.correct import in_order as sequence
from tests import small
from tests.command_line import Run, names, refused

LENGTH = 32
SIZES = ("--samples", "8", "--sequence-length", str(LENGTH))


pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and two texts."""
    folder = tmp_path_factory.mktemp("home")
    small.save(folder / "single")
    small.text_file(folder)
    (folder / "other.txt").write_text("\n\n".join(f"{n} + {n * 7} = {n * 8}." for n in range(200)))
    return folder


@pytest.fixture
def several(home: Path) -> tuple[Any, ...]:
    sources = ("--calibration", home / "calibration.txt", "--calibration", home / "other.txt")
    return ("--experts", 4, *sources, "--samples", 16, "--sequence-length", LENGTH)


def test_a_plan_for_each_source_is_corrected_on_its_own_batches(
    run: Run, home: Path, several: tuple[Any, ...], tmp_path: Path
) -> None:
    plan = ("plan", home / "single", "--strategy", "count-guided", "--correct", "ridge", *several)
    result = run(*plan, "-o", tmp_path / "plan.json", "--per-source", "--json")
    assert names(tmp_path) == ["plan.calibration.json", "plan.json", "plan.other.json"]
    made = [
        json.loads((tmp_path / name).read_text()) for name in ("plan.json", "plan.calibration.json", "plan.other.json")
    ]
    assert json.loads(result.out) == made
    assert [entry["calibration"].get("only") for entry in made] == [None, "calibration", "other"]
    assert run(*plan, "-o", tmp_path / "alone.json").status == 0
    assert json.loads((tmp_path / "alone.json").read_text()) == made[0]
    seen: list[set[bytes]] = []
    for name in ("plan.json", "plan.calibration.json", "plan.other.json"):
        with pytest.MonkeyPatch.context() as patch:
            real, batches = sequence.Pass, set[bytes]()
            patch.setattr(
                sequence, "Pass",
                lambda model, given, *args, real=real, batches=batches, **named: (
                    batches.update(row.numpy().tobytes() for batch in given for row in batch),
                    real(model, given, *args, **named),
                )[1],
            )  # fmt: skip
            assert run("apply", tmp_path / name, "-o", tmp_path / f"out-{name}").status == 0
        seen.append(batches)
    assert seen[0] == seen[1] | seen[2] and not seen[1] & seen[2] and all(seen)


def test_plans_for_each_source_are_refused(
    run: Run, home: Path, several: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ("plan", home / "single", "--strategy", "count-guided", "-o", tmp_path / "plan.json", "--per-source")
    one = ("--experts", 4, "--calibration", home / "other.txt", *SIZES)
    refused(run(*plan, *one), "--per-source needs several calibration sources; repeat --calibration for each")
    (tmp_path / "bad.jsonl").write_text('{"text": "a text"}\n{"prompt": "no answer"}\n')
    bad = ("--calibration", tmp_path / "bad.jsonl", "--strict")
    refused(run(*plan, *several, *bad), "bad.jsonl, line 2 has no column text, messages")
    (tmp_path / "bad.jsonl").unlink()
    refused(
        run(*plan, *several, "--sequential"),
        "--per-source plans what a strategy prunes from one pass, without --sequential",
    )
    refused(run(*plan, *several, "--strategy", "model-centric"), "'model-centric' reads no calibration data")
    refused(run(*plan, *several, "--correct", "ridge", "--samples", 2), "has too few sequences to hold some out")
    assert names(tmp_path) == []
    (tmp_path / "plan.other.json").write_text("{}")
    refused(run(*plan, *several), "plan.other.json exists already; name another file or pass --overwrite")
    refused(run(*plan, *several, "--overwrite"), "plan.other.json is not a plan, so --overwrite will not replace it")
    (tmp_path / "plan.other.json").unlink()
    with monkeypatch.context() as patch:
        real = Path.write_text
        patch.setattr(
            Path, "write_text",
            lambda path, *args, **named: real(path, *args, **named) if "other" not in path.name else full(),
        )  # fmt: skip
        refused(run(*plan, *several, "--json"), "the disk of .* is full")
    assert names(tmp_path) == []
    assert run(*plan, *several).status == 0
    assert run(*plan, *several, "--overwrite", "--seed", 3).status == 0
    assert {json.loads(path.read_text())["seed"] for path in tmp_path.iterdir()} == {3}


def full() -> Any:
    raise OSError(28, "No space left on device")


def test_sources_whose_names_are_no_file_names() -> None:
    found = source_files(Path("x/plan.json"), ["org/data", "org-data", "wiki", "a b:c"])
    assert [path.name for path in found] == [
        "plan.org-data.json", "plan.org-data-2.json", "plan.wiki.json", "plan.a-b-c.json",
    ]  # fmt: skip
    assert {path.parent for path in found} == {Path("x")}
