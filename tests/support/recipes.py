"""Recipes of the papers, run as a user runs them: offline, in a process of their own; test support."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.doc_pages import ROOT


def run_recipe(path: Path, tmp_path: Path, *arguments: object, **environment: object) -> str:
    """Run a recipe in an empty folder, and return what it prints."""
    settings = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        **{name: str(value) for name, value in environment.items()},
    }
    command = [sys.executable, str(path), *map(str, arguments)]
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{path.name}: {done.stdout}\n{done.stderr}"
    return done.stdout
