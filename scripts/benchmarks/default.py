"""Hold what `compress` does by default against the best published criterion, and print the ratio of what they cost.

    python -m scripts.benchmarks.default MODEL --text train.jsonl --heldout valid.jsonl [--seeds 0 1 2] [--distill 400]

All calibrate on as much text as the default reads, in sequences of `--length` tokens, as the model was trained on.
Cost is the increase of the held-out loss in nats per token, over seeds (draws of calibration text) and sequences. A
published criterion keeps whole experts and corrects nothing; the best is that of least cost over all seeds. Ratios have
an interval of 95% by a bootstrap of seeds and sequences, paired. The last row is the default with so many steps of
`distill`.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.recipe.step import TextOptions
from scripts.benchmarks.frame import COMMAND, head, losses, options, row, run_child, with_error

PUBLISHED = (
    "reap", "reap:saliency=frequency", "reap:saliency=ean", "enumerate", "man", "msan", "razor", "hope",
    "hope:interaction=norms", "leave-one-out", "ranked-choice",
)  # fmt: skip
DRAWS = 4000


def ratio_of(ours: Tensor, theirs: Tensor) -> tuple[float, float, float]:
    """Ratio of mean costs [seeds, sequences], and its interval of 95% over draws of both."""
    generator = torch.Generator().manual_seed(0)
    seeds, sequences = (torch.randint(size, (DRAWS, size), generator=generator) for size in ours.shape)
    drawn = seeds[:, :, None], sequences[:, None]
    ratios = ours[drawn].mean((1, 2)) / theirs[drawn].mean((1, 2))
    low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=ratios.dtype)).tolist()
    return float(ours.mean() / theirs.mean()), low, high


def strategy_flags(name: str) -> list[str]:
    """A published criterion as the command line takes it."""
    strategy, _, option = name.partition(":")
    return ["--strategy", strategy, *(["--option", option] if option else []), "--split", "1", "--correct", "none"]


def main() -> None:
    """Compress in every way and print the table."""
    read = TextOptions()
    text = {"sequences": 64, "length": read.sequence_length, "tokens": read.samples * read.sequence_length}
    parser = options(__doc__, seeds=[0, 1, 2], ratios=[0.25, 0.5], distill=400, **text)
    parser.add_argument("model")
    parser.add_argument("--text", required=True, help="to calibrate with")
    parser.add_argument("--heldout", required=True, help="to judge on")
    parser.add_argument("--published", nargs="+", default=PUBLISHED)
    parser.add_argument("--more", nargs="*", default=[], help="flags of `compress` for the default")
    args = parser.parse_args()
    base = losses(args.model, args.heldout, args.sequences, args.length)

    def cost(ratio: float, flags: Sequence[str]) -> Tensor:
        """[seeds, sequences]"""
        found = []
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as scratch:
                out = Path(scratch) / "out"
                size = ["--samples", str(args.tokens // args.length), "--sequence-length", str(args.length)]
                given = ["--ratio", str(ratio), "--calibration", args.text, *size, "--seed", str(seed), "-o", str(out)]
                if run_child([*COMMAND, "compress", args.model, *given, *flags]).status:
                    raise CompressionError(f"compress {' '.join(flags)} failed")
                found.append(losses(out, args.heldout, args.sequences, args.length) - base)
        return torch.stack(found)

    head("ratio", "how", "cost", "over the best published", "95%")
    for ratio in args.ratios:
        costs = {name: cost(ratio, strategy_flags(name)) for name in args.published}
        best = min(costs, key=lambda name: float(costs[name].mean()))
        costs["default"] = cost(ratio, args.more)
        if args.distill and ratio == max(args.ratios):
            steps = ["--distill", "experts", "--set", f"distill.steps={args.distill}"]
            costs[f"default, distill {args.distill}"] = cost(ratio, [*args.more, *steps])
        for name, own in costs.items():
            share, low, high = ratio_of(own, costs[best])
            shown = f"**{name}**" if name in ("default", best) else name
            row(ratio, shown, with_error(own.mean(0)), f"{share:.3f}", f"{low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
