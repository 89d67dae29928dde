"""What the benchmarks share: options, synthetic models, what a process takes, losses, and tables in Markdown or JSON."""

import argparse
import json
import math
import os
import random
import resource
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from compressor.errors import CompressionError

BARE = [sys.executable, "-c", "import torch, transformers, transformers.modeling_utils"]
COMMAND = [sys.executable, "-m", "compressor"]


def options(text: str | None, /, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with these options; a list takes several values, False is a flag, None is a string left out."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, formatter_class=form)
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="+", type=type(default[0]), default=default)
        else:
            kind = str if default is None else type(default)
            parser.add_argument(flag, type=kind, default=default)
    return parser


def save_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def write_layers(folder: Path, layers: int, **config: Any) -> None:
    """Write a Qwen3-MoE checkpoint of random bfloat16 weights with a tokenizer, a file for each layer.

    All layers hold the weights of one, rolled by their number, so no more than two of them are in memory.
    """
    from safetensors.torch import save_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    fixed = {"dtype": "bfloat16", "architectures": ["Qwen3MoeForCausalLM"]}
    folder.mkdir(parents=True, exist_ok=True)
    Qwen3MoeConfig(**fixed, **config, num_hidden_layers=layers).save_pretrained(folder)
    save_tokenizer(folder)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**fixed, **config, num_hidden_layers=1))
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, value in model.state_dict().items():
        drawn = torch.randn(value.shape, generator=generator) * 0.02
        state[name] = (torch.ones(value.shape) if "norm" in name else drawn).bfloat16()
    weight_map: dict[str, str] = {}
    stored = revert_weight_conversion(model, state)
    for layer in range(layers):
        part = {}
        for name, tensor in stored.items():
            if name.startswith("model.layers.0."):
                part[name.replace(".0.", f".{layer}.", 1)] = tensor.roll(layer)
            elif layer == 0:
                part[name] = tensor.clone()
        file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)


def random_text(tokens: int) -> str:
    """Return random words of so many bytes, which are the tokens of a synthetic checkpoint, and some more."""
    draw = random.Random(0)
    words = []
    for _ in range(tokens // 5):
        words.append("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))))
    return "\n\n".join(" ".join(words[begin : begin + 100]) for begin in range(0, len(words), 100))


def weight_bytes(folder: Path) -> int:
    """Return the bytes of the weights in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@dataclass(frozen=True, slots=True)
class Child:
    """What a process took, its children's included where the system counts so."""

    seconds: float
    cpu: float  # seconds of all threads
    anonymous: int  # bytes at the highest
    output: str


def run_child(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
    """Run a command to its end, watched; raises `CompressionError` with the end of what a failing one printed."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env={**os.environ, **(environment or {})}, **streams)
    peak, done = 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, memory_of(process.pid, "RssAnon"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        output, errors = process.communicate()
    finally:
        process.kill()
        process.wait()
        done.set()
        thread.join()
    if process.returncode:
        status = f"{shlex.join(command)} ended with status {process.returncode}"
        raise CompressionError(f"{status}:\n{errors[-2000:]}")
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Child(seconds, cpu, peak, output)


def memory_of(process: int | str, field: str) -> int:
    """Return the bytes of one field of a process's memory status; 0 when it has gone."""
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def losses(folder: Path | str, text: str, sequences: int, length: int) -> Tensor:
    """Return a checkpoint's loss on so many sequences of a text, in nats per token: [sequences], float64."""
    from compressor.checkpoint.source import locate
    from compressor.data.batches import calibrate
    from compressor.data.sources import parse_sources
    from compressor.model.opened import open_model
    from compressor.model.streaming import LayerVisitor, Pass
    from compressor.model.tokenizer import load_tokenizer

    model = open_model(locate(str(folder)), "auto", "cpu")
    tokenizer = load_tokenizer(model.source.folder)
    sizes = {"samples": sequences, "length": length, "seed": 0, "vocab": model.vocabulary}
    batches = calibrate(parse_sources([text]), tokenizer, **sizes).batches
    found = list[Tensor]()

    class Losses(LayerVisitor):
        @torch.no_grad()
        def on_batch_end(self, batch: int, output: Any) -> None:
            logits, tokens = output.logits[:, :-1].float(), batches[batch][:, 1:]
            loss = cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
            found.append(loss.mean(1).double())

    Pass(model, batches, to_end=True).run(Losses())
    return torch.cat(found)


def with_error(values: Tensor) -> str:
    """Return the mean of paired differences, and 1.96 standard errors of it."""
    error = 1.96 * float(values.std()) / math.sqrt(len(values))
    return f"{values.mean():.4f} ± {error:.4f}"


class Rows:
    """Prints a Markdown table line by line; numbers have two decimals."""

    def __init__(self, *columns: str) -> None:
        print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)

    def add(self, *cells: Any) -> None:
        shown = (f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)
        print(f"| {' | '.join(shown)} |", flush=True)


def run(main: Callable[[], None]) -> None:
    """Run a benchmark; a `CompressionError` becomes its last words."""
    try:
        main()
    except CompressionError as error:
        sys.exit(str(error))
