"""Asks a thing for its answers to golden prompts: a folder, an ONNX export, a GGUF file or a server."""

from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.golden.answers import GoldenAnswers
from compressor.golden.compare import Answered, widest_band
from compressor.golden.measure import ask_model, open_exactly, stored_bits
from compressor.golden.prompts import other_tokens
from compressor.progress import Progress


def ask_folder(golden: GoldenAnswers, source: ModelSource, device: str, progress: Progress) -> Answered:
    """Return the answers of a checkpoint, by the stock forward; raises `CompressionError` for another vocabulary."""
    model = open_exactly(source, device)
    if model.vocabulary != golden.vocabulary:
        raise CompressionError(
            f"{source.label} knows {model.vocabulary} tokens, and the golden answers are of a model of "
            f"{golden.vocabulary}; name those of this model with --answers"
        )
    bits = stored_bits(model)
    widest = "fp8" if 7 < bits < 15 and model.checkpoint.quantization else widest_band(bits)
    top, _ = ask_model(model, golden.prompts, progress=progress)
    return Answered(source.label, top, widest, other_tokens(source.folder, golden.prompts))
