"""Measure memory and time on a large synthetic checkpoint; every figure is a ratio within one run.

    python -m scripts.benchmark [--folder DIR] [--gigabytes 4.2] [--limit] [--device cuda] [--tokens 4096]

Prints: peak anonymous memory of `compress` above a bare interpreter with torch and transformers imported, over the
largest decoder layer and over the model; the calibration pass over stock forwards of the same batches on a model in
memory, and which share of loading is hidden by reading ahead; a pure drop and model-centric over copying the same
bytes. `--limit` compresses under a memory limit well below the model's size. `--device` is where the calibration pass
and the stock forwards compute, which takes memory for the whole model there.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from scripts.benchmark_calibration import calibration_report, timed

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, VOCABULARY = 2048, 1024, 20, 4, 32_000
KEEP = EXPERTS // 2
LIMIT_SHARE = 0.45  # of the model's size: all the address space that the process may have


def config(layers: int, vocabulary: int = VOCABULARY) -> Any:
    """A Qwen3-MoE config of about 0.25 GB a layer in bfloat16."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        hidden_size=HIDDEN, intermediate_size=2048, moe_intermediate_size=INTERMEDIATE, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        vocab_size=vocabulary, tie_word_embeddings=False, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16",
    )  # fmt: skip


def write_synthetic(folder: Path, gigabytes: float, vocabulary: int = VOCABULARY) -> int:
    """Write a sharded checkpoint of at least this size, layer by layer; returns the number of layers."""
    from safetensors.torch import save_file
    from transformers import Qwen3MoeForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    layers = int(gigabytes * 1e9 / (EXPERTS * 3 * HIDDEN * INTERMEDIATE * 2)) + 1
    config(layers, vocabulary).save_pretrained(folder)
    weight_map: dict[str, str] = {}
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config(1, vocabulary))
    generator = torch.Generator().manual_seed(0)
    state = {
        name: (
            torch.ones(value.shape) if "norm" in name else torch.randn(value.shape, generator=generator) * 0.02
        ).bfloat16()
        for name, value in model.state_dict().items()
    }
    stored = {name: tensor.clone() for name, tensor in revert_weight_conversion(model, state).items()}
    inside = {name: tensor for name, tensor in stored.items() if name.startswith("model.layers.0.")}
    outside = {name: tensor for name, tensor in stored.items() if name not in inside}
    for layer in range(layers):
        part = {name.replace(".0.", f".{layer}.", 1): tensor.roll(layer) for name, tensor in inside.items()}
        part |= outside if layer == 0 else {}
        file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return layers


def status(process: int, field: str) -> int:
    """Bytes of one field of a process's memory status; 0 when it has gone."""
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def watch(command: list[str], limit: int | None = None) -> dict[str, float]:
    """Run a command and sample its memory: peak RssAnon and RssFile in bytes, seconds, exit status."""

    def confine() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=confine)
    peak = {"RssAnon": 0, "RssFile": 0}
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.01):
            for field in peak:
                peak[field] = max(peak[field], status(process.pid, field))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        _, errors = process.communicate()
    finally:  # also where this process is told to stop
        process.kill()
        process.wait()
        done.set()
        thread.join()
    if process.returncode:
        sys.stderr.write(errors)
    return {
        "anon": peak["RssAnon"],
        "file": peak["RssFile"],
        "seconds": time.perf_counter() - begin,
        "status": process.returncode,
    }


def compress_command(folder: Path, out: Path, strategy: str) -> list[str]:
    """The command line that compresses to `KEEP` experts, in a process of its own."""
    arguments = ["compress", str(folder), "-o", str(out), "--experts", str(KEEP), "--strategy", strategy, "--json"]
    return [sys.executable, "-m", "compressor", *arguments]


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


