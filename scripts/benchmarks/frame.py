"""What the benchmarks share: options, synthetic models, what a call or a process takes, and tables of ratios."""

import argparse
import json
import math
import os
import resource
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

BARE = [sys.executable, "-c", "import torch, transformers, transformers.modeling_utils"]
COMMAND = [sys.executable, "-m", "compressor"]


def options(text: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with these options; a list takes several values, False is a flag, None is a string left out."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="+", type=type(default[0]), default=default)
        else:
            parser.add_argument(
                flag, type=str if default is None else type(default), default=default
            )
    return parser


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        "<|end|>": 0,
        **{character: number for number, character in enumerate(alphabet, start=1)},
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def qwen3_moe(
    hidden: int, inner: int, layers: int, experts: int, top_k: int, vocabulary: int, **more: Any
) -> Any:
    """A config of Qwen3-MoE whose attention is small beside its experts."""
    from transformers import Qwen3MoeConfig

    sizes = {"hidden_size": hidden, "intermediate_size": 2 * inner, "moe_intermediate_size": inner}
    counts = {"num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": top_k}
    attention = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": False,
    }
    whole = {
        **sizes,
        **counts,
        **attention,
        "vocab_size": vocabulary,
        "architectures": ["Qwen3MoeForCausalLM"],
    }
    return Qwen3MoeConfig(**whole | more)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a checkpoint that is written layer by layer; the default has layers of about 0.25 GB in bfloat16."""

    hidden: int = 2048
    inner: int = 1024
    experts: int = 20
    top_k: int = 4
    vocabulary: int = 32_000

    def config(self, layers: int) -> Any:
        """Of a model of so many layers."""
        more = {"num_attention_heads": 16, "num_key_value_heads": 4, "dtype": "bfloat16"}
        return qwen3_moe(
            self.hidden, self.inner, layers, self.experts, self.top_k, self.vocabulary, **more
        )

    def write(self, folder: Path, gigabytes: float) -> int:
        """Write a checkpoint of at least this size with a tokenizer, unless there is one; returns its layers."""
        layers = int(gigabytes * 1e9 / (self.experts * 3 * self.hidden * self.inner * 2)) + 1
        if not (folder / "config.json").is_file():
            write_layers(folder, self.config, layers)
        return layers


def write_layers(folder: Path, config: Callable[[int], Any], layers: int) -> None:
    """Write a Qwen3-MoE checkpoint of random bfloat16 weights, a file for each layer; `config` takes a layer count.

    All layers hold the weights of one, rolled by their number, so no more than two of them are in memory.
    """
    from safetensors.torch import save_file
    from transformers import Qwen3MoeForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    folder.mkdir(parents=True, exist_ok=True)
    config(layers).save_pretrained(folder)
    save_tokenizer(folder)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config(1))
    generator = torch.Generator().manual_seed(0)
    state = {
        name: (
            torch.ones(value.shape)
            if "norm" in name
            else torch.randn(value.shape, generator=generator) * 0.02
        ).bfloat16()
        for name, value in model.state_dict().items()
    }
    stored = {
        name: tensor.clone() for name, tensor in revert_weight_conversion(model, state).items()
    }
    inside = {name: tensor for name, tensor in stored.items() if name.startswith("model.layers.0.")}
    weight_map: dict[str, str] = {}
    for layer in range(layers):
        part = {
            name.replace(".0.", f".{layer}.", 1): tensor.roll(layer)
            for name, tensor in inside.items()
        }
        part |= (
            {name: tensor for name, tensor in stored.items() if name not in inside}
            if layer == 0
            else {}
        )
        file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def warm(folder: Path) -> None:
    """Read every file once, so that all timings find the same page cache."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            while stream.read(2**26):
                pass


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds a call takes, and its result."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


@dataclass(frozen=True, slots=True)
class Child:
    """What a process took, its children's included where the system counts so."""

    status: int
    seconds: float
    cpu: float  # seconds of all threads
    anonymous: int  # bytes at the highest
    mapped: int  # bytes of mapped files' pages at the highest
    output: str
    errors: str


def run_child(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
    """Run a command to its end, watched; it ends with this process, and what a failing one printed goes to stderr."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env={**os.environ, **(environment or {})}, **streams)
    peak = {"RssAnon": 0, "RssFile": 0}
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.01):
            for field in peak:
                peak[field] = max(peak[field], memory_of(process.pid, field))

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
        sys.stderr.write(errors)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Child(process.returncode, seconds, cpu, peak["RssAnon"], peak["RssFile"], output, errors)


def memory_of(process: int, field: str) -> int:
    """Bytes of one field of a process's memory status; 0 when it has gone."""
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def losses(folder: Path | str, text: str, sequences: int, length: int) -> Tensor:
    """Of a checkpoint on so many sequences of a text, in nats per token: [sequences], float64."""
    from compressor.checkpoint.source import locate
    from compressor.data.batches import calibrate
    from compressor.data.sources import parse_sources
    from compressor.model.opened import open_model
    from compressor.model.streaming import LayerVisitor, Pass
    from compressor.model.tokenizer import load_tokenizer

    model = open_model(locate(str(folder)), "auto", "cpu")
    read = parse_sources([text])
    tokenizer, vocabulary = load_tokenizer(model.source.folder), model.vocabulary
    batches = calibrate(
        read, tokenizer, samples=sequences, length=length, seed=0, vocab=vocabulary
    ).batches
    found = list[Tensor]()

    class Losses(LayerVisitor):
        @torch.no_grad()
        def on_batch_end(self, batch: int, output: Any) -> None:
            logits, tokens = output.logits[:, :-1].float(), batches[batch][:, 1:]
            found.append(
                cross_entropy(logits.transpose(1, 2), tokens, reduction="none").mean(1).double()
            )

    Pass(model, batches, to_end=True).run(Losses())
    return torch.cat(found)


def with_error(values: Tensor, form: str = ".4f") -> str:
    """Mean of paired differences, and 1.96 standard errors of it."""
    return f"{values.mean():{form}} ± {1.96 * float(values.std()) / math.sqrt(len(values)):{form.lstrip('+')}}"


def row(*cells: Any) -> None:
    """Print a line of a Markdown table at once; numbers with two decimals."""
    shown = (f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)
    print(f"| {' | '.join(shown)} |", flush=True)


def head(*columns: str) -> None:
    """Print the head of a Markdown table."""
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
