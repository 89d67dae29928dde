"""Exports whose weights are never in memory together: the same files as an export of the model in memory.

The source is quantised (MXFP4), its weights tied and with biases, and its experts are rounded anew for the graph.
"""

import gc
import json
import resource
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import pytest
import torch
from torch import Tensor

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.architecture import experts_modules
from compressor.model.loading import PartialModel
from compressor.model.opened import open_model
from compressor.progress import Silent
from exporters.onnx import ExportOptions, export, read_summary, trace
from exporters.onnx import writing as exporter
from exporters.onnx.moe import SCALES, round_experts, use_nodes
from exporters.onnx.quantise import SCHEMES
from exporters.onnx.reference import CONTINUED, nudge, observe
from exporters.onnx.trace import export_graph, trace_inputs
from exporters.onnx.verify import EXACT, MAPPED, WHOLE, Graph, compare
from tests.support import onnx_answers, quantized, small

pytestmark = pytest.mark.full

SIZES = {"hidden_size": 96, "head_dim": 32}  # matrices with more than the optimiser after the trace computes with
STREAMED = ExportOptions(external_bytes=0, tokens=8, quantize="int4")
ROUNDED = SCHEMES[STREAMED.quantize]


def save(folder: Path) -> Path:
    """A quantised checkpoint of two layers whose embedding is its head."""
    quantized.save_mxfp4(folder, sizes=SIZES)
    small.edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=True))
    small.edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    return folder


def in_memory(source: Path) -> Any:
    """The stock model of the weights worked out by hand, rounded."""
    model = quantized.plain_model(source)
    for parameter in model.parameters():  # of two equally good scales, the order of adding decides
        parameter.data = parameter.data.contiguous()
    for _, experts in experts_modules(model):
        round_experts(experts, ROUNDED)
    return model


def written_whole(model: Any, folder: Path, options: ExportOptions) -> Path:
    """The export of a model in memory, written by onnx_ir alone."""
    inputs = trace_inputs(model, options.past)
    use_nodes(model, ROUNDED)
    program = export_graph(model, inputs, options.opset)
    folder.mkdir()
    onnx_ir.save(program, folder / exporter.GRAPH)
    return folder


class Held(Silent):
    """The most elements of large tensors in memory at once, beside those that were there before."""

    def __init__(self) -> None:
        gc.collect()  # what other tests have left would count as there before
        self.most, self.before = 0, elements()

    def advance(self, detail: str) -> None:
        self.most = max(self.most, elements() - self.before)


def elements() -> int:
    tensors = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    return sum({value.data_ptr(): value.numel() for value in tensors if real(value)}.values())


