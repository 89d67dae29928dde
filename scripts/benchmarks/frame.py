"""What the benchmarks share: options, synthetic models, what a process takes, losses, and tables in Markdown."""

import argparse
import json
import os
import random
import re
import resource
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError

BARE = [sys.executable, "-c", "import torch, transformers, transformers.modeling_utils"]
COMMAND = [sys.executable, "-m", "compressor"]
COLUMNS = 118  # of a command in a page


def options(text: str | None, /, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with these options; a list takes several values, False is a flag, None is a string left out."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="+", type=type(default[0]), default=default)
        else:
            parser.add_argument(flag, type=str if default is None else type(default), default=default)
    return parser


def write_layers(folder: Path, layers: int, **config: Any) -> None:
    """Write a Qwen3-MoE checkpoint of a tokenizer of bytes and random bfloat16 weights: those of a layer, rolled."""
    from safetensors.torch import save_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    from tests.support import small

    config |= {"dtype": "bfloat16", "architectures": ["Qwen3MoeForCausalLM"]}
    Qwen3MoeConfig(**config, num_hidden_layers=layers).save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**config, num_hidden_layers=1))
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
    words = ["".join(draw.choices(ascii_lowercase, k=draw.randint(2, 9))) for _ in range(tokens // 5)]
    return "\n\n".join(" ".join(words[begin : begin + 100]) for begin in range(0, len(words), 100))


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@dataclass(frozen=True, slots=True)
class Child:
    """What a process took, its children's included where the system counts so."""

    seconds: float
    cpu: float  # seconds of all threads
    anonymous: int  # bytes at the highest
    output: str


def run_child(
    command: Sequence[str], environment: Mapping[str, str] | None = None, statuses: Sequence[int] = (0,)
) -> Child:
    """Run a command to its end, watched; raises `CompressionError` with the end of what it printed if it ends with
    another status than these."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    peak = 0

    def sample() -> None:
        nonlocal peak
        while process.returncode is None:
            peak = max(peak, memory_of(process.pid, "RssAnon"))
            time.sleep(0.01)

    with subprocess.Popen(command, env={**os.environ, **(environment or {})}, **streams) as process:
        threading.Thread(target=sample, daemon=True).start()
        output, errors = process.communicate()
    if process.returncode not in statuses:
        status = f"{shlex.join(command)} ended with status {process.returncode}"
        raise CompressionError(f"{status}:\n{errors[-2000:]}")
    seconds = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Child(seconds, cpu, peak, output)


def memory_of(process: int | str, field: str) -> int:
    """Return the bytes of one field of a process's memory status; 0 when it has gone."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    _, _, rest = status.partition(f"\n{field}:")
    return int(rest.split()[0]) * 1024 if rest else 0


def losses(folder: Path | str, text: str, sequences: int, length: int) -> Tensor:
    """Return a checkpoint's loss on so many sequences of a text, in nats per token: [sequences]."""
    from compressor.checkpoint.source import locate
    from compressor.data.batches import calibrate
    from compressor.data.sources import parse_sources
    from compressor.divergence.evaluator import Evaluator
    from compressor.model.opened import open_model
    from compressor.model.tokenizer import load_tokenizer

    model = open_model(locate(str(folder)), "auto", "cpu")
    tokenizer = load_tokenizer(model.source.folder)
    sizes = {"samples": sequences, "length": length, "seed": 0, "vocab": model.vocabulary}
    batches = calibrate(parse_sources([text]), tokenizer, **sizes).batches
    (figures,) = Evaluator.of(model, batches).measure(model)
    return figures.loss


def row(*cells: Any) -> str:
    """Return a line of a Markdown table; floats have two decimals."""
    shown = [f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells]
    return f"| {' | '.join(shown)} |"


def table(columns: Sequence[str], rows: Iterable[Iterable[Any]] = ()) -> str:
    """Return a Markdown table."""
    lines = [row(*columns), "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(row(*cells) for cells in rows)])


def wrapped(command: str) -> str:
    """Return a command in lines of the page, broken between options."""
    lines, line = list[str](), ""
    for part in re.split(r" (?=--)", command):
        if line and len(line) + len(part) + 3 > COLUMNS:
            lines.append(f"{line} \\")
            line = f"    {part}"
        else:
            line = f"{line} {part}" if line else part
    return "\n".join([*lines, line])


def run(main: Callable[[], None]) -> None:
    """Run a benchmark; a `CompressionError` becomes its last words."""
    try:
        main()
    except CompressionError as error:
        sys.exit(str(error))
