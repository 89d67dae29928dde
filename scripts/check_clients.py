"""Run real clients on outputs of ours, and compare what they answer with stock transformers.

    python -m scripts.check_clients [FOLDER ...] [--only plain|quantised|served] [--llama-cpp CHECKOUT]
        [--python PYTHON] [--vllm-python PYTHON]

Tiny models of two families and each FOLDER are taken as they are, compressed, split, compressed after the split, and
compressed by constants (for vLLM alone). llama.cpp's converter of a checkout writes them as float32 GGUF, whose expert
tensors and routers are compared with the checkpoint's; llama-cpp-python and vLLM then answer random tokens. The table
has the largest difference of log probabilities to transformers in float32 and the share of positions with the same
argmax token. The tiny models are also quantised in every scheme, and compared with the dequantised weights; vLLM runs
them in bfloat16, if it has kernels for them on this CPU, and in float32 with its own loader and the loaded experts
dequantised. A client that is missing is left out, and a sentence says so.

Served, the compressed models answer as the gate asks servers: vLLM's with the checkpoint, llama-cpp-python's with a
GGUF of it. The table then has the largest difference of a text's log-likelihood, in nats, to the model in memory, and
how many prompts both continue with the same text.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import compressor
from compressor.answers.options import GenerationOptions
from compressor.answers.prompts import Prompt
from compressor.answers.server import Server, ServerModel, open_server
from compressor.answers.stock import StockModel
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.architecture import experts_modules
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Silent
from scripts.benchmarks import frame
from tests.support import small, zoo
from tests.support.quantized import plain_model

RUNNER = Path(__file__).with_name("run_client.py")
FAMILIES = ("mixtral", "qwen3_moe")
SCHEMES = ("fp8", "int8", "int4", "int3", "int2", "mxfp4", "nvfp4")
WIDE = 256  # hidden and expert width of models to quantise: that of the smallest kernels, split or not
SEQUENCES, LENGTH = 2, 24
HEAD = 64  # the width of an attention head, one that vLLM has a kernel for
STARTING = 180  # seconds that a server has to start
POSITIONS = 512  # tokens of a text with its answer
TEXTS = [f"Document {n}: the quick brown fox jumps over {n * 37} lazy dogs." for n in range(6)]
CUT = "\ufffd"  # a character that is cut off at the end of a text
OFFLINE = {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}  # fmt: skip
Values = dict[int, torch.Tensor]  # a constant [H] by expert
Row = tuple[str, ...]
COLUMNS = ("checkpoint", "client", "largest difference", "same argmax token", "tensors alike")


@dataclass(frozen=True, slots=True)
class Client:
    """A real client: the Python that has it, and its version."""

    python: str
    version: str


def call(python: str, *arguments: object) -> str:
    """The last line that the runner prints; a RuntimeError with the client's last words if it fails."""
    command = [python, str(RUNNER), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | OFFLINE, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        raise RuntimeError(lines[-1].strip())
    return done.stdout.splitlines()[-1]


def find(name: str, python: str, checkout: str = "") -> Client | None:
    """A client, or None and a sentence on why it is left out."""
    try:
        return Client(python, call(python, "version", name, checkout))
    except (RuntimeError, OSError) as error:
        print(f"{name} is left out: {error}")
        return None


def tiny(folder: Path, family: str, dtype: torch.dtype = torch.float32, **sizes: int) -> Path:
    """A tiny model of a family with a byte-level tokenizer; llama.cpp wants merges in it, so there is one."""
    model = zoo.build(family, vocab_size=small.VOCABULARY + 1, head_dim=HEAD, **sizes)
    model.to(dtype).save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)

    def add_merge(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["vocab"]["th"] = small.VOCABULARY
        tokenizer["model"]["merges"] = [["t", "h"]]

    small.edit_json(folder / "tokenizer.json", add_merge)
    return folder


@dataclass(frozen=True)
class Case:
    """A checkpoint; one with constants, which transformers can't load, has a source."""

    label: str
    folder: Path
    source: Path | None = None
    quantised: bool = False

    @cached_property
    def place(self) -> Path:
        """Return a new folder beside the checkpoint for tokens, what is expected and what clients answer."""
        place = self.folder.with_name(f"{self.folder.name}-files")
        place.mkdir()
        return place


def cases(source: Path, place: Path) -> Iterator[Case]:
    """Yield a model and what we make of it."""
    experts, name = compressor.inspect(str(source)).experts, source.name
    kept = max(2, experts * 3 // 4)
    base = place / f"{name}-source"
    base.symlink_to(source)
    cut, parts, both, out = (place / f"{name}-{kind}" for kind in ("cut", "split", "both", "const"))
    yield Case(f"{name}, {experts} experts", base)
    compressor.compress(str(source), cut, experts=kept, strategy="model-centric")
    yield Case(f"{name} compressed, {kept}", cut)
    compressor.compress(str(source), parts, [compressor.Prune(ratio=0, split=2)])
    yield Case(f"{name} split by 2, {2 * experts}", parts)
    compressor.compress(str(parts), both, experts=2 * kept, strategy="model-centric")
    yield Case(f"{name} split and compressed, {2 * kept}", both)
    reading = {"calibration": str(small.text_file(place)), "samples": 16, "sequence_length": 64}
    compressor.compress(str(source), out, constants=True, experts=kept, **reading)
    yield Case(f"{name} with constants, {kept}", out, source)


def quantised_cases(family: str, place: Path) -> Iterator[Case]:
    """Yield a wide tiny model, compressed or split, in every scheme."""
    width = "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
    wide, sizes = place / f"{family}-wide", {"hidden_size": WIDE, width: WIDE}
    yield Case(f"{family} in bfloat16", tiny(wide, family, torch.bfloat16, **sizes))
    compressed = compressor.Prune(experts=6, strategy="model-centric")
    changes = {"compressed": compressed, "split": compressor.Prune(ratio=0, split=2)}
    for scheme, (change, step) in product(SCHEMES, changes.items()):
        folder = place / f"{family}-{change}-{scheme}"
        compressor.compress(str(wide), folder, [step, compressor.Quantize(scheme=scheme)])
        yield Case(f"{family} {change}, {scheme}", folder, quantised=True)


def expect(case: Case) -> None:
    """Leave in files: tokens, log probabilities [B, L, V] of stock transformers in float32, what a GGUF must hold."""
    if case.quantised:
        model = plain_model(case.folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(case.source or case.folder, dtype=torch.float32).eval()
    if case.source is not None:
        put_constants(model, case.folder)
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, model.config.vocab_size, (SEQUENCES, LENGTH), generator=drawn)
    with torch.no_grad():
        expected = torch.log_softmax(model(tokens).logits.double(), -1)
    np.save(case.place / "tokens.npy", tokens.numpy())
    np.save(case.place / "expected.npy", expected.numpy())
    np.savez(case.place / "expected.npz", **{name: value.numpy() for name, value in gguf_tensors(model)})


@torch.no_grad()
def put_constants(model: torch.nn.Module, folder: Path) -> None:
    """Let the constants of a folder stand for experts: their outputs become zero, and a hook adds the constants."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = small.tensors_of(folder)
    for layer, (_, experts) in enumerate(experts_modules(model)):  # all layers are MoE layers
        gone = config["approximate_experts"].get(str(layer), [])
        experts.down_proj[gone] = 0
        values = {}
        for name, value in stored.items():
            expert = re.search(rf"layers\.{layer}\..*experts\.(\d+)\.approx_value", name)
            if expert:
                values[int(expert[1])] = value.float()

        def add(_: object, args: tuple[Any, ...], output: torch.Tensor, values: Values = values) -> torch.Tensor:
            _, index, weights = args
            for expert, value in values.items():
                output = output + ((index == expert) * weights).sum(-1)[:, None] * value
            return output

        experts.register_forward_hook(add)


def gguf_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and contents that llama.cpp gives experts and routers of a model whose layers all are MoE layers."""
    for layer, (name, experts) in enumerate(experts_modules(model)):
        gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)
        block = model.get_submodule(name.rpartition(".")[0])
        routers = (child for child in block.children() if child is not experts)
        router = next(child for child in routers if hasattr(child, "weight"))
        yield f"blk.{layer}.ffn_gate_exps.weight", gate
        yield f"blk.{layer}.ffn_up_exps.weight", up
        yield f"blk.{layer}.ffn_down_exps.weight", experts.down_proj.detach()
        yield f"blk.{layer}.ffn_gate_inp.weight", router.weight.detach()


def compared(case: Case, name: str) -> tuple[str, str]:
    """Return the largest difference of log probabilities, and the share of positions with the same argmax token."""
    file = case.place / f"{name}.npy"
    if not file.exists():
        reason = file.with_suffix(".npy.txt").read_text(encoding="utf-8")
        return f"failed: {reason.splitlines()[0]}", "-"
    found, expected = np.load(file), np.load(case.place / "expected.npy")
    same = (found.argmax(-1) == expected.argmax(-1)).mean()
    return f"{abs(found - expected).max():.1e}", f"{same:.0%}"


def with_llama(case: Case, converter: Client, checkout: str, client: Client | None) -> Row:
    """Convert, compare the tensors, and where llama-cpp-python is there let it answer."""
    gguf, shown = case.place / "model.gguf", f"llama.cpp's converter of {converter.version}"
    try:
        call(converter.python, "convert", checkout, case.folder, gguf)
        alike = call(converter.python, "tensors", checkout, gguf, case.place / "expected.npz")
        if client is None:
            return case.label, shown, "-", "-", alike
        shown = f"llama-cpp-python {client.version}"
        call(client.python, "llama", gguf, case.place / "tokens.npy", case.place / "llama.npy")
        return case.label, shown, *compared(case, "llama"), alike
    except RuntimeError as error:
        return case.label, shown, f"failed: {error}", "-", "-"
    finally:
        gguf.unlink(missing_ok=True)


def with_vllm(every: list[Case], client: Client, does: str = "vllm", dtype: str = "float32") -> Iterator[Row]:
    """All checkpoints in one process, which takes most of its time to start."""
    if not every:
        return
    files = [(case.folder, case.place / "tokens.npy", case.place / f"{does}.npy") for case in every]
    call(client.python, does, dtype, *(file for row in files for file in row))
    shown = f"vLLM {client.version}" if does == "vllm" else f"loader of vLLM {client.version}"
    for case in every:
        yield case.label, f"{shown}, {dtype}", *compared(case, does), "-"


@contextmanager
def serving(python: str, *arguments: object) -> Iterator[Server]:
    """The server that a module starts, once it is there; it ends with the block."""
    port = frame.free_port()
    command = [python, "-m", *map(str, arguments), "--host", "127.0.0.1", "--port", str(port)]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, env=os.environ | OFFLINE, stdout=log, stderr=log) as process,
    ):
        try:
            for _ in range(STARTING):
                with suppress(CompressionError):
                    yield open_server(f"http://127.0.0.1:{port}")
                    return
                if process.poll() is not None:
                    break
                time.sleep(1)
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(lines[-1] if lines else f"it ended with status {process.poll()}")
        finally:
            process.terminate()


