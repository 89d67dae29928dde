"""Count what the default run does to a layer: operators, synchronisations with the host, bytes between devices.

    python -m scripts.benchmarks.launches [--experts 16 64] [--device cpu] [--places]

Prints, for layers of so many experts side by side, one step of `tune`, and one calibration batch through one decoder
layer: in the pass that plans (statistics of the default strategy), in `correct` (recorded, then through the smaller
layer), and there with `ridge`. Each figure is a difference between runs with other numbers of steps, or of batches and
layers, so what is done once does not count. Operators are calls that reach the dispatcher; views launch nothing.

A synchronisation is a call for which the host waits. On a GPU only tensors that lie there count. On the CPU, where
nothing tells them apart, every such call counts, so the figures are upper bounds; --places prints where they are. Last
is what starting `compress` costs beside a stock load.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Silent
from compressor.recipe.plan import LayerPlan
from compressor.recipe.registry import load_strategy
from compressor.recipe.step import DEFAULT_LENGTH
from compressor.statistics.statistics import collect
from compressor.steps.correct.options import Correct
from compressor.steps.correct.sequential import LayerWork, compress_sequentially
from scripts.benchmarks.frame import (
    BARE,
    COMMAND,
    Child,
    head,
    options,
    qwen3_moe,
    row,
    run_child,
    write_layers,
)
from scripts.benchmarks.scale import random_text

ROOT = f"{Path(__file__).resolve().parents[2]}/"
MOST_OPERATORS, MOST_IN_STEP, MOST_IN_BATCH = 150, 0, 2
SYNCHRONISING = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount",
    "equal", "_linalg_check_errors",
}  # fmt: skip
READING = {
    "tolist",
    "numpy",
    "cpu",
    "__array__",
}  # methods that never reach the dispatcher on a CPU
Counts = Counter[str]  # operators, views, bytes, and synchronisations by place


def place() -> str:
    """The nearest line of the product that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename.removeprefix(ROOT)
        if name.startswith(("compressor/", "strategies/")):
            return f"sync {name}:{frame.f_lineno}"
        frame = frame.f_back
    return "sync elsewhere"


def synchronises(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the shape of the result depends on values, or a value becomes a number."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_"):
        masks = [index for index in args[1] if index is not None and index.dtype == torch.bool]
        return bool(masks) and not (
            len(args) > 2 and args[2].numel() == 1
        )  # which is a masked_fill
    return name in SYNCHRONISING