def warm(folder: Path) -> None:
    """Read every file once, so that all timings find the same page cache."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            while stream.read(2**26):
                pass


def memory_report(folder: Path, scratch: Path, layer_bytes: int, model_bytes: int) -> None:
    """Peak memory of a calibrated and of a weights-only compression in processes of their own."""
    bare = watch([sys.executable, "-c", "import torch, transformers, transformers.modeling_utils, time; time.sleep(1)"])
    print(f"bare interpreter with torch and transformers: {bare['anon'] / 1e6:.0f} MB anonymous")
    for name, extra in {
        "count-guided": ["--calibration", str(scratch / "text.txt"), "--samples", "8", "--sequence-length", "128"],
        "model-centric": [],
    }.items():
        out = scratch / f"memory-{name}"
        seen = watch([*compress_command(folder, out, name), *extra])
        above = seen["anon"] - bare["anon"]
        print(
            f"{name}: exit {seen['status']:.0f}, peak above bare {above / 1e6:.0f} MB = "
            f"{above / layer_bytes:.2f} of the largest layer, "
            f"{above / model_bytes:.3f} of the model; mapped file pages at most {seen['file'] / 1e6:.0f} MB"
        )
        shutil.rmtree(out, ignore_errors=True)


def writing_report(folder: Path, scratch: Path) -> None:
    """A pure drop, and model-centric, over copying the same bytes."""
    import compressor
    from compressor.checkpoint.source import locate
    from compressor.model.opened import open_model
    from compressor.recipe.plan import CompressionPlan, LayerPlan, Source
    from compressor.recipe.steps_plan import Plan, PlannedStep, decisions

    model = open_model(locate(str(folder)))
    layers = tuple(LayerPlan.keep(layer, range(0, EXPERTS, 2)) for layer in model.architecture.layers)
    source = Source(str(folder), None, model.fingerprint)
    decided = decisions(CompressionPlan(source, KEEP, "drop", {}, None, layers))
    drop = Plan(source, (PlannedStep("prune", {"experts": KEEP}, decided),))
    seconds, summary = timed(lambda: compressor.apply(drop, scratch / "drop"))
    shutil.rmtree(scratch / "drop")
    copying = copy_bytes(folder, scratch / "copy", summary.after.bytes)
    print(
        f"pure drop over copying the same {summary.after.bytes / 1e9:.1f} GB: {seconds / copying:.2f} "
        f"({seconds:.1f} s over {copying:.1f} s)"
    )
    left, right = torch.randn(HIDDEN, INTERMEDIATE), torch.randn(INTERMEDIATE, HIDDEN)
    left @ right
    once, _ = timed(lambda: [left @ right for _ in range(64)])
    products = once / 64 * EXPERTS * len(model.architecture.layers)
    seconds, summary = timed(
        lambda: compressor.compress(str(folder), scratch / "merged", experts=KEEP, strategy="model-centric")
    )
    shutil.rmtree(scratch / "merged")
    spare = (seconds - copying) / products
    print(
        f"model-centric: {seconds:.1f} s = {seconds / copying:.2f} copies, or the copy plus {spare:.2f} times "
        "its matrix products "
        f"({products:.1f} s at {2 * HIDDEN * INTERMEDIATE * HIDDEN * 64 / once / 1e9:.0f} GFLOP/s); "
        + ", ".join(f"{name} {value:.1f} s" for name, value in summary.seconds.items())
    )


def limit_report(folder: Path, scratch: Path, model_bytes: int) -> None:
    """Compress under a limit on address space, mapped files included, well below the model's size."""
    limit = int(LIMIT_SHARE * model_bytes)
    seen = watch(compress_command(folder, scratch / "limited", "model-centric"), limit)
    print(
        f"under a limit of {limit / 1e9:.2f} GB of address space ({LIMIT_SHARE:.0%} of the model): exit "
        f"status {seen['status']:.0f}"
    )
    shutil.rmtree(scratch / "limited", ignore_errors=True)


def main() -> None:
    """Make the checkpoint and print every ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made, or lies already (kept)")
    parser.add_argument("--gigabytes", type=float, default=4.2)
    parser.add_argument("--limit", action="store_true", help="also compress under a memory limit")
    parser.add_argument("--device", default="cpu", help="where the calibration pass computes")
    parser.add_argument("--tokens", type=int, default=4096, help="of the calibration pass")
    parser.add_argument("--only", choices=("memory", "calibration", "writing"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        folder = arguments.folder or scratch / "model"
        if not (folder / "config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_synthetic(folder, arguments.gigabytes)
        (scratch / "text.txt").write_text("some words to calibrate with\n\n" * 2000)
        save_tokenizer(folder)
        warm(folder)
        from compressor import inspect

        report = inspect(str(folder))
        print(
            f"model {report.bytes / 1e9:.2f} GB, {report.layers} layers, the largest "
            f"{report.largest_layer_bytes / 1e6:.0f} MB"
        )
        if arguments.only in (None, "memory"):
            memory_report(folder, scratch, report.largest_layer_bytes, report.bytes)
        if arguments.only in (None, "calibration"):
            calibration_report(folder, VOCABULARY, arguments.device, arguments.tokens)
        if arguments.only in (None, "writing"):
            writing_report(folder, scratch)
        if arguments.limit:
            limit_report(folder, scratch, report.bytes)


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0, **{character: number for number, character in enumerate(alphabet, start=1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


if __name__ == "__main__":
    main()
