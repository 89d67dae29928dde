"""A machine with little memory; test support."""

from pathlib import Path

import pytest

from compressor import memory


def leave_memory(patch: pytest.MonkeyPatch, folder: Path, nbytes: float | None) -> None:
    """Let the system report that so many bytes are available, in no control group; None: it doesn't report any."""
    report = folder / "meminfo"
    report.write_text("" if nbytes is None else f"MemAvailable: {int(nbytes) // 1024} kB\n")
    patch.setattr(memory, "MACHINE", report)
    patch.setattr(memory, "GROUP", folder / "no-group")
