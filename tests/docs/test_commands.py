"""The commands of the documentation: those marked as running do run on the demo model, all others parse.

Blocks run as they stand, in order, a page in a folder of its own. Only what takes long is less than a reader's:
sequences of calibration text, steps of tuning and items of a gate.
"""

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from compressor.cli import demonstration
from tests.support.command_line import Run
from tests.support.doc_pages import PAGES, PROGRAM, ROOT, blocks, group, name_of, options, parse, prose

SAMPLES = ("--samples", "8")
SHORTER = {
    **dict.fromkeys(("plan", "compress", "attribute"), SAMPLES),
    "compare": (*SAMPLES, "--evaluation-samples", "4", "--random-seeds", "1"),
    "gate": ("--limit", "2", "--inconclusive", "pass"),
}
STATUS = {"gate": {0, 1}}  # what so few items say
RUNNING = [page for page in PAGES if any(block.runs for block in blocks(page))]
COMMANDS = [
    (page, words)
    for page in PAGES
    for block in blocks(page)
    if block.language in ("", "bash")
    for words in (block.commands if block.language or PROGRAM in block.text else ())
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: None, hasty: None) -> Path:
    """What a reader in the clone sees of the demo model, in an empty folder; a hasty tuning, a small demo."""
    (tmp_path / "compressor").mkdir()
    (tmp_path / "compressor" / "demo").symlink_to(ROOT / "compressor" / "demo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demonstration, "SAMPLES", 8)
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize("page", RUNNING, ids=name_of)
def test_what_is_marked_runs(page: Path, folder: Path, run: Run) -> None:
    for block in blocks(page):
        if block.runs and block.language == "python":
            exec(compile(block.text, name_of(page), "exec"), {})
        elif block.runs:
            for program, command, *words in block.commands:
                assert program == PROGRAM and block.language == "bash"
                done = run(command, *words, *SHORTER.get(command, ()))
                assert done.status in STATUS.get(command, {0}), f"{command} {words}: {done.err}"
                written = dict(pairwise(words)).get("-o")
                assert written is None or os.path.exists(written), f"{command} {words} left no {written}"


def test_the_pages_that_should_run_do() -> None:
    told = {name_of(page) for page in RUNNING}
    assert {"README.md", "docs/tutorial.md", "docs/reference/python.md"} <= told
    how_to = {name_of(page) for page in PAGES if page.parent.name == "how-to"}
    assert how_to - told == {"docs/how-to/mtp.md", "docs/how-to/qwen3-30b.md"}  # the demo model has no head


def is_known(option: str, source: str) -> bool:
    """Whether a script has an option, by its own name or as the keyword that the benchmarks' frame makes one of."""
    return f'"{option}"' in source or option[2:].replace("-", "_") in source


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: "")
def test_commands_in_blocks_are_known(page: Path, words: list[str]) -> None:
    program, *rest = words
    if program == PROGRAM:
        parse(rest)
    elif program in ("torchrun", "srun"):
        parse(rest[rest.index("compressor") + 1 :])
    elif program == "python":
        script = ROOT / (f"{rest[1].replace('.', '/')}.py" if rest[0] == "-m" else rest[0])
        source = script.read_text(encoding="utf-8")
        assert all(is_known(word, source) for word in rest if word.startswith("--"))
    else:
        known = {"pip", "make", "hf", ".venv/bin/python", "source", "llama-imatrix", "export"}
        assert program in known, f"{name_of(page)}: {words}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_options_in_the_text_exist(page: Path) -> None:
    known: dict[str, Any] = group().commands
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "scripts").rglob("*.py"))
    for code in re.findall(r"`([^`\n]+)`", prose(page)):
        said = re.findall(r"(?<![\w-])--[a-z][\w-]*", code)
        if command := re.match(rf"{PROGRAM} ([a-z]+)", code):
            assert command[1] in known and set(said) <= options(command[1]), f"{name_of(page)}: {code}"
        elif not code.startswith("python"):
            known_there = (
                bool({option, option.replace("--no-", "--")} & options()) or is_known(option, scripts)
                for option in said
            )
            assert all(known_there), f"{name_of(page)}: {code}"
