"""What the recipes share: the first arguments of their command lines, the demo model, and running moe-compress."""

import argparse
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import compressor

DEMO = Path(compressor.__file__).parent / "demo" / "checkpoint"


def parser(text: str | None, names: Iterable[str], /, **options: Any) -> argparse.ArgumentParser:
    """Return a parser of a recipe's name, a model and options with these defaults; None is decided later."""
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=text, formatter_class=form)
    made.add_argument("name", choices=[*names], help="what to repeat")
    made.add_argument(
        "model", nargs="?", default=str(DEMO), help="folder or Hub id (default: demo)"
    )
    made.add_argument("--out", type=Path, help="a new folder (default: the recipe's name)")
    for option, default in options.items():
        flag = f"--{option.replace('_', '-')}"
        if default is False:
            made.add_argument(flag, action="store_true")
        else:
            made.add_argument(flag, type=str if default is None else type(default), default=default)
    return made


def moe_compress(*words: object, stdout: Any = None) -> None:
    """Run a command line; ends this process where it fails."""
    command = [sys.executable, "-m", "compressor", *map(str, words)]
    status = subprocess.run(command, stdout=stdout, check=False).returncode
    if status:
        sys.exit(status)
