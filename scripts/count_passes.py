"""Count what one compression does to its base: passes of text through its decoder layers, tokenisations, openings.

    python -m scripts.count_passes

Compresses the embedded demo in this process with the command below and prints, each by the function that asked for it,
the streamed passes (forward, and backward after some of them) over the base and over other checkpoints, the texts that
were tokenised, and how often a checkpoint was opened.
"""

import os
import shlex
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

COMMAND = (
    "compress base -o out --experts 12 --strategy hc-smoe --calibration demo --samples 16 --sequence-length 64 "
    "--correct tune --routers router --set routers.sequences=12 --distill experts --set distill.steps=4 --dtype float32"
)
PASSED_OVER = ("compressor/model/", "compressor/data/")  # which carry out what others ask for


class Counts:
    """How often each thing was done, by what it was and who asked for it; and how many tokens it was done to."""

    def __init__(self, base: Path) -> None:
        self.base, self.calls, self.tokens = base, Counter[tuple[str, str]](), Counter[tuple[str, str]]()

    def note(self, what: str, tokens: int = 0) -> None:
        """Count it for the nearest function of the product that is not mere machinery."""
        root, frame = f"{Path(__file__).resolve().parents[1]}/", sys._getframe(1)
        while frame.f_back is not None:
            name = frame.f_code.co_filename.removeprefix(root)
            if name.startswith("compressor/") and not name.startswith(PASSED_OVER):
                break
            frame = frame.f_back
        asked = f"{name.removesuffix('.py').replace('/', '.')}.{frame.f_code.co_name}"
        self.calls[what, asked] += 1
        self.tokens[what, asked] += tokens

    def whose(self, folder: Path) -> str:
        return "the base" if folder.resolve() == self.base else "others"

    def table(self) -> str:
        """A line for each kind of thing, with those who asked for it below."""
        lines = []
        for kind in sorted({what for what, _ in self.calls}):
            own = {asked: count for (what, asked), count in self.calls.items() if what == kind}
            lines.append(f"{kind}: {sum(own.values())}")
            for asked, count in own.items():
                tokens = self.tokens[kind, asked]
                lines.append(f"    {count} {asked}" + (f", {tokens:,} tokens" if tokens else ""))
        return "\n".join(lines)


def counted(base: Path) -> Counts:
    """Compress `base`, a folder in the current one, and count."""
    from compressor.cli.main import main
    from compressor.data import documents
    from compressor.model import opened, streaming

    counts = Counts(base.resolve())
    lockstep, back = streaming._Lockstep.__init__, streaming.ReversePass.run
    pack, open_checkpoint = documents.pack, opened.open_checkpoint

    def pass_forward(self: Any, stream: Any, *more: Any) -> None:
        tokens = sum(batch.numel() for batch in (*stream.batches, *stream.evaluation))
        counts.note(f"forward passes over {counts.whose(stream.model.partial.checkpoint.folder)}", tokens)
        lockstep(self, stream, *more)

    def pass_back(self: Any, *more: Any) -> Any:
        tokens = sum(batch.numel() for batch in self.batches)
        counts.note(f"backward passes over {counts.whose(self.model.partial.checkpoint.folder)}", tokens)
        return back(self, *more)

    def tokenise(*given: Any) -> Any:
        stream = pack(*given)
        counts.note("texts tokenised", stream.ids.numel())
        return stream

    def open_counted(source: Any, *more: Any) -> Any:
        counts.note(f"openings of {counts.whose(source.folder)}")
        return open_checkpoint(source, *more)

    with (
        patch.object(streaming._Lockstep, "__init__", pass_forward),
        patch.object(streaming.ReversePass, "run", pass_back),
        patch.object(documents, "pack", tokenise),
        patch.object(opened, "open_checkpoint", open_counted),
        patch.object(sys, "argv", ["moe-compress", *shlex.split(COMMAND)]),
        redirect_stdout(StringIO()),
    ):
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
    return counts


if __name__ == "__main__":
    from compressor.data.demo import demo_checkpoint

    with tempfile.TemporaryDirectory() as scratch, demo_checkpoint() as demo:
        os.environ |= {"HF_HUB_OFFLINE": "1", "MOE_COMPRESSOR_CACHE": f"{scratch}/cache"}
        os.chdir(scratch)
        Path("base").symlink_to(demo)
        print(counted(Path("base")).table())
