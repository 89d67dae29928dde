"""How the program was called."""

import sys
from pathlib import Path

PROGRAM = "moe-compress"


def command_line() -> tuple[str, ...] | None:
    """The command as it was typed; None where the command line was called by another program's code."""
    called = Path(sys.argv[0])
    ours = called.stem == PROGRAM or called.parts[-2:] == ("compressor", "__main__.py")
    return (PROGRAM, *sys.argv[1:]) if ours else None