class Operators(TorchDispatchMode):
    """Counts operators, and what waits for tensors on the device."""

    def __init__(self, device: torch.device, counts: Counts) -> None:
        super().__init__()
        self.device = device
        self.counts = counts
        self.reading = False  # inside of a call that counts as a whole

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.counts["operators"] += 1
        returned = [value.alias_info for value in func._schema.returns]
        self.counts["views"] += any(alias is not None and not alias.is_write for alias in returned)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        name = func.overloadpacket.__name__
        if self.reading:
            return result
        if any(self.holds(value) for value in tensors) and synchronises(name, args, kwargs):
            self.counts[place()] += 1
        if name in ("_to_copy", "copy_") and tensors[-1].device.type != result.device.type:
            self.counts["bytes"] += tensors[-1].nbytes
            self.counts[place()] += not (kwargs.get("non_blocking") or args[2:] == (True,))
        return result

    def holds(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self.device.type


class Reads(TorchFunctionMode):
    """Counts methods that copy values to the host, and numbers that become tensors on a device."""

    def __init__(self, operators: Operators) -> None:
        super().__init__()
        self.operators = operators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        device = self.operators.device
        target = kwargs.get("device", args[1] if len(args) > 1 else None)
        # on the CPU the device has the host's name, so there only a name that is spelled out is the host's
        to_host = (
            name == "to"
            and str(target) == "cpu"
            and (isinstance(target, str) or device.type != "cpu")
        )
        counts = (name in READING or to_host) and self.operators.holds(args[0])
        if (
            name in ("tensor", "as_tensor")
            and not isinstance(args[0], Tensor)
            and kwargs.get("device") is not None
        ):
            counts = torch.device(kwargs["device"]).type == device.type
        if not counts:
            return func(*args, **kwargs)
        self.operators.reading = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.operators.reading = False
        self.operators.counts[place()] += 1
        self.operators.counts["bytes"] += (
            args[0] if isinstance(args[0], Tensor) else result
        ).nbytes
        return result


def counted(device: torch.device, work: Callable[[], object]) -> Counts:
    """Do the work and count."""
    counts = Counts()
    operators = Operators(device, counts)
    with operators, Reads(operators):
        work()
    return counts


class Synthetic:
    """Runs on checkpoints of one or two layers with so many experts."""

    def __init__(self, folder: Path, experts: int, device: str) -> None:
        self.kept = experts // 2
        self.models = dict[int, OpenModel]()
        for layers in (1, 2):
            checkpoint = folder / f"{experts}-{layers}"
            write_layers(
                checkpoint, lambda layers: qwen3_moe(64, 32, layers, experts, 4, 512), layers
            )
            self.models[layers] = open_model(locate(str(checkpoint)), "auto", device)
        self.device = self.models[1].partial.device
        for layers in self.models:
            self.plan(layers, 1)  # weights are checked when they are first read

    def text(self, batches: int) -> Calibration:
        """Batches of random tokens, the first held out."""
        generator = torch.Generator().manual_seed(0)
        shape = (batches + 1, 1, DEFAULT_LENGTH)
        tokens = torch.randint(512, shape, generator=generator)
        return Calibration(tuple(tokens), {}, heldout=frozenset({0}))

    def plan(self, layers: int, batches: int) -> Counts:
        """The pass that plans."""
        needs = load_strategy("auto", {}).needs
        text = self.text(batches)
        return counted(
            self.device, lambda: list(collect(self.models[layers], needs, text, Silent()))
        )

    def correct(self, correction: Correct, layers: int = 1, batches: int = 4) -> Counts:
        """The pass of `correct`, keeping the first experts."""

        def decide(stats: Any) -> LayerPlan:
            return LayerPlan.keep(stats.layer, range(self.kept))

        work = LayerWork(self.kept, decide, correction=correction, measure=True)
        text = self.text(batches)
        return counted(
            self.device, lambda: compress_sequentially(self.models[layers], work, text, Silent())
        )

    def step(self) -> Counts:
        """Counts of one step of tune."""
        few, many = 4, 12
        more = self.correct(Correct(method="tune", steps=many))
        return difference(more, self.correct(Correct(method="tune", steps=few)), many - few)

    def batch(self, run: Callable[[int, int], Counts]) -> Counts:
        """Counts of one batch through one layer: `run` takes the numbers of layers and batches."""
        few, many = 2, 6
        first = difference(run(1, many), run(1, few), many - few)
        return difference(difference(run(2, many), run(2, few), many - few), first, 1)

    def rows(self) -> Iterator[tuple[str, Counts, int | None, int | None]]:
        """Each thing, what one of it took, and the most operators and synchronisations that it may take."""
        yield "step of tune", self.step(), MOST_OPERATORS, MOST_IN_STEP
        yield "batch, statistics", self.batch(self.plan), None, MOST_IN_BATCH
        for name, method, limit in (
            ("recorded and passed on", "none", MOST_IN_BATCH),
            ("with ridge", "ridge", None),
        ):
            correction = Correct(method=method)
            yield (
                f"batch, {name}",
                self.batch(lambda *sizes, to=correction: self.correct(to, *sizes)),
                None,
                limit,
            )


def start_up(folder: Path) -> str:
    """Wall and CPU seconds of `compress` of a small model over those of the imports and a stock load, medians of 3."""
    text = folder / "text.txt"
    text.write_text(random_text(4096))
    model = next(folder.glob("*-1"))
    given = [
        "--ratio",
        "0.25",
        "--correct",
        "none",
        "--calibration",
        str(text),
        "--samples",
        "4",
        "--device",
        "cpu",
    ]
    ours = [
        *COMMAND,
        "compress",
        str(model),
        "-o",
        str(folder / "out"),
        *given,
        "--sequence-length",
        "64",
    ]
    stock = f"from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained({str(model)!r})"
    runs: dict[str, list[Child]] = {"stock": [], "ours": []}
    for _ in range(3):
        runs["stock"].append(run_child([BARE[0], "-c", f"{BARE[2]}\n{stock}"]))
        runs["ours"].append(run_child([*ours, "--overwrite"]))
    shares = []
    for field in ("seconds", "cpu"):
        took = {
            name: median(getattr(child, field) for child in children)
            for name, children in runs.items()
        }
        shares.append(f"{took['ours'] / took['stock']:.2f} of its {field}")
    return f"over a stock load with its imports, compress of a small model takes {' and '.join(shares)}"


def difference(more: Counts, less: Counts, count: int) -> Counts:
    """What one of `count` took."""
    keys = more.keys() | less.keys()
    return Counts({key: (more[key] - less[key]) / count for key in keys})  # type: ignore[dict-item]


def shown(found: list[Counts], keys: Callable[[str], bool], limit: int | None = None) -> str:
    """A figure for each number of experts, and the share of the limit that the last one takes."""
    totals = [sum(count for key, count in counts.items() if keys(key)) for counts in found]
    text = ", ".join(f"{total:,.0f}" for total in totals)
    return text if limit is None else f"{text} of {limit}"


def main() -> None:
    """Count and print the table."""
    parser = options(__doc__, experts=[16, 64], device="cpu", places=False)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = [Synthetic(Path(scratch), experts, args.device) for experts in args.experts]
        print(
            f"{', '.join(map(str, args.experts))} experts, half of them kept; {DEFAULT_LENGTH} tokens a batch"
        )
        head("what", "operators", "of them views", "synchronisations", "bytes between devices")
        for rows in zip(*(run.rows() for run in runs), strict=True):
            name, _, operators, waits = rows[0]
            found = [counts for _, counts, _, _ in rows]
            cells = [shown(found, lambda key: key == "operators", operators)]
            cells.append(shown(found, lambda key: key == "views"))
            cells.append(shown(found, lambda key: key.startswith("sync"), waits))
            row(name, *cells, shown(found, lambda key: key == "bytes"))
            for key in sorted(found[-1]) if args.places else ():
                if key.startswith("sync") and any(counts[key] for counts in found):
                    print(f"    {shown(found, lambda other, key=key: other == key)} {key}")
        print(start_up(Path(scratch)))


if __name__ == "__main__":
    main()
