"""The command line as a whole: version, help on one screen, lists, what it loads, and warnings of plugins."""

import json
import logging
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from compressor.cli import main as cli
from compressor.entry_points import COMMANDS as COMMANDS_GROUP
from tests.support import small
from tests.support.command_line import Run, refused
from tests.support.doc_pages import options, parse
from tests.support.plugins import REAP, install

COMMANDS = (
    "inspect", "plan", "apply", "compress", "split", "calibrate-router", "distill", "compare", "attribute", "gate",
    "gate results", "gate baseline", "export", "generate", "report", "push", "list", "demo",
)  # fmt: skip
SHOWN = {
    "--output", "--ratio", "--experts", "--strategy", "--correct", "--distill", "--calibration", "--samples",
    "--fast", "--best", "--sequence-length", "--gate", "--format", "--push-to-hub", "--device", "--set", "--overwrite",
    "--help-all", "--help",
}  # fmt: skip
HIDDEN = shlex.split("""
    --split 2 --protect auto --sequential --top-k 2 --mtp drop --budget even --experts-total 5
    --deterministic --routers bias --merge max --no-merge-routers --representation surrogate --similarity rbf-cka
    --option align=true --max-drop 0.02 --confidence 0.9 --limit 5 --include-path tasks --batch-size 4 --stream
    --no-stream --search --keep-failed --inconclusive pass --private --seed 1 --revision main --dtype float32 --json
    --imatrix matrix.gguf
""")  # as issues spell them


def test_version(run: Run) -> None:
    result = run("--version")
    assert (result.status, result.out, result.err) == (0, f"moe-compress {version('moe-compressor')}\n", "")


