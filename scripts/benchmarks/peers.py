"""Run other projects' pruning and merging and ours on the same work, each in a process of its own, and print ratios.

    python -m scripts.benchmarks.peers --data train.jsonl --heldout valid.jsonl --model MODEL [--reap FOLDER] \\
        [--razor FOLDER] [--hope FOLDER] [--keep 0.5] [--samples 32] [--length 256]

The folders are checkouts of CerebrasResearch/reap, nick7nlp/Razor and awslabs/HOPE, whose code is theirs;
`scripts.peers` lets it run with today's transformers. REAP knows Mixtral, RAZOR and HOPE take any model of stock
experts. Everybody reads the same float32 checkpoint, calibrates with the same token batches, keeps as many experts,
computes in float32 on the CPU with as many threads, and writes a checkpoint. Seconds, of the clock and of the
processor, go from opening the checkpoint to the written output, without imports; memory is the highest resident one of
the process above that of the imports alone. Theirs is divided by ours of the same method. Losses are held out, in nats
per token, with intervals of 95%.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.errors import CompressionError
from scripts.benchmarks.frame import head, losses, options, row, run_child, with_error
from scripts.peers.job import Job, Told, read, write

THEIRS = {
    "reap": ("reap, theirs", "reap, theirs, weights as used"),
    "razor": ("razor, theirs",),
    "hope": ("hope, theirs",),
}
COLUMNS = (
    "method", "seconds", "CPU seconds", "memory", "bytes written", "over the original", "same choice",
)  # fmt: skip


def named(args: argparse.Namespace) -> dict[str, str]:
    """The checkouts that were named, by project."""
    folders = {project: getattr(args, project.replace("-", "_")) for project in THEIRS}
    return {project: folder for project, folder in folders.items() if folder}


def methods(checkouts: Mapping[str, str]) -> dict[str, str | None]:
    """What is run, ours first, and the checkout that each needs."""
    found: dict[str, str | None] = {}
    for project, folder in checkouts.items():
        found |= {f"{project}, ours": None, **dict.fromkeys(THEIRS[project], folder)}
    return found


def copy_in_float32(model: Path, folder: Path) -> None:
    """The checkpoint in float32, so that nobody's output is rounded where another's is not."""
    import torch
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(folder)
    copy_tokenizer(model, folder)


def copy_tokenizer(model: Path, folder: Path) -> None:
    """Its files, where the folder has none."""
    for file in model.glob("tokenizer*"):
        if not (folder / file.name).exists():
            shutil.copy(file, folder)


def save_batches(model: Path, data: str, samples: int, length: int, file: Path) -> str:
    """Write the batches that our calibration makes of the text, for everybody; returns the SHA-256 of the token ids."""
    import torch

    from compressor.data.batches import calibrate
    from compressor.data.sources import parse_sources
    from compressor.model.tokenizer import load_tokenizer

    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    made = calibrate(
        parse_sources([data]),
        load_tokenizer(model),
        samples=samples,
        length=length,
        seed=0,
        vocab=vocab,
    )
    torch.save(list(made.batches), file)
    return str(made.identity["sha256"])


def carry_out(job: Job, scratch: Path, environment: Mapping[str, str]) -> Told:
    """Do the job in a process of its own; raises `CompressionError` with the end of what a failed one said."""
    asked, told = scratch / "job.json", scratch / "told.json"
    told.unlink(missing_ok=True)
    write(asked, job)
    done = run_child(
        [sys.executable, "-m", "scripts.peers.run", str(asked), str(told)], environment=environment
    )
    if done.status:
        raise CompressionError(
            f"{job.method} ended with status {done.status}:\n{done.errors[-2000:]}"
        )
    found: Told = read(told, Told)
    return found


def same_choice(one: Told, other: Told) -> str:
    """In how many layers both kept the same experts, or made the same groups of them: 'n of N layers'."""
    pairs = list(zip(one.groups, other.groups, strict=True))
    same = sum(
        {frozenset(group) for group in a} == {frozenset(group) for group in b} for a, b in pairs
    )
    return f"{same} of {len(pairs)} layers"


def ours_of(method: str) -> str:
    """Our run of the same method."""
    return f"{method.partition(', ')[0]}, ours"


def rows(
    found: Mapping[str, Told], costs: Mapping[str, Tensor], imports: int
) -> Iterable[tuple[Any, ...]]:
    """Rows: every figure of theirs over ours of the same method; ours is 1. `costs` are of each sequence."""
    for method, told in found.items():
        ours = found[ours_of(method)]
        figures = (
            told.total / ours.total,
            told.cpu / ours.cpu,
            (told.resident - imports) / (ours.resident - imports),
            told.stored / ours.stored,
        )
        agreement = same_choice(ours, told) if told is not ours else ""
        yield method, *figures, with_error(costs[method]), agreement


def compare(model: Path, runs: Mapping[str, str | None], args: argparse.Namespace) -> None:
    """Carry out the runs on one checkpoint, write beside it, and print a row for each."""
    from transformers import AutoConfig

    scratch = model.parent
    tokens = scratch / "tokens.pt"
    digest = save_batches(model, args.data, args.samples, args.length, tokens)
    size = (
        args.samples,
        args.length,
        max(2, math.ceil(AutoConfig.from_pretrained(model).num_experts * args.keep)),
    )
    environment = {
        "OMP_NUM_THREADS": str(args.threads),
        "MOE_COMPRESSOR_CACHE": str(scratch / "cache"),
    }

    def judged(folder: Path) -> Tensor:
        return losses(folder, args.heldout, args.heldout_samples, args.length)

    def job(method: str, peer: str | None, out: Path) -> Job:
        return Job(method, str(model), str(tokens), args.data, *size, str(out), peer)

    imports, original = (
        carry_out(job("nothing", None, scratch), scratch, environment).resident,
        judged(model),
    )
    found, costs = dict[str, Told](), dict[str, Tensor]()
    for method, peer in runs.items():
        out = scratch / "out"
        told = found[method] = carry_out(job(method, peer, out), scratch, environment)
        if told.tokens not in ("", digest):
            raise CompressionError(
                f"{method} calibrated with other tokens than the rest; nothing can be compared"
            )
        copy_tokenizer(model, out)
        costs[method] = judged(out) - original
        shutil.rmtree(out)
        shutil.rmtree(scratch / "out-observed", ignore_errors=True)
    for cells in rows(found, costs, imports):
        row(*cells)


def main() -> None:
    """Make the checkpoints and print the table."""
    parser = options(
        __doc__, reap=None, razor=None, hope=None, keep=0.5, samples=32, length=256, heldout_samples=32,
        threads=1,
    )  # fmt: skip
    parser.add_argument("--data", required=True, help="text to calibrate with")
    parser.add_argument("--heldout", required=True, help="text to judge on")
    parser.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()
    checkouts = named(args)
    runs = methods(checkouts)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        head(*COLUMNS)
        copy_in_float32(args.model, folder)
        compare(folder, runs, args)


if __name__ == "__main__":
    try:
        main()
    except CompressionError as fault:
        sys.exit(str(fault))
