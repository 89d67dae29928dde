"""Plans as files: where they may go, and all of them or none."""

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from compressor.errors import CompressionError
from compressor.files import replacing
from compressor.locking import alone
from compressor.recipe.steps_plan import Plan
from compressor.replaceable import json_object
from compressor.words import distinct


def source_files(output: Path, sources: Sequence[str]) -> list[Path]:
    """plan.json, [wiki, org/code] -> plan.wiki.json, plan.org-code.json; numbered where two would be equal."""
    names = distinct(re.sub(r"[^\w.-]+", "-", source) for source in sources)
    return [output.with_name(f"{output.stem}.{name}{output.suffix}") for name in names]


def _is_plan(path: Path) -> bool:
    return str(json_object(path).get("format", "")).startswith("moe-compressor-plan/")


def check_files(paths: Sequence[Path], overwrite: bool) -> None:
    """Refuse files that exist, that `overwrite` must not replace because they are no plans, or that have no folder."""
    for path in paths:
        if path.exists() and not overwrite:
            raise CompressionError(f"{path} exists already; name another file or pass --overwrite")
        if path.exists() and not _is_plan(path):
            raise CompressionError(f"{path} is not a plan, so --overwrite will not replace it; name another file")
        if not path.parent.is_dir():
            raise CompressionError(f"{path.parent} does not exist; create it or name another file")


def write_plans(paths: Sequence[Path], plans: Sequence[Plan]) -> None:
    """Write each plan to its file, replacing what is there once all are complete; a fault leaves no new file."""
    absent = [path for path in paths if not path.exists()]
    try:
        with ExitStack() as complete:  # none is put in place before the last is written
            for path, plan in zip(paths, plans, strict=True):
                work = complete.enter_context(alone(path))
                fresh = complete.enter_context(replacing(path, work / path.name))
                fresh.write_text(plan.to_json(), encoding="utf-8")
    except BaseException:
        for path in absent:
            path.unlink(missing_ok=True)
        raise
