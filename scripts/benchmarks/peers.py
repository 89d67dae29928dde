"""Run REAP's pruning, HC-SMoE's merging and ours on the same work, each in a process of its own, and print ratios.

    python -m scripts.benchmarks.peers --data train.jsonl --heldout valid.jsonl [--model MIXTRAL] \\
        [--reap FOLDER] [--hc-smoe FOLDER] [--keep 0.5] [--samples 32] [--length 256]

The folders are checkouts of CerebrasResearch/reap and wazenmai/HC-SMoE, whose code is theirs; `scripts.peers` lets it
run with today's transformers. Both know Mixtral, so one synthetic Mixtral is compressed and, with --model, a trained
one. Everybody reads the same float32 checkpoint, calibrates with the same token batches, keeps as many experts,
computes in float32 on the CPU with as many threads, and writes a checkpoint. Seconds, of the clock and of the
processor, go from opening the checkpoint to the written output, without imports; memory is the highest resident one of
the process above that of the imports alone. Theirs is divided by ours of the same method.
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

from compressor.errors import CompressionError
from scripts.benchmarks.frame import head, losses, options, random_model, row, run_child, save_tokenizer
from scripts.peers.job import Job, Told, read, write

HIDDEN, INNER, VOCABULARY = 512, 1024, 1024
OURS = {"reap, theirs": "reap, ours", "reap, theirs, weights as used": "reap, ours", "hc-smoe, theirs": "hc-smoe, ours"}
COLUMNS = (
    "model", "method", "seconds", "CPU seconds", "memory", "bytes written", "held-out loss", "over the original",
    "same choice",
)  # fmt: skip


def methods(reap: str | None, hc_smoe: str | None) -> dict[str, str | None]:
    """What is run, ours first, and the checkout that each needs."""
    found: dict[str, str | None] = {}
    if reap:
        found |= {"reap, ours": None, "reap, theirs": reap, "reap, theirs, weights as used": reap}
    if hc_smoe:
        found |= {"hc-smoe, ours": None, "hc-smoe, theirs": hc_smoe}
    if not found:
        raise CompressionError("there is no checkout to compare with; give --reap FOLDER, --hc-smoe FOLDER or both")
    return found


def make_synthetic(folder: Path, layers: int, experts: int) -> None:
    """A Mixtral of random weights in float32, of 0.1 GB a layer with 16 experts, and a tokenizer of bytes."""
    from transformers import MixtralConfig

    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, num_local_experts=experts, num_experts_per_tok=2, vocab_size=VOCABULARY,
    )  # fmt: skip
    random_model(config).save_pretrained(folder)
    save_tokenizer(folder)


def copy_in_float32(model: Path, folder: Path) -> None:
    """The checkpoint in float32, so that nobody's output is rounded where another's is not; refuses what is no Mixtral.

    HC-SMoE counts the two likeliest experts of a token whatever the config says, so there must be two.
    """
    import torch
    from transformers import AutoConfig, MixtralForCausalLM

    config = AutoConfig.from_pretrained(model)
    if config.model_type != "mixtral" or config.num_experts_per_tok != 2:
        raise CompressionError(
            f"{model} is no Mixtral of two experts a token, which both projects and we compress alike; name one"
        )
    MixtralForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(folder)
    copy_tokenizer(model, folder)


def copy_tokenizer(model: Path, folder: Path) -> None:
    """Its files, where the folder has none."""
    for file in model.glob("tokenizer*"):
        if not (folder / file.name).exists():
            shutil.copy(file, folder)


def save_batches(model: Path, data: str, samples: int, length: int, file: Path) -> str:
    """Write the batches that our calibration makes of the text, for everybody; returns the SHA-256 of the token ids."""
    import torch

    from compressor.data.batches import calibrate, load_tokenizer
    from compressor.data.sources import parse_sources

    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    made = calibrate(parse_sources([data]), load_tokenizer(model), samples=samples, length=length, seed=0, vocab=vocab)
    torch.save(list(made.batches), file)
    return str(made.identity["sha256"])


def carry_out(job: Job, scratch: Path, environment: Mapping[str, str]) -> Told:
    """Do the job in a process of its own; raises `CompressionError` with the end of what a failed one said."""
    asked, told = scratch / "job.json", scratch / "told.json"
    told.unlink(missing_ok=True)
    write(asked, job)
    done = run_child([sys.executable, "-m", "scripts.peers.run", str(asked), str(told)], environment=environment)
    if done.status:
        raise CompressionError(f"{job.method} ended with status {done.status}:\n{done.errors[-2000:]}")
    found: Told = read(told, Told)
    return found


def same_choice(one: Told, other: Told) -> str:
    """In how many layers both kept the same experts, or made the same groups of them: 'n of N layers'."""
    pairs = list(zip(one.groups, other.groups, strict=True))
    same = sum({frozenset(group) for group in a} == {frozenset(group) for group in b} for a, b in pairs)
    return f"{same} of {len(pairs)} layers"


def rows(
    name: str, found: Mapping[str, Told], losses: Mapping[str, float], original: float, imports: int
) -> Iterable[tuple[Any, ...]]:
    """Rows: every figure of theirs over ours of the same method; ours is 1."""
    for method, told in found.items():
        ours = found[OURS.get(method, method)]
        figures = (
            told.total / ours.total,
            told.cpu / ours.cpu,
            (told.resident - imports) / (ours.resident - imports),
            told.stored / ours.stored,
        )
        agreement = same_choice(ours, told) if told is not ours else ""
        loss = losses[method]
        yield name, method, *figures, f"{loss:.4f}", f"{loss - original:+.4f}", agreement


def absolute(found: Mapping[str, Told], imports: int) -> Iterable[str]:
    """What the ratios are of: ours in seconds and megabytes, and everybody's phases."""
    for method, told in found.items():
        phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in told.seconds.items())
        above = (told.resident - imports) / 1e6
        yield f"{method}: {phases}, CPU {told.cpu:.2f} s; {above:.0f} MB above the imports' {imports / 1e6:.0f}"


