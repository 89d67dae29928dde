"""Measure memory and time on a large synthetic checkpoint; every figure is a ratio within one run.

    python -m scripts.benchmark [--folder DIR] [--gigabytes 4.2] [--limit] [--device cuda] [--tokens 4096]

Prints: peak anonymous memory of `compress` above a bare interpreter with torch and transformers imported, over the
largest decoder layer and over the model; the calibration pass over stock forwards of the same batches on a model in
memory, and which share of loading is hidden by reading ahead; a pure drop and model-centric over copying the same
bytes. `--limit` compresses under a memory limit well below the model's size. `--device` is where the calibration pass
and the stock forwards compute, which takes memory for the whole model there. `scripts.benchmarks` has the others.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.frame import BARE, COMMAND, Sizes, options, run_child, timed, warm

SIZES = Sizes()
KEEP = SIZES.experts // 2
LIMIT_SHARE = 0.45  # of the model's size: all the address space that the process may have


def compress_command(folder: Path, out: Path, strategy: str) -> list[str]:
    """The command line that compresses to `KEEP` experts, in a process of its own."""
    how = ["--experts", str(KEEP), "--strategy", strategy, "--resident", "no", "--json"]
    return [*COMMAND, "compress", str(folder), "-o", str(out), *how]


def copy_bytes(folder: Path, target: Path, size: int) -> float:
    """Seconds to copy `size` bytes of a checkpoint's files and flush them to the disk, as the writer does."""
    target.mkdir()
    begin, left = time.perf_counter(), size
    for file in sorted(folder.glob("*.safetensors")):
        if left <= 0:
            break
        with file.open("rb") as source, (target / file.name).open("wb") as sink:
            amount = min(left, file.stat().st_size)
            done = 0
            while done < amount:
                done += os.copy_file_range(source.fileno(), sink.fileno(), amount - done)
            sink.flush()
            os.fsync(sink.fileno())
            left -= done
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    return seconds


def memory_report(folder: Path, scratch: Path, layer_bytes: int, model_bytes: int) -> None:
    """Peak memory of a calibrated and of a weights-only compression in processes of their own."""
    bare = run_child(BARE).anonymous
    print(f"bare interpreter with torch and transformers: {bare / 1e6:.0f} MB anonymous")
    for name, extra in {
        "count-guided": ["--calibration", str(scratch / "text.txt"), "--samples", "8", "--sequence-length", "128"],
        "model-centric": [],
    }.items():
        out = scratch / f"memory-{name}"
        seen = run_child([*compress_command(folder, out, name), *extra])
        above = seen.anonymous - bare
        print(
            f"{name}: exit {seen.status}, peak above bare {above / 1e6:.0f} MB = {above / layer_bytes:.2f} of the "
            f"largest layer, {above / model_bytes:.3f} of the model; mapped file pages at most "
            f"{seen.mapped / 1e6:.0f} MB"
        )
        shutil.rmtree(out, ignore_errors=True)


