"""The one place that picks how a model answers."""

from typing import Any

from compressor.answers.answering import Model
from compressor.answers.onnx import OnnxModel
from compressor.answers.server import Server, ServerModel, served_facts
from compressor.answers.stock import StockModel, checkpoint_facts
from compressor.answers.streamed import StreamedModel
from compressor.checkpoint.source import ModelSource
from compressor.files import GRAPH


def model_of(
    source: ModelSource,
    server: Server | None,
    rows: int | None,
    device: str,
    dtype: str,
    streamed: bool = False,
    think_end_token: Any = None,
) -> Model:
    """Return a model that answers `rows` requests at once: at its server, in ONNX Runtime, a layer
    at a time, or in memory."""
    if server is not None:
        return ServerModel(server, source, rows)
    if (source.folder / GRAPH).is_file() and not any(source.folder.glob("*.safetensors")):
        return OnnxModel(source, device)
    if streamed:
        return StreamedModel(source, device, dtype, rows)
    return StockModel(source, device, dtype, rows, think_end_token)


def identity(
    source: ModelSource, server: Server | None = None, digests: bool = False
) -> dict[str, Any]:
    """Return facts that decide a model's answers: those that its server reports, or the
    checkpoint's; with `digests` those of its weights."""
    if server is not None:
        return served_facts(server, source.folder)
    return checkpoint_facts(source, digests)