def with_server(case: Case, shown: str, python: str, *arguments: object) -> Row:
    """Return how a server's answers differ from those of the checkpoint in memory."""
    source = locate(str(case.folder))
    tokens = [load_tokenizer(source.folder)(text).input_ids for text in TEXTS]

    def scores(model: StockModel | ServerModel) -> Any:
        with model.loaded():
            likelihoods = dict(model.score([(line[:20], line[20:]) for line in tokens], "texts", Silent()))
        return np.array([likelihoods[number][0] for number in range(len(tokens))])

    def texts(model: StockModel | ServerModel) -> list[str]:
        requests = [(Prompt.of(text), 0) for text in TEXTS]
        answers = dict(model.complete(requests, GenerationOptions(max_new_tokens=LENGTH), Silent()))
        return [answers[number].text.rstrip(CUT) for number in range(len(TEXTS))]

    try:
        with serving(python, *arguments) as server:
            server = server.checked(source.folder, source.label)
            ours, theirs = StockModel(source, dtype="float32", rows=4), ServerModel(server, source)
            apart = f"{abs(scores(ours) - scores(theirs)).max():.1e}" if server.scored else "-"
            same = sum(our == their for our, their in zip(texts(ours), texts(theirs), strict=True))
    except (RuntimeError, CompressionError) as error:
        return case.label, shown, f"failed: {error}", "-", "-"
    return case.label, f"{shown}, prompts as {server.scored}", apart, f"{same} of {len(TEXTS)}", "-"


