"""Exports whose weights are never in memory together: the same files as an export of the model in memory.

The source is quantised (MXFP4), its weights tied and with biases, and its experts are rounded anew for the graph.
"""

import json
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

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.evaluation import evaluate as evaluating
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
from exporters.onnx_layers import forget_scales, observe_streamed, round_layer
from exporters.onnx_parts import LayeredGraph, Parts
from exporters.onnx_quantized_experts import FORMATS
from exporters.onnx_reference import Reference, observe
from exporters.onnx_verify import EXACT, LAYERS, WHOLE, compare
from exporters.onnx_weights import INLINE_BYTES
from tests import quantized, small

SIZES = {"hidden_size": 96, "head_dim": 32}  # matrices with more than the optimiser after the trace computes with
STREAMED = ExportOptions(external_bytes=0, tokens=8, quantize="int4")
ROUNDED = FORMATS[STREAMED.quantize]


def save(folder: Path) -> Path:
    """A quantised checkpoint of two layers whose embedding is its head."""
    quantized.save_mxfp4(folder, sizes=SIZES)
    small.edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=True))
    small.edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    return folder


def in_memory(source: Path) -> Any:
    """The stock model of the weights worked out by hand, rounded."""
    model = quantized.plain_model(source)
    assert ROUNDED.rounded is not None
    for parameter in model.parameters():  # of two equally good scales, the order of adding decides
        parameter.data = parameter.data.contiguous()
    for _, experts in experts_modules(model):
        ROUNDED.rounded(experts)
    return model


def written_whole(model: Any, folder: Path, options: ExportOptions) -> Path:
    """The export of a model in memory, written by onnx_ir alone."""
    inputs = trace_inputs(model, options.past)
    use_nodes(model, options.fallback, False, ROUNDED)
    program = export_graph(model, inputs, options.opset)
    folder.mkdir()
    onnx_ir.save(program, folder / exporter.GRAPH, external_data=exporter.WEIGHTS, size_threshold_bytes=INLINE_BYTES)
    return folder


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
    source = save(folder / "source")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluating, "available", lambda: 1000)
        held = Held(patch)
        summary = export(source, folder / "out", STREAMED)
    yield Made(source, folder / "out", summary, held.most)
    shutil.rmtree(folder)


def test_files_and_logits_are_those_of_the_hand_dequantised_model(made: Made, tmp_path: Path) -> None:
    model = in_memory(made.source)
    whole = compare(exporter.WholeGraph(made.out / exporter.GRAPH), observe(model, past=True, tokens=8), EXACT)
    assert whole.how == WHOLE and whole.tokens_equal == 8
    other = written_whole(model, tmp_path / "whole", STREAMED)
    for name in (exporter.GRAPH, exporter.WEIGHTS):
        assert (made.out / name).read_bytes() == (other / name).read_bytes()
    onnx.checker.check_model(str(made.out / exporter.GRAPH), full_check=True)
    assert sorted(path.name for path in made.out.glob("*onnx*")) == [exporter.GRAPH, exporter.WEIGHTS, exporter.RECORD]
    assert "quantization_config" not in json.loads((made.out / "config.json").read_text())
    part = {"text_config": {"hidden_size": 8, "quantization_config": {"quant_method": "fp8"}}, "vision_config": None}
    assert exporter.plain_config(part) == {"text_config": {"hidden_size": 8}, "vision_config": None}


def test_one_layer_is_held_at_a_time(made: Made) -> None:
    model = quantized.plain_model(made.source)
    layer = sum(value.numel() for value in model.model.layers[0].parameters())
    assert 0 < made.held <= sum(value.numel() for value in model.parameters()) - layer


def test_it_says_how_it_was_verified(made: Made) -> None:
    found = exporter.read_summary(made.out).verification
    assert found == made.summary.verification and found.how == LAYERS
    assert found.tokens_equal == found.tokens_compared == 8 and 0 < found.sensitivity < found.tolerance
    assert "chunked prefill" in dict(found.cases) and "left padding, cached decode" in dict(found.cases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_stock_model_says_the_same_in_memory_and_by_layers(dtype: torch.dtype, tmp_path: Path) -> None:
    """A source in blocks of FP8; rounded to float16, it still computes in float32."""
    quantized.save_fp8(tmp_path)
    opened = open_model(locate(str(tmp_path)), str(dtype).removeprefix("torch."), "cpu")
    model = quantized.plain_model(tmp_path, dtype).float()
    shown: list[tuple[str, torch.dtype]] = []

    def show(partial: PartialModel, unit: str) -> None:
        shown.append((unit, partial.model.get_submodule(unit).mlp.experts.down_proj.dtype))

    units = opened.architecture.units
    found = observe_streamed(opened, True, 4, Silent(), show)
    wanted = observe(model, True, 0, units)
    assert shown == [(unit, dtype) for unit in units] and len(units) == 2
    for one, two in zip(found.cases, wanted.cases, strict=True):
        assert (one.name, one.chunks) == (two.name, two.chunks) and torch.equal(one.tokens, two.tokens)
        real_tokens = one.mask.bool()
        assert torch.allclose(one.logits[real_tokens], two.logits[real_tokens], atol=2e-5)
    assert found.sensitivity == pytest.approx(wanted.sensitivity, rel=0.5) and found.sensitivity > 1e-7
    after = model(found.text).logits[0, found.prompt.shape[1] - 1 : -1]
    assert torch.allclose(found.greedy_logits, after, atol=2e-5)


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_wrong_weight_of_any_layer_is_found(made: Made, tmp_path: Path) -> None:
    opened = open_model(locate(str(made.source)), "float32", "cpu")
    reference = observe_streamed(opened, True, 4, Silent(), rounded)
    graph, owners = shutil.copytree(made.out, tmp_path / "copy") / exporter.GRAPH, owners_of(made)
    assert compare(answers(graph, owners, reference), reference, EXACT).how == LAYERS
    stored = (made.out / exporter.WEIGHTS).read_bytes()
    for name in ("model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.gate_up_proj"):
        begin, length = place_of(graph, name)
        changed = stored[begin : begin + length // 2] + bytes(length - length // 2)
        graph.with_name(exporter.WEIGHTS).write_bytes(stored[:begin] + changed + stored[begin + length :])
        with pytest.raises(CompressionError, match=r"is wrong in the case .*; nothing was written"):
            compare(answers(graph, owners, reference), reference, EXACT)


def rounded(partial: PartialModel, unit: str) -> None:
    """Round a loaded layer's experts."""
    round_layer(partial, unit, ROUNDED)
    forget_scales(partial, unit)


def answers(graph: Path, owners: dict[str, str], reference: Reference) -> LayeredGraph:
    """What the parts of a graph of two layers say."""
    parts = Parts(graph, owners, ["model.layers.0", "model.layers.1"])
    assert len(parts.parts) == 4  # before, two layers, behind
    return LayeredGraph(parts, reference, True, Silent())


def owners_of(made: Made) -> dict[str, str]:
    """Of what tensor each large one of the graph is made, for which only the layer counts: one that it is used in."""
    graph = onnx.load(str(made.out / exporter.GRAPH), load_external_data=False).graph
    own = ("model.layers", "model.embed", "lm_head", "val")
    return {value.name: value.name for value in graph.initializer if value.name.startswith(own)}


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
