"""Run real clients on outputs of ours, and compare what they answer with stock transformers.

    python -m scripts.check_clients [FOLDER ...] [--only plain|quantised|served] [--llama-cpp CHECKOUT]
        [--python PYTHON] [--vllm-python PYTHON]

Tiny models of two families are made, and each FOLDER is taken as it is; each is compressed, split, compressed after
the split, and compressed by constants (`--format mone`, for vLLM alone). llama.cpp's converter of a checkout writes
each of them as float32 GGUF, whose expert tensors and routers are compared with the checkpoint's; llama-cpp-python and
vLLM then answer random tokens. The table has the largest difference of log probabilities to transformers in float32 and
the share of positions whose likeliest token is the same. A client that is missing is left out, and a sentence says so.

The tiny models, compressed or split, are also quantised in every scheme, and compared with stock transformers on the
dequantised weights in float32. vLLM runs them twice: in bfloat16 as they are, if it has kernels for them on this CPU,
and in float32 with its own loader and the loaded experts dequantised, which needs no such kernel.

Served, the compressed models answer as the gate asks servers: vLLM's with the checkpoint, llama-cpp-python's with a
GGUF of it. The table then has the largest difference of a text's log-likelihood, in nats, to the model in memory, and
how many prompts both continue with the same text.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import compressor
from compressor.answers.lm_eval_run import plan_evaluation
from compressor.answers.options import GenerationOptions
from compressor.answers.prompts import Prompt
from compressor.answers.server import Server, ServerModel, open_server
from compressor.answers.stock import StockModel
from compressor.answers.tasks import EvaluationOptions, resolve_tasks
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.architecture import experts_modules
from compressor.progress import Silent
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
TASK = """
task: texts
dataset_path: json
dataset_kwargs:
  data_files:
    test: {place}/texts.jsonl
  cache_dir: {place}/cache
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{text[:20]}}}}"
doc_to_target: "{{{{text[20:]}}}}"
target_delimiter: ""
metric_list:
  - metric: perplexity
    aggregation: perplexity
"""
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **QUIET}
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


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint, and the folder that keeps what belongs to it: tokens, what is expected, what clients answer."""

    label: str
    folder: Path
    place: Path
    source: Path | None = None  # of one with constants, which transformers cannot load
    quantised: bool = False


def case_of(label: str, folder: Path, **more: Any) -> Case:
    """Return a case with a new folder beside the checkpoint for what belongs to it."""
    place = folder.with_name(f"{folder.name}-files")
    place.mkdir()
    return Case(label, folder, place, **more)