def real(value: Tensor) -> bool:
    """Whether a tensor is in memory, and large; views of mapped files, whose storage has a fixed size, are not."""
    if isinstance(value, trace.FakeTensor) or value.device.type == "meta" or value.numel() <= trace.SMALL:
        return False
    return value.untyped_storage().resizable()


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint of two layers, its export on a machine too small for it, and the most that it held."""

    source: Path
    out: Path
    summary: exporter.ExportSummary
    held: int


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("streamed")
    source = save(folder / "source")
    held = Held()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda which: (1000, resource.RLIM_INFINITY))
        summary = export(source, folder / "out", STREAMED, held)
    yield Made(source, folder / "out", summary, held.most)
    shutil.rmtree(folder)


def test_files_and_logits_are_those_of_the_hand_dequantised_model(made: Made, tmp_path: Path) -> None:
    model = in_memory(made.source)
    reference, graph = onnx_answers.observe(model, past=True, tokens=8), Graph(made.out / exporter.GRAPH)
    assert graph.how == WHOLE
    assert compare(graph.answers(reference.cases, Silent()), reference, EXACT).tokens_equal == 8
    one, two = (
        onnx.load(folder / exporter.GRAPH).graph
        for folder in (made.out, written_whole(model, tmp_path / "whole", STREAMED))
    )
    assert list(one.node) == list(two.node)
    stored = [
        {value.name: (tuple(value.dims), value.data_type, value.raw_data) for value in each.initializer}
        for each in (one, two)
    ]
    assert stored[0] == stored[1]
    onnx.checker.check_model(str(made.out / exporter.GRAPH), full_check=True)
    assert sorted(path.name for path in made.out.glob("*onnx*")) == [exporter.GRAPH, exporter.WEIGHTS, exporter.RECORD]
    assert "quantization_config" not in json.loads((made.out / "config.json").read_text())
    part = {"text_config": {"hidden_size": 8, "quantization_config": {"quant_method": "fp8"}}, "vision_config": None}
    assert exporter.plain_config(part) == {"text_config": {"hidden_size": 8}, "vision_config": None}


def test_one_layer_is_held_at_a_time_and_verified(made: Made) -> None:
    model = quantized.plain_model(made.source)
    layer = sum(value.numel() for value in model.model.layers[0].parameters())
    assert 0 < made.held <= sum(value.numel() for value in model.parameters()) - layer
    found = read_summary(made.out).verification
    assert found == made.summary.verification and found.how == MAPPED
    assert found.tokens_equal == found.tokens_compared == 8 and 0 < found.sensitivity < found.tolerance
    assert "chunked prefill" in dict(found.cases) and "left padding, cached decode" in dict(found.cases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_stock_model_says_the_same_in_memory_and_by_layers(dtype: torch.dtype, tmp_path: Path) -> None:
    """A source in blocks of FP8; rounded to float16, it still computes in float32."""
    quantized.save_fp8(tmp_path)
    opened = open_model(locate(str(tmp_path)), str(dtype).removeprefix("torch."), "cpu")
    model = quantized.plain_model(tmp_path, dtype).float()
    shown: list[tuple[str, torch.dtype]] = []

    def show(partial: PartialModel, decoder_layer: str) -> None:
        shown.append((decoder_layer, partial.model.get_submodule(decoder_layer).mlp.experts.down_proj.dtype))

    layer_names = opened.architecture.decoder_layers
    found, wanted = observe(opened, True, 4, Silent(), show), onnx_answers.observe(model, True, 4)
    assert shown == [(decoder_layer, dtype) for decoder_layer in layer_names] and len(layer_names) == 2
    for one, two in zip(found.cases, wanted.cases, strict=True):
        assert (one.name, one.chunks) == (two.name, two.chunks) and torch.equal(one.tokens, two.tokens)
        assert torch.allclose(one.real, two.real, atol=2e-5)
    assert found.cases[-1].name == CONTINUED and found.cases[-1].chunks == (8, 1, 1, 1)
    with nudging(model, layer_names):
        moved = [onnx_answers.answer(model, case)[case.mask.bool()] for case in wanted.cases]
    sensitivity = max(float((one - case.real).abs().max()) for one, case in zip(moved, wanted.cases, strict=True))
    assert found.sensitivity == pytest.approx(sensitivity, rel=0.5) and found.sensitivity > 1e-7


@contextmanager
def nudging(model: Any, layer_names: Sequence[str]) -> Iterator[None]:
    """Have the input of every one of these layers nudged."""
    handles = [
        model.get_submodule(decoder_layer).register_forward_pre_hook(lambda _, args: (nudge(args[0]), *args[1:]))
        for decoder_layer in layer_names
    ]
    yield
    for handle in handles:
        handle.remove()


def test_a_wrong_weight_of_any_layer_is_found(made: Made, tmp_path: Path) -> None:
    opened = open_model(locate(str(made.source)), "float32", "cpu")
    reference = observe(opened, True, 4, Silent(), rounded)
    copied = shutil.copytree(made.out, tmp_path / "copy") / exporter.GRAPH

    def asked() -> Any:
        return compare(Graph(copied, mapped=True).answers(reference.cases, Silent()), reference, EXACT)

    assert asked().tokens_equal == 4
    stored = (made.out / exporter.WEIGHTS).read_bytes()
    for name in ("model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.gate_up_proj"):
        begin, length = place_of(copied, name)
        changed = stored[begin : begin + length // 2] + bytes(length - length // 2)
        copied.with_name(exporter.WEIGHTS).write_bytes(stored[:begin] + changed + stored[begin + length :])
        with pytest.raises(CompressionError, match=r"is wrong in the case .*; nothing was written"):
            asked()


def rounded(partial: PartialModel, decoder_layer: str) -> None:
    """Round a loaded layer's experts."""
    for name, experts in experts_modules(partial.model):
        if name.startswith(f"{decoder_layer}."):
            round_experts(experts, ROUNDED)
            delattr(experts, SCALES)


def place_of(graph: Path, name: str) -> tuple[int, int]:
    """Where an initialiser's bytes lie in the file of weights: begin and length."""
    model = onnx.load(str(graph), load_external_data=False)
    (value,) = [value for value in model.graph.initializer if value.name == name]
    told = {entry.key: int(entry.value) for entry in value.external_data if entry.key != "location"}
    return told["offset"], told["length"]
