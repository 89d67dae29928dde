"""Whether a model anywhere computes what its golden answers say: a folder, an ONNX export, or a
server."""

import json
import re
from dataclasses import replace
from pathlib import Path

from compressor.answers.onnx import onnx_decoder
from compressor.answers.options import ServerOptions
from compressor.answers.server import open_server
from compressor.checkpoint.reader import Size
from compressor.checkpoint.source import ModelSource, locate
from compressor.entry_points import kind_of_file
from compressor.errors import CompressionError, reason_of
from compressor.extras import require
from compressor.files import GOLDEN, GRAPH, json_object
from compressor.golden.answers import GoldenAnswers, Top, read_golden
from compressor.golden.causes import find_cause
from compressor.golden.compare import Answered, Verdict, compare, widest_band
from compressor.golden.measure import ask_model, open_exactly, parameters_of, top_of
from compressor.golden.prompts import other_tokens
from compressor.golden.served import ask_server
from compressor.model.inspection import stock_fault
from compressor.progress import SILENT, Progress

EXPORT = "onnx_export.json"
BITS = re.compile(r'"(?:num_)?bits": (\d+)')  # of a quantised weight, in a config
WIDEST = {"16": "bfloat16", "8": "fp8", "4": "4-bit"}  # bands, by bits


def check(
    model: str,
    *,
    answers: str | Path | None = None,
    bits: str | None = None,
    servers: ServerOptions | None = None,
    revision: str | None = None,
    device: str = "auto",
    progress: Progress = SILENT,
) -> Verdict:
    """Return whether a folder, an ONNX export, a Hub id or a server computes the model of the
    golden answers.

    `answers` is their file or folder, by default beside the model; `bits` (16, 8 or 4) how much
    rounding passes. A GGUF file is asked through the server that `servers` names."""
    servers = servers or ServerOptions()
    path = Path(model)
    is_file = kind_of_file(model) is not None and not path.is_dir()
    is_graph = (path / GRAPH).is_file()
    if is_file and not path.is_file():
        raise CompressionError(f"{path} is no file; name a GGUF file, a folder or a Hub id")
    if is_file and servers.server is None:
        raise CompressionError(
            f"{path} is run by llama.cpp: start `llama-server -m {path}`, and add --server "
            "http://localhost:8080"
        )
    if is_graph and servers.server is None:
        require("onnxruntime")
    source = None
    places = [path, path.absolute().parent]
    if not is_file and not is_graph:
        # of a model that a server runs, the small files are enough
        source = (
            locate(model, revision, weights=False)
            if servers.server
            else locate(model, revision, progress)
        )
        places = [source.folder]
    if answers:
        places = [Path(answers)]
    files = [place / GOLDEN if place.is_dir() else place for place in places]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise CompressionError(
            f"{places[0]} has no {GOLDEN}; name one with --answers, or write one from the model "
            "itself with `moe-compress check --write MODEL`"
        )
    golden = read_golden(file)
    if servers.server is not None:
        server = open_server(servers.server, servers.served_model, servers.timeout)
        answered = ask_server(golden, server)
    elif source is None:
        answered = ask_onnx(golden, path, device)
    else:
        answered = ask_folder(golden, source, device, progress)
    if bits is not None:
        answered = replace(answered, widest=WIDEST[bits])
    verdict = compare(golden, answered)
    if answered.model is not None:
        verdict = replace(verdict, stock=stock_fault(answered.model))
    if verdict.verdict == "different" and verdict.cause is None:
        cause = find_cause(golden, file.parent, answered, verdict.allowed, device, progress)
        verdict = replace(verdict, cause=cause or "none of the known ones")
    return verdict


def ask_folder(
    golden: GoldenAnswers, source: ModelSource, device: str, progress: Progress
) -> Answered:
    """Return the answers of a checkpoint, by the stock forward; raises `CompressionError` for
    another vocabulary."""
    model = open_exactly(source, device)
    if model.vocabulary <= max(max(prompt.ids) for prompt in golden.prompts):
        raise CompressionError(
            f"{source.label} is another model: it knows {model.vocabulary} tokens, and the golden "
            f"answers are of one that knows {golden.vocabulary}; name its own with --answers"
        )
    quantization = model.checkpoint.quantization
    if quantization:
        named = [int(bits) for bits in BITS.findall(json.dumps(quantization, default=str))]
        bits = min(named, default=4 if "4" in str(quantization.get("quant_method")) else 8)
        widest = "fp8" if 7 < bits < 15 else widest_band(bits)
    else:
        size = Size.of(model.checkpoint.tensors.values()).bytes
        widest = widest_band(8 * size / parameters_of(model))
    (top,) = ask_model(model, golden.prompts, progress=progress)
    return Answered(source.label, top, widest, other_tokens(source.folder, golden), model=model)


def ask_onnx(golden: GoldenAnswers, folder: Path, device: str) -> Answered:
    """Return the answers of an ONNX export."""
    top = list[Top]()
    try:
        decoder = onnx_decoder(folder, device)
        for prompt in golden.prompts:
            running = decoder.fresh()
            begin = 0
            for position in prompt.positions:
                top += top_of(running(prompt.ids[begin : position + 1])[None])
                begin = position + 1
    except CompressionError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions share no class
        raise CompressionError(
            f"{folder / GRAPH} cannot be run ({reason_of(error)}); export it again"
        ) from error
    size = sum(path.stat().st_size for path in folder.glob(f"{GRAPH}*"))
    widest = widest_band(8 * size / golden.parameters)
    # experts alone
    if (json_object(folder / EXPORT).get("options") or {}).get("quantize") == "int4":
        widest = "4-bit"
    return Answered(folder.name, top, widest, other_tokens(folder, golden))