def served_rows(source: Path, place: Path, given: Any, vllm: Client | None, llama: Client | None) -> Iterator[Row]:
    """Yield a row for a model with half of its experts behind each server."""
    kept = max(2, compressor.inspect(str(source)).experts // 2)
    case = Case(f"{source.name} compressed, {kept}", place / f"{source.name}-served")
    compressor.compress(str(source), case.folder, experts=kept, strategy="model-centric")
    if vllm is not None:
        flags = f"--dtype float32 --enforce-eager --max-model-len {POSITIONS} --max-num-seqs 8"
        command = ["vllm.entrypoints.openai.api_server", "--model", case.folder, *flags.split()]
        yield with_server(case, f"server of vLLM {vllm.version}", vllm.python, *command)
    if llama is not None and given.llama_cpp:
        gguf = case.place / "model.gguf"
        call(given.python, "convert", given.llama_cpp, case.folder, gguf)
        flags = f"--n_ctx {POSITIONS} --n_threads 1 --type_k 0 --type_v 0"  # a float32 cache
        command = ["llama_cpp.server", "--model", gguf, *flags.split()]
        yield with_server(case, f"server of llama-cpp-python {llama.version}", llama.python, *command)


def rows(given: Any, place: Path) -> Iterator[Row]:
    """Make the checkpoints and run the clients; yields a row for each pair."""
    llama, vllm = find("llama", given.python), find("vllm", given.vllm_python)
    converter = find("converter", given.python, given.llama_cpp) if given.llama_cpp else None
    if converter is None:
        print("llama.cpp is left out: name a checkout of it with --llama-cpp, for its converter")
    print(frame.table(COLUMNS), flush=True)
    sources = [tiny(place / name, name, max_position_embeddings=POSITIONS) for name in FAMILIES]
    sources += [folder.resolve() for folder in given.folders]
    plain, wide = list[Case](), list[Case]()
    for source in sources:
        if given.only in (None, "served"):
            yield from served_rows(source, place, given, vllm, llama)
        if given.only in (None, "plain"):
            plain += cases(source, place)
    if given.only in (None, "quantised"):
        for family in FAMILIES:
            wide += quantised_cases(family, place)
    for case in (*plain, *wide):
        expect(case)
        if converter is not None and case.source is None:
            yield with_llama(case, converter, given.llama_cpp, llama)
    if vllm is not None:
        yield from with_vllm(plain, vllm)
        yield from with_vllm(wide, vllm, "vllm", "bfloat16")
        yield from with_vllm(wide, vllm, "vllm-loader")


def main() -> None:
    """Print the table as Markdown."""
    parser = frame.options(__doc__, llama_cpp=None, python=sys.executable, vllm_python=sys.executable)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="further models")
    parser.add_argument("--only", choices=("plain", "quantised", "served"))
    with tempfile.TemporaryDirectory() as scratch:
        for row in rows(parser.parse_args(), Path(scratch)):
            print(frame.row(*row), flush=True)


if __name__ == "__main__":
    main()