def cases(source: Path, place: Path) -> Iterator[Case]:
    """Yield a model and what we make of it."""
    experts, name = compressor.inspect(str(source)).experts, source.name
    kept = max(2, experts * 3 // 4)
    base = place / f"{name}-source"
    base.symlink_to(source)
    cut, parts, both, out = (place / f"{name}-{kind}" for kind in ("cut", "split", "both", "const"))
    yield case_of(f"{name}, {experts} experts", base)
    compressor.compress(str(source), cut, experts=kept, strategy="model-centric")
    yield case_of(f"{name} compressed, {kept}", cut)
    compressor.compress(str(source), parts, [compressor.Prune(ratio=0, split=2)])
    yield case_of(f"{name} split by 2, {2 * experts}", parts)
    compressor.compress(str(parts), both, experts=2 * kept, strategy="model-centric")
    yield case_of(f"{name} split and compressed, {2 * kept}", both)
    reading = {"calibration": str(small.text_file(place)), "samples": 16, "sequence_length": 64}
    compressor.compress(str(source), out, constants=True, experts=kept, **reading)
    yield case_of(f"{name} with constants, {kept}", out, source=source)


def served_case(source: Path, place: Path) -> Case:
    """Return a model with half of its experts."""
    kept, out = (
        max(2, compressor.inspect(str(source)).experts // 2),
        place / f"{source.name}-served",
    )
    compressor.compress(str(source), out, experts=kept, strategy="model-centric")
    return case_of(f"{source.name} compressed, {kept}", out)


def quantised_cases(family: str, place: Path) -> Iterator[Case]:
    """Yield a wide tiny model, compressed or split, in every scheme."""
    width = "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
    wide, sizes = place / f"{family}-wide", {"hidden_size": WIDE, width: WIDE}
    yield case_of(f"{family} in bfloat16", tiny(wide, family, torch.bfloat16, **sizes))
    changes = {
        "compressed": compressor.Prune(experts=6, strategy="model-centric"),
        "split": compressor.Prune(ratio=0, split=2),
    }
    for scheme, (change, step) in product(SCHEMES, changes.items()):
        folder = place / f"{family}-{change}-{scheme}"
        compressor.compress(str(wide), folder, [step, compressor.Quantize(scheme=scheme)])
        yield case_of(f"{family} {change}, {scheme}", folder, quantised=True)


def expect(case: Case) -> None:
    """Leave in files: tokens, log probabilities [B, L, V] of stock transformers in float32, what a GGUF must hold."""
    if case.quantised:
        model = plain_model(case.folder)
    else:
        folder = case.source or case.folder
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if case.source is not None:
        put_constants(model, case.folder)
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, model.config.vocab_size, (SEQUENCES, LENGTH), generator=drawn)
    with torch.no_grad():
        expected = torch.log_softmax(model(tokens).logits.double(), -1)
    np.save(case.place / "tokens.npy", tokens.numpy())
    np.save(case.place / "expected.npy", expected.numpy())
    tensors: dict[str, Any] = {name: value.numpy() for name, value in gguf_tensors(model)}
    np.savez(case.place / "expected.npz", **tensors)


@torch.no_grad()
def put_constants(model: torch.nn.Module, folder: Path) -> None:
    """Let the constants of a folder stand for experts: their outputs become zero, and a hook adds the constants."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = dict[str, torch.Tensor]()
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    for layer, (_, experts) in enumerate(experts_modules(model)):  # all layers are MoE layers
        gone = config["approximate_experts"].get(str(layer), [])
        experts.down_proj[gone] = 0  # type: ignore[index, operator]
        values = {}
        for name, value in stored.items():
            if found := re.search(rf"layers\.{layer}\..*experts\.(\d+)\.approx_value", name):
                values[int(found[1])] = value.float()

        def add(_: object, args: tuple[Any, ...], output: torch.Tensor, values: Values = values) -> torch.Tensor:
            _, index, weights = args
            for expert, value in values.items():
                output = output + ((index == expert) * weights).sum(-1)[:, None] * value
            return output

        experts.register_forward_hook(add)


def gguf_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and contents that llama.cpp gives experts and routers of a model whose layers all are MoE layers."""
    for layer, (name, experts) in enumerate(experts_modules(model)):
        gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)  # type: ignore[operator, union-attr]
        block = model.get_submodule(name.rpartition(".")[0])
        routers = (child for child in block.children() if child is not experts)
        router: Any = next(child for child in routers if hasattr(child, "weight"))
        yield f"blk.{layer}.ffn_gate_exps.weight", gate
        yield f"blk.{layer}.ffn_up_exps.weight", up
        yield f"blk.{layer}.ffn_down_exps.weight", experts.down_proj.detach()  # type: ignore[operator, union-attr]
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
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
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
    place = case.place
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (place / "texts.jsonl").write_text("".join(lines))
    (place / "texts.yaml").write_text(TASK.format(place=place))
    options = EvaluationOptions(tasks=("texts",), include_path=place, dtype="float32", batch_size=4)
    source, tasks = locate(str(case.folder)), resolve_tasks(options)
    asked = [(Prompt.of(text), 0) for text in TEXTS]
    writing, apart = GenerationOptions(max_new_tokens=LENGTH), "-"

    def scores(server: Server | None) -> Any:
        plan = plan_evaluation(source, tasks, options, place / "cache", server)
        return np.array(plan.run(Silent())["texts"].values)

    def texts(writer: StockModel | ServerModel) -> dict[Any, str]:
        answers = writer.complete(asked, writing, Silent())
        return {answer.prompt: answer.text.rstrip(CUT) for _, answer in answers}

    try:
        with serving(python, *arguments) as found:
            server = found.checked(source.folder, source.label)
            if server.scored:
                apart = f"{abs(scores(None) - scores(server)).max():.1e}"
            ours = texts(StockModel(source, dtype="float32"))
            theirs = texts(ServerModel(server, source))
    except (RuntimeError, CompressionError) as error:
        return case.label, shown, f"failed: {error}", "-", "-"
    alike = f"{sum(ours[key] == theirs[key] for key in ours)} of {len(ours)}"
    return case.label, f"{shown}, prompts as {server.scored}", apart, alike, "-"


