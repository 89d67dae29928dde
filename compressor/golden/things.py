"""Asks a thing for its answers to golden prompts: a checkpoint or an ONNX export."""

from pathlib import Path

from compressor.answers.onnx_decoder import onnx_decoder
from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError, reason_of
from compressor.files import GRAPH, json_object
from compressor.golden.answers import GoldenAnswers, Top
from compressor.golden.compare import Answered, widest_band
from compressor.golden.measure import ask_model, open_exactly, stored_bits, top_of
from compressor.golden.prompts import other_tokens
from compressor.progress import Progress

EXPORT = "onnx_export.json"


def ask_folder(
    golden: GoldenAnswers, source: ModelSource, device: str, progress: Progress
) -> Answered:
    """Return the answers of a checkpoint, by the stock forward; raises `CompressionError` for
    another vocabulary."""
    model = open_exactly(source, device)
    if model.vocabulary <= max(max(prompt.ids) for prompt in golden.prompts):
        raise CompressionError(
            f"{source.label} is another model: it knows {model.vocabulary} tokens, and the golden "
            "answers are of one "
            f"that knows {golden.vocabulary}; name its own with --answers"
        )
    bits = stored_bits(model)
    widest = "fp8" if 7 < bits < 15 and model.checkpoint.quantization else widest_band(bits)
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