def test_help_of_compress_fits_a_screen(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = run("compress", "--help").out
    assert len(text.rstrip().splitlines()) <= 40 and max(map(len, text.splitlines())) <= 80
    assert set(re.findall(r"--[a-z][a-z-]*", text.rpartition("╰")[0])) == SHOWN | (
        {"--dry-run"} if "--dry-run" in options("compress") else set()
    )
    last = text.rstrip().splitlines()[-1]
    assert "--set" in last and "moe-compress list steps" in last


def test_help_has_commands_in_four_groups_and_no_type_of_a_switch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = run("--help").out
    groups = re.findall(r"^╭─ (\w+) ─", text, re.MULTILINE)
    assert groups == ["Options", "Compress", "Test", "Publish", "Research"]
    parts = dict(zip(groups, text.split("╭─ ")[1:], strict=True))
    inside = {name: re.findall(r"^│ ([a-z-]+) ", part, re.MULTILINE) for name, part in parts.items()}
    assert {"compress", "plan"} <= {*inside["Compress"]} and {"gate", "check"} <= {*inside["Test"]}
    assert {"push", "report"} <= {*inside["Publish"]} and {"attribute", "comoe"} <= {*inside["Research"]}
    for words in ("--help", "compress --help", "compress --help-all", "push --help", "comoe train --help"):
        assert "bool" not in run(*words.split()).out, words


@pytest.mark.parametrize("command", ["gate", "compare"])
def test_a_command_with_many_options_shows_those_that_matter_and_all_on_request(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    brief, full = (run(command, option).out for option in ("--help", "--help-all"))
    assert len(brief.strip().splitlines()) <= 40 and "--output" in brief and "--help-all" in brief
    assert "─ Running ─" in full and "─ Running ─" not in brief
    every = {"gate": ("--tasks", "--max-flips", "--timeout"), "compare": ("--experts", "--bits", "--seed")}[command]
    assert all(option in full for option in every) and every[1] not in brief and every[2] not in brief
    known = {option for option in options(command) if option.startswith("--")}
    known -= {"--help-all", "--version", "--save-baseline"}  # the last stands for a command of its own
    assert set(re.findall(r" (--[a-z][a-z-]+)", full)) >= known


def test_what_is_not_shown_is_taken_all_the_same() -> None:
    values = parse(["compress", "model", "-o", "out", *HIDDEN])
    assert values["top_k"] == 2 and values["max_drop"] == 0.02 and values["no_merge_routers"] and not values["stream"]


@pytest.mark.parametrize(
    ("kind", "name", "option"),
    [
        ("steps", "prune", ("protect", "text | list or mapping", None, "Experts that are neither merged")),
        ("steps", "distill", ("steps", "int", 400, "Optimizer steps.")),
        ("strategies", "data-centric", ("merge", "uniform | max | frequency | learned", "uniform", "How a group")),
        ("exporters", "onnx", ("opset", "18 | 19 | 20 | 21 | 22 | 23", 20, "Version of the ONNX operators.")),
        ("optimizers", "adafactor", None),
    ],
)
def test_lists_document_every_option(kind: str, name: str, option: Any, run: Run, monkeypatch: Any) -> None:
    entry = next(each for each in json.loads(run("list", kind, "--json").out) if each["name"] == name)
    monkeypatch.setenv("COLUMNS", "200")
    table = run("list", kind).out
    assert entry["summary"][:40] in table
    if option is not None:
        field, kind_of, default, text = option
        assert (entry["types"][field], entry["options"][field]) == (kind_of, default)
        assert entry["help"][field].startswith(text) and text in table and field in table


def test_a_wrong_list_is_refused(run: Run) -> None:
    refused(run("list", "strategy"), "there is no list 'strategy'; did you mean 'strategies'\\? known are steps")


def modules_after(*commands: str) -> tuple[str, set[str]]:
    """What a process prints that runs these commands, and the modules that it has loaded."""
    code = (
        "import sys; from compressor.cli.main import main\n"
        "for command in sys.argv[1:]:\n"
        "    sys.argv = ['moe-compress', *command.split()]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code\n"
        "print(*sys.modules)"
    )
    root = Path(cli.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, *commands], cwd=root, capture_output=True, text=True, check=True)
    printed, _, modules = done.stdout.rstrip().rpartition("\n")
    return printed, set(modules.split())


def test_help_loads_neither_torch_nor_transformers() -> None:
    printed, modules = modules_after("--help", *(f"{command} --help" for command in COMMANDS))
    assert printed.count("Usage:") == 1 + len(COMMANDS)
    assert not {"torch", "transformers", "numpy", "matplotlib"} & modules


LISTS = {"torch", "transformers", "numpy", "scipy"}
INSPECTION = {"scipy.stats", "lm_eval", "matplotlib", "compressor.steps.quantize.step", "compressor.pipeline"}


@pytest.mark.parametrize(
    ("command", "unwanted"),
    [
        ("list steps", LISTS), ("list optimizers", LISTS), ("inspect compressor/demo/checkpoint", INSPECTION),
    ],
)  # fmt: skip
def test_a_command_loads_only_what_it_needs(command: str, unwanted: set[str]) -> None:
    assert not unwanted & modules_after(command)[1]


def test_a_package_may_bring_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    greet = 'def greet(name: str) -> None:\n    """Greet somebody."""\n    print("Hello", name)\n'
    install(tmp_path, monkeypatch, "greet", greet, group=COMMANDS_GROUP, value=":greet")
    install(tmp_path, monkeypatch, "broken", "import nothing_of_this_name", group=COMMANDS_GROUP)
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from compressor.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "greet", "Ada"],
        cwd=Path(cli.__file__).parents[2], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "Hello Ada\n"
    assert "command 'broken' (broken_plugin) cannot be imported" in done.stderr and "left out" in done.stderr


@pytest.mark.usefixtures("offline")
def test_warnings_of_a_plugin_are_text_on_one_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loud = REAP.replace(
        "    scores = saliency(",
        '    import logging\n    logging.getLogger(__name__).warning("a [red]warning[/red]\\nof \\x1b[31m%s", "two")\n'
        "    scores = saliency(",
    )
    install(tmp_path / "site", monkeypatch, "their-reap", loud)
    model, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    asked = ("--experts", 4, "--strategy", "their-reap", "--calibration", text, "--samples", 2)
    result = run("plan", model, "-o", tmp_path / "plan.json", *asked, "--sequence-length", 32, "--json")
    assert result.status == 0, result
    assert result.err.splitlines() == ["WARNING: a [red]warning[/red] of [31mtwo"] * 2
    assert not logging.getLogger("their_reap_plugin").handlers