def served_rows(every: list[Case], given: Any, vllm: Client | None, llama: Client | None) -> Iterator[Row]:
    """Yield a row for each checkpoint behind each server."""
    for case in every:
        if vllm is not None:
            flags = f"--dtype float32 --enforce-eager --max-model-len {POSITIONS} --max-num-seqs 8"
            command = ["vllm.entrypoints.openai.api_server", "--model", case.folder, *flags.split()]
            yield with_server(case, f"server of vLLM {vllm.version}", vllm.python, *command)
        if llama is not None and given.llama_cpp:
            gguf = case.place / "model.gguf"
            call(given.python, "convert", given.llama_cpp, case.folder, gguf)
            flags = f"--n_ctx {POSITIONS} --n_threads 1 --type_k 0 --type_v 0"  # a float32 cache
            command = ["llama_cpp.server", "--model", gguf, *flags.split()]
            shown = f"server of llama-cpp-python {llama.version}"
            yield with_server(case, shown, llama.python, *command)


def main() -> None:
    """Make the checkpoints, run the clients, print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="further models")
    parser.add_argument("--only", choices=("plain", "quantised", "served"))
    parser.add_argument("--llama-cpp", default="", help="a folder with convert_hf_to_gguf.py")
    parser.add_argument("--python", default=sys.executable, help="has torch, llama_cpp")
    parser.add_argument("--vllm-python", default=sys.executable, help="has vllm")
    given = parser.parse_args()
    llama, vllm = find("llama", given.python), find("vllm", given.vllm_python)
    converter = find("converter", given.python, given.llama_cpp) if given.llama_cpp else None
    if not given.llama_cpp:
        print("llama.cpp is left out: name a checkout of it with --llama-cpp, for its converter")

    def print_row(row: Row) -> None:
        print(f"| {' | '.join(row)} |", flush=True)

    print_row(COLUMNS)
    print(f"|{'---|' * len(COLUMNS)}")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        sources = [tiny(place / name, name, max_position_embeddings=POSITIONS) for name in FAMILIES]
        sources += [folder.resolve() for folder in given.folders]
        plain, wide = list[Case](), list[Case]()
        if given.only in (None, "served"):
            smaller = [served_case(source, place) for source in sources]
            for row in served_rows(smaller, given, vllm, llama):
                print_row(row)
        if given.only in (None, "plain"):
            for source in sources:
                plain += cases(source, place)
        if given.only in (None, "quantised"):
            for family in FAMILIES:
                wide += quantised_cases(family, place)
        for case in (*plain, *wide):
            expect(case)
            if converter is not None and case.source is None:
                print_row(with_llama(case, converter, given.llama_cpp, llama))
        if vllm is not None:
            rows = [*with_vllm(plain, vllm), *with_vllm(wide, vllm, "vllm", "bfloat16")]
            for row in (*rows, *with_vllm(wide, vllm, "vllm-loader")):
                print_row(row)


if __name__ == "__main__":
    main()
