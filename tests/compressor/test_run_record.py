"""The record of a run: kept privately in the cache, found again by its output, and never in the run's way."""

import os
from pathlib import Path

import pytest

import compressor
from compressor.errors import CompressionError
from compressor.run_record import (
    RunRecord,
    read_record,
    record_run,
)
from tests.support import small
from tests.support.plans import plan_of
from tests.support.small import tree

TOKEN = "hf_" + "Canary7" * 6  # what a token looks like


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small.save(tmp_path / "model")


def output(folder: Path, content: str = "{}") -> Path:
    """A folder that holds no more than a record needs."""
    folder.mkdir(exist_ok=True)
    (folder / "compression.json").write_text(content)
    return folder


@pytest.mark.usefixtures("golden")
def test_a_run_is_recorded_beside_nothing_in_the_output(tmp_path: Path, source: Path, cache: Path) -> None:
    text = small.text_file(tmp_path)
    command = ["moe-compress", "compress", str(source), "--token", TOKEN, f"--option=key={TOKEN}"]
    summary = compressor.compress(
        str(source), tmp_path / "out", experts=4, strategy="reap", calibration=str(text), samples=4,
        sequence_length=32, command=command,
    )  # fmt: skip
    found = read_record(tmp_path / "out")
    assert found is not None
    assert (found.source, found.revision, found.peak_memory) == (str(source), None, summary.peak_memory)
    phases = {"open", "read text", "plan", "write", "evaluate", "golden answers"}
    assert found.seconds == summary.seconds and set(found.seconds) == phases
    assert found.calibration == summary.plan.calibration
    assert found.command == ("moe-compress", "compress", str(source), "--token", "***", "--option=key=***")
    assert found.finished.endswith("+00:00")
    kept = b"".join(path.read_bytes() for path in cache.rglob("*") if path.is_file())
    assert TOKEN.encode() not in kept and b"moe-compress" in kept
    written = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert TOKEN.encode() not in written and str(tmp_path).encode() not in written


def test_names_that_look_like_a_token_are_kept_nowhere(tmp_path: Path, cache: Path) -> None:
    source = small.save(tmp_path / TOKEN)
    text = small.text_file(tmp_path).rename(tmp_path / f"{TOKEN}.txt")
    summary = compressor.compress(
        str(source), tmp_path / "out", experts=4, strategy="reap", calibration=str(text), samples=4, sequence_length=32
    )
    assert summary.plan.calibration is not None and summary.plan.calibration["source"] == str(text)  # to apply it by
    kept = {path: path.read_bytes() for place in (cache, tmp_path / "out") for path in place.rglob("*.*")}
    assert {"compression.json", "recipe.yaml"} < {path.name for path in kept} and len(list(cache.rglob("*.json"))) > 0
    assert [path.name for path, content in kept.items() if TOKEN.encode() in content] == []
    assert b'"***.txt"' in kept[tmp_path / "out" / "compression.json"]
    found = read_record(tmp_path / "out")
    assert found is not None and found.source == str(tmp_path / "***")


def test_equal_runs_give_equal_bytes_and_the_later_record(tmp_path: Path, source: Path) -> None:
    plan = plan_of(source, experts=4, strategy="model-centric")
    compressor.apply(plan, tmp_path / "one", command=["first"])
    compressor.apply(plan, tmp_path / "two", command=["second"])
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    found = read_record(tmp_path / "one")
    assert found is not None and found.command == ("second",) and found.calibration is None
    assert read_record(tmp_path / "two") == found


def test_an_output_that_is_not_accepted_leaves_no_record(tmp_path: Path, source: Path, cache: Path) -> None:
    text = str(small.text_file(tmp_path))
    gate = {"text": [text], "text_samples": 16, "text_length": 16, "max_flips": 1e-6}
    steps = [{"prune": {"experts": 4, "strategy": "model-centric"}}]
    recipe = compressor.Recipe.of({"model": str(source), "steps": steps, "gate": gate})
    with pytest.raises(compressor.GateFailedError, match="did not pass the gate"):
        compressor.compress(recipe, tmp_path / "out")
    assert not (cache / "runs").exists() and not (cache / "requests").exists()


@pytest.mark.parametrize("place", ["file", "below a file", "folder for a file"])
def test_a_cache_that_cannot_be_written_fails_nothing(
    tmp_path: Path, source: Path, cache: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "file":
        cache.write_text("taken")
    elif place == "below a file":
        cache.write_text("taken")
        monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(cache / "below"))
    else:
        cache.mkdir()
        (cache / "runs").write_text("taken")
    compressor.compress(str(source), tmp_path / "out", experts=4, strategy="model-centric")
    assert (tmp_path / "out" / "config.json").is_file()
    assert read_record(tmp_path / "out") is None


def test_without_a_home_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MOE_COMPRESSOR_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    folder = output(tmp_path / "out")
    record_run(folder, RunRecord("model", None))
    assert read_record(folder) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", '{"source": 1}', "\x00", '{"seconds": []}'])
def test_a_record_is_private_and_gone_with_its_file_or_output(tmp_path: Path, cache: Path, content: str) -> None:
    folder = output(tmp_path / "out")
    record_run(folder, RunRecord("model", None))
    (file,) = (cache / "runs").iterdir()
    assert os.stat(file).st_mode & 0o077 == 0 and len(file.stem) == 64
    assert read_record(folder) is not None
    assert read_record(output(tmp_path / "edited", "{ }")) is None and read_record(tmp_path / "nowhere") is None
    file.write_text(content)
    assert read_record(folder) is None


def test_text_given_in_python_is_named_by_a_digest_and_read_like_a_file(tmp_path: Path) -> None:
    model, texts = str(small.save(tmp_path / "model")), [text + "\n" for text in small.TEXT.split("\n\n")]
    how = {"experts": 4, "strategy": "count-guided", "correct": "none", "samples": 4, "sequence_length": 32}
    compressor.compress(model, tmp_path / "file", calibration=str(small.text_file(tmp_path)), **how)
    compressor.compress(model, tmp_path / "given", calibration=texts, **how)
    named = tmp_path / "given" / "recipe.yaml"
    first, *rest = named.read_text().splitlines()
    assert first.startswith("# Calibration text given in Python") and any("- memory:" in line for line in rest)
    files = tree(tmp_path / "file"), tree(tmp_path / "given")
    assert files[0]["model.safetensors"] == files[1]["model.safetensors"]
    with pytest.raises(CompressionError, match="was given in Python and is in no file; name one with --calibration"):
        compressor.compress(str(named), tmp_path / "again")