def compare(name: str, model: Path, scratch: Path, args: argparse.Namespace) -> None:
    """Run everything on one checkpoint and print its rows."""
    experts = json.loads((model / "config.json").read_text())["num_local_experts"]
    tokens = scratch / "tokens.pt"
    digest = save_batches(model, args.data, args.samples, args.length, tokens)
    size = (args.samples, args.length, max(2, math.ceil(experts * args.keep)))
    environment = {"OMP_NUM_THREADS": str(args.threads), "MOE_COMPRESSOR_CACHE": str(scratch / "cache")}

    def judged(folder: Path) -> float:
        return float(losses(str(folder), args.heldout, args.heldout_samples, args.length).mean())

    def job(method: str, peer: str | None, out: Path) -> Job:
        return Job(method, str(model), str(tokens), args.data, *size, str(out), peer)

    imports = carry_out(job("nothing", None, scratch), scratch, environment).resident
    found, loss = dict[str, Told](), dict[str, float]()
    for method, peer in methods(args.reap, args.hc_smoe).items():
        out = scratch / "out"
        told = found[method] = carry_out(job(method, peer, out), scratch, environment)
        if told.tokens not in ("", digest):
            raise CompressionError(f"{method} calibrated with other tokens than the rest; nothing can be compared")
        copy_tokenizer(model, out)
        loss[method] = judged(out)
        shutil.rmtree(out)
        shutil.rmtree(scratch / "out-observed", ignore_errors=True)
    for cells in rows(name, found, loss, judged(model), imports):
        row(*cells)
    print(*(f"# {line}" for line in absolute(found, imports)), sep="\n", file=sys.stderr, flush=True)


def main() -> None:
    """Make the checkpoints and print the table."""
    parser = options(__doc__, reap=None, hc_smoe=None, keep=0.5, samples=32, length=256, heldout_samples=32, threads=1)
    parser.add_argument("--data", required=True, help="text to calibrate with")
    parser.add_argument("--heldout", required=True, help="text to judge on")
    parser.add_argument("--model", type=Path, help="a trained Mixtral of two experts a token")
    parser.add_argument("--layers", type=int, default=5, help="of the synthetic Mixtral; 0: none")
    parser.add_argument("--experts", type=int, default=16, help="of the synthetic Mixtral")
    args = parser.parse_args()
    methods(args.reap, args.hc_smoe)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        head(*COLUMNS)
        if args.layers:
            make_synthetic(folder, args.layers, args.experts)
            compare("synthetic", folder, Path(temporary), args)
            shutil.rmtree(folder)
        if args.model:
            copy_in_float32(args.model, folder)
            compare("trained", folder, Path(temporary), args)


if __name__ == "__main__":
    try:
        main()
    except CompressionError as fault:
        sys.exit(str(fault))
