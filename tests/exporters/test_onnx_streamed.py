"""Exports whose weights are never in memory together: the same files as an export of the model in memory."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.evaluation import room
from compressor.memory import PeakMemory
from compressor.model.loading import PartialModel
from compressor.model.opened import open_model
from compressor.progress import Silent
from exporters import onnx as exporter
from exporters import onnx_absent
from exporters.onnx import ExportOptions, ExportSummary, export
from exporters.onnx_absent import Absent, Recipe
from exporters.onnx_experts import use_nodes
from exporters.onnx_graph import export_graph, trace_inputs
from exporters.onnx_layers import observe_streamed
from exporters.onnx_parts import LayeredGraph, Parts
from exporters.onnx_quantized_experts import FORMATS
from exporters.onnx_reference import Reference, observe
from exporters.onnx_verify import EXACT, LAYERS, WHOLE, compare
from exporters.onnx_weights import INLINE_BYTES
from tests import small

WIDTH = 96  # a square of it is more than the optimiser after the trace computes with
STREAMED = ExportOptions(external_bytes=0, tokens=8)


def save(folder: Path, name: str, layers: int, **more: Any) -> Path:
    """A checkpoint whose matrices are large enough to be absent from the trace."""
    widths = {"hidden_size": WIDTH, "intermediate_size": 64, "max_position_embeddings": 64}
    return small.save(folder, name, num_hidden_layers=layers, **widths, **more)


def in_memory(source: Path, folder: Path, options: ExportOptions) -> Path:
    """The export of the stock model as transformers loads it, written by onnx_ir alone."""
    weights, half = FORMATS[options.quantize], options.dtype == "fp16"
    dtype = torch.float16 if half else torch.float32
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    for module in model.modules():
        if weights.rounded is not None and hasattr(module, "use_experts_implementation"):
            raise AssertionError("not an experts module")
    inputs = trace_inputs(model, options.past)
    if weights.rounded is not None:
        for layer in model.model.layers:
            weights.rounded(layer.mlp.experts)
    use_nodes(model, options.fallback, half, weights)
    program = export_graph(model, inputs, options.opset)
    folder.mkdir()
    onnx_ir.save(program, folder / exporter.GRAPH, external_data=exporter.WEIGHTS, size_threshold_bytes=INLINE_BYTES)
    return folder


def same_files(one: Path, other: Path) -> bool:
    """Whether graph and weights are the same, byte for byte."""
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in (exporter.GRAPH, exporter.WEIGHTS))


class Held:
    """The most elements of large tensors that models which are loaded in parts have held at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.most, own = 0, PartialModel.load

        def load(partial: PartialModel, keys: Any) -> None:
            own(partial, keys)
            state = {value.data_ptr(): value.numel() for value in partial.model.state_dict().values() if real(value)}
            self.most = max(self.most, sum(state.values()))

        patch.setattr(PartialModel, "load", load)


def real(value: Tensor) -> bool:
    """Whether a tensor is in memory, and large."""
    kind = onnx_absent.FakeTensor
    return not isinstance(value, kind) and value.device.type != "meta" and value.numel() > onnx_absent.SMALL


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint of four layers, its export on a machine too small for it, and the most that it held."""

    source: Path
    out: Path
    summary: ExportSummary
    held: int


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("streamed")
    source = save(folder / "source", "mixtral", 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "available", lambda: 1000)
        held = Held(patch)
        summary = export(source, folder / "out", STREAMED)
    yield Made(source, folder / "out", summary, held.most)
    shutil.rmtree(folder)


def test_files_are_those_of_the_model_in_memory(made: Made, tmp_path: Path) -> None:
    assert same_files(made.out, in_memory(made.source, tmp_path / "whole", STREAMED))
    onnx.checker.check_model(str(made.out / exporter.GRAPH), full_check=True)
    assert sorted(path.name for path in made.out.glob("*onnx*")) == [exporter.GRAPH, exporter.WEIGHTS, exporter.RECORD]


def test_one_layer_is_held_at_a_time(made: Made) -> None:
    model = AutoModelForCausalLM.from_pretrained(made.source)
    layer = sum(value.numel() for value in model.model.layers[0].parameters())
    outside = sum(value.numel() for value in model.parameters()) - 4 * layer
    assert 0 < made.held <= layer + outside < sum(value.numel() for value in model.parameters()) / 2


def test_it_says_how_it_was_verified(made: Made) -> None:
    found = exporter.read_summary(made.out).verification
    assert found == made.summary.verification and found.how == LAYERS
    assert found.tokens_equal == found.tokens_compared == 8
    assert "chunked prefill" in dict(found.cases) and "left padding, cached decode" in dict(found.cases)


def test_the_whole_graph_gives_the_logits_of_its_parts(made: Made) -> None:
    stock = AutoModelForCausalLM.from_pretrained(made.source).eval()
    whole = compare(exporter.WholeGraph(made.out / exporter.GRAPH), observe(stock, past=True, tokens=8), EXACT)
    assert whole.how == WHOLE and whole.tokens_equal == 8