def calibration_report(folder: Path, vocabulary: int, device: str, tokens: int) -> None:
    """The streamed pass over stock forwards of the same batches on a model that is in memory already."""
    from transformers import AutoModelForCausalLM

    from compressor.checkpoint.source import locate
    from compressor.data.batches import Calibration
    from compressor.data.documents import as_rows
    from compressor.model.loading import PartialModel, ReadAhead
    from compressor.model.opened import open_model
    from compressor.progress import Silent, quiet_transformers
    from compressor.statistics.statistics import collect

    def settle() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    ids = torch.randint(vocabulary, (max(256, tokens // 256 * 256),), generator=torch.Generator().manual_seed(0))
    batches = as_rows(ids, 256).split(8)
    loading = [0.0]
    load, begin = PartialModel.load, ReadAhead.begin

    def timed_load(self: PartialModel, keys: Any) -> None:
        settle()
        loading[0] += timed(lambda: (load(self, keys), settle()))[0]

    def streamed() -> float:
        model = open_model(locate(str(folder)), device=device)
        needs = frozenset({"routed_count", "gate_weight_sum", "probability_sum"})
        return timed(lambda: ([None for _ in collect(model, needs, Calibration(batches, {}), Silent())], settle()))[0]

    streamed()  # whatever is made once, such as kernels
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    ahead = streamed()
    peak = torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else 0
    ReadAhead.begin = lambda self, names: None  # type: ignore[method-assign]
    plain = streamed()
    PartialModel.load = timed_load  # type: ignore[method-assign]
    waiting = streamed()
    PartialModel.load, ReadAhead.begin = load, begin  # type: ignore[method-assign]
    with quiet_transformers():
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    for parameter in stock.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        stock.model(input_ids=batches[0][:1].to(device), use_cache=False)
        settle()
        forward, _ = timed(
            lambda: ([stock.model(input_ids=batch.to(device), use_cache=False) for batch in batches], settle())
        )
    print(
        f"calibration pass on {device} over stock forwards: {(waiting - loading[0]) / forward:.2f} with loading "
        f"excluded, {ahead / forward:.2f} with it ({forward:.1f} s of stock forward, {loading[0]:.1f} s loading)"
    )
    print(
        f"read ahead: {ahead:.2f} s instead of {plain:.2f} s, so {max(0.0, plain - ahead) / loading[0]:.0%} of loading "
        "was hidden" + (f"; at most {peak / 1e6:.0f} MB of the device" if peak else "")
    )


def writing_report(folder: Path, scratch: Path) -> None:
    """A pure drop, and model-centric, over copying the same bytes."""
    import compressor
    from compressor.checkpoint.source import locate
    from compressor.model.opened import open_model
    from compressor.recipe.plan import ExpertPlan, LayerPlan, Source
    from compressor.recipe.steps_plan import Plan, PlannedStep

    model = open_model(locate(str(folder)))
    layers = tuple(LayerPlan.keep(layer, range(0, SIZES.experts, 2)) for layer in model.architecture.layers)
    source = Source(str(folder), None, model.fingerprint)
    decided = ExpertPlan(KEEP, layers)
    drop = Plan(source, (PlannedStep("prune", {"experts": KEEP}, decided),))
    seconds, summary = timed(lambda: compressor.apply(drop, scratch / "drop"))
    shutil.rmtree(scratch / "drop")
    copying = copy_bytes(folder, scratch / "copy", summary.after.bytes)
    print(
        f"pure drop over copying the same {summary.after.bytes / 1e9:.1f} GB: {seconds / copying:.2f} "
        f"({seconds:.1f} s over {copying:.1f} s)"
    )
    left, right = torch.randn(SIZES.hidden, SIZES.inner), torch.randn(SIZES.inner, SIZES.hidden)
    left @ right
    once, _ = timed(lambda: [left @ right for _ in range(64)])
    products = once / 64 * SIZES.experts * len(model.architecture.layers)
    seconds, summary = timed(
        lambda: compressor.compress(str(folder), scratch / "merged", experts=KEEP, strategy="model-centric")
    )
    shutil.rmtree(scratch / "merged")
    spare = (seconds - copying) / products
    print(
        f"model-centric: {seconds:.1f} s = {seconds / copying:.2f} copies, or the copy plus {spare:.2f} times "
        "its matrix products "
        f"({products:.1f} s at {2 * SIZES.hidden * SIZES.inner * SIZES.hidden * 64 / once / 1e9:.0f} GFLOP/s); "
        + ", ".join(f"{name} {value:.1f} s" for name, value in summary.seconds.items())
    )


def limit_report(folder: Path, scratch: Path, model_bytes: int) -> None:
    """Compress under a limit on address space, mapped files included, well below the model's size."""
    limit = int(LIMIT_SHARE * model_bytes)
    seen = run_child(compress_command(folder, scratch / "limited", "model-centric"), limit)
    print(
        f"under a limit of {limit / 1e9:.2f} GB of address space ({LIMIT_SHARE:.0%} of the model): exit "
        f"status {seen.status}"
    )
    shutil.rmtree(scratch / "limited", ignore_errors=True)


def main() -> None:
    """Make the checkpoint and print every ratio."""
    parser = options(__doc__, gigabytes=4.2, limit=False, device="cpu", tokens=4096)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made, or lies already (kept)")
    parser.add_argument("--only", choices=("memory", "calibration", "writing"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        folder = given.folder or scratch / "model"
        SIZES.write(folder, given.gigabytes)
        (scratch / "text.txt").write_text("some words to calibrate with\n\n" * 2000)
        warm(folder)
        from compressor import inspect

        report = inspect(str(folder))
        largest = report.largest_layer_bytes
        print(f"model {report.bytes / 1e9:.2f} GB, {report.layers} layers, the largest {largest / 1e6:.0f} MB")
        if given.only in (None, "memory"):
            memory_report(folder, scratch, largest, report.bytes)
        if given.only in (None, "calibration"):
            calibration_report(folder, SIZES.vocabulary, given.device, given.tokens)
        if given.only in (None, "writing"):
            writing_report(folder, scratch)
        if given.limit:
            limit_report(folder, scratch, report.bytes)


if __name__ == "__main__":
    main()
