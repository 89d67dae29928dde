"""The command line as a whole: version, help in panels, what it loads, and warnings of plugins."""

import logging
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from compressor.cli import main as cli
from tests import small
from tests.command_line import Run
from tests.plugins import REAP, install

COMMANDS = (
    "inspect", "plan", "apply", "compress", "compare", "attribute", "gate", "export", "generate", "report", "push",
    "steps", "strategies", "demo",
)  # fmt: skip
PANELS = ("What to keep", "Strategy", "Calibration", "Steps", "Gate", "Publishing", "Running")


def test_version(run: Run) -> None:
    result = run("--version")
    assert (result.status, result.out, result.err) == (0, f"moe-compress {version('moe-compressor')}\n", "")


def test_help_of_compress_comes_in_panels(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = run("compress", "--help").out
    places = [text.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)
    ends = [*places[1:], len(text)]
    for panel, option in zip(
        PANELS, ("--ratio", "--merge", "--samples", "--correct", "--max-drop", "--private", "--device"), strict=True
    ):
        assert places[PANELS.index(panel)] < text.index(f"{option} ") < ends[PANELS.index(panel)]
    assert text.index("--output") < places[0]


def test_help_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from compressor.cli.main import main\n"
        "for command in sys.argv[1:]:\n"
        "    sys.argv = ['moe-compress', *([command] if command[0] != '-' else []), '--help']\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, "-", *COMMANDS],
        cwd=Path(cli.__file__).parents[2], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.count("Usage:") == 1 + len(COMMANDS) and found.stdout.splitlines()[-1] == "[]"


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


def test_a_plugin_s_summary_is_text(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "their-reap", REAP.replace('"""REAP: keep', '"""[bold]REAP[/bold] [/nothing] keep'))
    monkeypatch.setenv("COLUMNS", "200")
    result = run("strategies")
    assert result.status == 0 and "[bold]REAP[/bold] [/nothing] keep" in result.out
