"""Whether a model anywhere computes what its golden answers say: a folder, an ONNX export, or a
server."""

from dataclasses import replace
from pathlib import Path

from compressor.answers.options import ServerOptions
from compressor.answers.server import open_server
from compressor.checkpoint.source import locate, locate_tokenizer
from compressor.entry_points import kind_of_file
from compressor.errors import CompressionError
from compressor.extras import require
from compressor.files import GRAPH
from compressor.golden.answers import find_golden, read_golden
from compressor.golden.causes import find_cause
from compressor.golden.compare import Verdict, compare
from compressor.golden.served import ask_server
from compressor.golden.things import ask_folder, ask_onnx
from compressor.model.inspection import stock_fault
from compressor.progress import SILENT, Progress

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
            locate_tokenizer(model, revision)
            if servers.server
            else locate(model, revision, progress)
        )
        places = [source.folder]
    file = find_golden([Path(answers)] if answers else places)
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
    if verdict.exit_status and verdict.cause is None:
        cause = find_cause(golden, file.parent, answered, verdict.allowed, device, progress)
        verdict = replace(verdict, cause=cause or "none of the known ones")
    return verdict
