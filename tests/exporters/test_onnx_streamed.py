"""Exports whose weights are never in memory together: the same files as an export of the model in memory."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.evaluation import room
from compressor.model.architecture import experts_modules
from compressor.model.loading import PartialModel
from compressor.model.opened import open_model
from compressor.progress import Silent
from exporters import onnx as exporter
from exporters import onnx_absent, onnx_making
from exporters.onnx import ExportOptions, ExportSummary, export
from exporters.onnx_absent import Absent, Recipe
from exporters.onnx_experts import use_nodes
from exporters.onnx_graph import export_graph, trace_inputs
from exporters.onnx_layers import observe_streamed
from exporters.onnx_making import write_graph
from exporters.onnx_parts import LayeredGraph, Parts
from exporters.onnx_quantized_experts import FORMATS
from exporters.onnx_reference import observe
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
    inputs = trace_inputs(model, options.past)
    for _, experts in experts_modules(model) if weights.rounded is not None else ():
        weights.rounded(experts)
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
    """A checkpoint of two layers, its export on a machine too small for it, and the most that it held."""

    source: Path
    out: Path
    summary: ExportSummary
    held: int


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("streamed")
    source = save(folder / "source", "mixtral", 2)
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
    assert 0 < made.held <= sum(value.numel() for value in model.parameters()) - layer


def test_it_says_how_it_was_verified(made: Made) -> None:
    found = exporter.read_summary(made.out).verification
    assert found == made.summary.verification and found.how == LAYERS
    assert found.tokens_equal == found.tokens_compared == 8
    assert "chunked prefill" in dict(found.cases) and "left padding, cached decode" in dict(found.cases)


def test_the_whole_graph_gives_the_logits_of_its_parts(made: Made) -> None:
    stock = AutoModelForCausalLM.from_pretrained(made.source).eval()
    whole = compare(exporter.WholeGraph(made.out / exporter.GRAPH), observe(stock, past=True, tokens=8), EXACT)
    assert whole.how == WHOLE and whole.tokens_equal == 8


def test_tied_rounded_half_weights_with_biases_are_written_alike(tmp_path: Path) -> None:
    source = save(tmp_path / "source", "gpt_oss", 1, tie_word_embeddings=True)
    asked = replace(STREAMED, dtype="fp16", quantize="int4")
    opened, out = open_model(locate(str(source)), "float16", "cpu"), tmp_path / "out"
    out.mkdir()
    made = write_graph(opened, out, asked, True, Silent())
    assert same_files(out, in_memory(source, tmp_path / "whole", asked))
    assert made.original is not None and made.owners["lm_head.weight"] == "lm_head.weight"


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_wrong_weight_of_any_layer_is_found(made: Made, tmp_path: Path) -> None:
    opened = open_model(locate(str(made.source)), "float32", "cpu")
    reference = observe_streamed(opened, True, 4, Silent(), lambda partial, unit: None)
    graph, owners = shutil.copytree(made.out, tmp_path / "copy") / exporter.GRAPH, owners_of(made)

    def answers() -> LayeredGraph:
        return LayeredGraph(Parts(graph, owners, opened.architecture.units), reference, True, Silent())

    assert len(Parts(graph, owners, opened.architecture.units).parts) == 4  # before, two layers, behind
    assert compare(answers(), reference, EXACT).how == LAYERS
    stored = (made.out / exporter.WEIGHTS).read_bytes()
    for name in ("model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.gate_up_proj"):
        begin, length = place_of(graph, name)
        changed = stored[begin : begin + length // 2] + bytes(length - length // 2)
        graph.with_name(exporter.WEIGHTS).write_bytes(stored[:begin] + changed + stored[begin + length :])
        with pytest.raises(CompressionError, match=r"is wrong in the case .*; nothing was written"):
            compare(answers(), reference, EXACT)


def owners_of(made: Made) -> dict[str, str]:
    """Of what tensor each large one of the graph is made, for which only the layer counts: one that it is used in."""
    graph = onnx.load(str(made.out / exporter.GRAPH), load_external_data=False).graph
    return {value.name: value.name for value in graph.initializer if value.name.startswith(("model.layers", "val"))}


def place_of(graph: Path, name: str) -> tuple[int, int]:
    """Where an initialiser's bytes lie in the file of weights: begin and length."""
    model = onnx.load(str(graph), load_external_data=False)
    (value,) = [value for value in model.graph.initializer if value.name == name]
    told = {entry.key: int(entry.value) for entry in value.external_data if entry.key != "location"}
    return told["offset"], told["length"]


def test_a_fault_half_way_leaves_nothing(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, places = PartialModel.load, []

    def load(partial: PartialModel, keys: Any) -> None:
        wanted = list(keys)
        if "model.layers.1.mlp.experts.down_proj" in wanted:
            places.extend(path.name for path in tmp_path.glob(".*/output/*"))
            raise CompressionError("the disk is gone")
        own(partial, wanted)

    monkeypatch.setattr(onnx_making, "export_graph", lambda *_: onnx_ir.load(made.out / exporter.GRAPH))
    monkeypatch.setattr(PartialModel, "load", load)
    with pytest.raises(CompressionError, match="the disk is gone"):
        export(made.source, tmp_path / "out", replace(STREAMED, stream=True))
    assert places == [exporter.WEIGHTS] and list(tmp_path.iterdir()) == []


def test_an_absent_weight_can_be_turned_over_and_nothing_else() -> None:
    weight = Absent.of("w", (2, 3, 4), np.dtype(np.float32))
    once = np.transpose(weight, axes=(2, 0, 1))
    assert once.shape == (4, 2, 3) and once.recipe == Recipe("w", (2, 0, 1))
    twice, value = once.transpose(), torch.arange(24.0).view(2, 3, 4)
    assert twice.recipe is not None
    assert torch.equal(twice.recipe.made_of(value), value.permute(2, 0, 1).permute(2, 1, 0))
    assert weight.view(weight.dtype) is weight and weight.tobytes() != once.tobytes()
    for compute in (lambda: weight + 1, lambda: np.concatenate([weight, weight]), lambda: np.sum(weight)):
        with pytest.raises(TypeError, match="not in memory"):
            compute()
