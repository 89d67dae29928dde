"""Asks a thing for its answers to golden prompts: a checkpoint, an ONNX export or a GGUF file."""

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import torch

from compressor.answers.onnx_decoder import onnx_decoder
from compressor.checkpoint.reader import MODEL_NAME
from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError, reason_of
from compressor.files import json_object
from compressor.golden.answers import GoldenAnswers, Top
from compressor.golden.compare import Answered, widest_band
from compressor.golden.measure import ask_model, open_exactly, stored_bits, top_of
from compressor.golden.prompts import other_tokens
from compressor.progress import Progress

EXPORT = "onnx_export.json"
SHARD = re.compile(r"-\d{5}-of-")  # in the name of a GGUF file of several


def ask_folder(golden: GoldenAnswers, source: ModelSource, device: str, progress: Progress) -> Answered:
    """Return the answers of a checkpoint, by the stock forward; raises `CompressionError` for another vocabulary."""
    model = open_exactly(source, device)
    _check_vocabulary(golden, source.label, model.vocabulary)
    bits = stored_bits(model)
    widest = "fp8" if 7 < bits < 15 and model.checkpoint.quantization else widest_band(bits)
    (top,) = ask_model(model, golden.prompts, progress=progress)
    return Answered(source.label, top, widest, other_tokens(source.folder, golden.prompts))


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
        raise CompressionError(f"{folder / MODEL_NAME} cannot be run ({reason_of(error)}); export it again") from error
    widest = widest_band(bits_of(golden, folder.glob(f"{MODEL_NAME}*")))
    if (json_object(folder / EXPORT).get("options") or {}).get("quantize") == "int4":  # experts alone
        widest = "4-bit"
    return Answered(folder.name, top, widest, other_tokens(folder, golden.prompts))


def ask_gguf(golden: GoldenAnswers, path: Path) -> Answered:
    """Return the answers of a GGUF file, by llama-cpp-python, if it is installed."""
    if find_spec("llama_cpp") is None:
        raise CompressionError(
            f"{path} is run by llama.cpp: start `llama-server -m {path}` and add --server http://localhost:8080, or "
            "pip install llama-cpp-python"
        )
    from llama_cpp import Llama

    longest = max(len(prompt.ids) for prompt in golden.prompts)
    try:
        model = Llama(str(path), n_ctx=longest, logits_all=True, verbose=False)
    except Exception as error:  # it raises anything
        raise CompressionError(f"llama.cpp cannot read {path} ({reason_of(error)}); convert the model again") from error
    _check_vocabulary(golden, path.name, model.n_vocab())
    top = list[Top]()
    for prompt in golden.prompts:
        model.reset()
        model.eval(list(prompt.ids))
        top += top_of(torch.from_numpy(model.scores[list(prompt.positions)]))
    return Answered(path.name, top, widest_band(bits_of(golden, gguf_files(path))))


def gguf_files(path: Path) -> Iterable[Path]:
    """Return the files of a GGUF model that may have been split into several."""
    return path.parent.glob(SHARD.sub("-*-of-", path.name)) if SHARD.search(path.name) else (path,)


def bits_of(golden: GoldenAnswers, files: Iterable[Path]) -> float:
    """Return the bits of a weight, on average, that these files hold."""
    return 8 * sum(path.stat().st_size for path in files) / golden.parameters


def _check_vocabulary(golden: GoldenAnswers, label: str, vocabulary: int) -> None:
    largest = max(max(prompt.ids) for prompt in golden.prompts)
    if vocabulary <= largest:
        raise CompressionError(
            f"{label} is another model: it knows {vocabulary} tokens, and the golden answers are of one that knows "
            f"{golden.vocabulary}; name its own with --answers"
        )
