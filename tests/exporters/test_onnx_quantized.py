"""Quantised exports: integer weights by plain loops, and graphs against stock models of the weights in the file."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import numpy_helper
from torch import Tensor, nn

from compressor import api
from compressor.data.demo import demo_checkpoint
from compressor.errors import CompressionError
from compressor.model.architecture import experts_modules
from exporters.onnx import ExportOptions, export
from exporters.onnx.moe import moe_node, round_experts
from exporters.onnx.quantise import RATIOS, SCHEMES, Scheme, codes, pack, rounded
from exporters.onnx.verify import rounding_cost
from exporters.onnx.writing import ExportSummary
from tests.support import zoo
from tests.support.onnx_answers import Runner, experts_of, observe, run_node, session_of

ALL = [pytest.param(scheme, id=name) for name, scheme in SCHEMES.items()]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def naive_scale(values: list[float], scheme: Scheme) -> tuple[float, float]:
    """The scale of a few values with the smallest squared error, tried one by one in Python's own numbers."""
    full = max(abs(value) for value in values) / scheme.highest
    found = []
    for ratio in RATIOS:
        scale = full * ratio
        nearest = [min(scheme.highest, max(-scheme.highest - 1, round(value / scale))) for value in values]
        found.append((sum((n * scale - v) ** 2 for n, v in zip(nearest, values, strict=True)), scale))
    error, scale = min(found, key=lambda pair: pair[0])
    return scale, error


@pytest.mark.parametrize("scheme", ALL)
def test_every_scale_has_the_smallest_error_of_a_plain_loop(scheme: Scheme) -> None:
    weight = gaussian(3, 70)
    value, scales = rounded(weight, scheme)
    width = scheme.block or 70
    assert scales.shape == (3, -(-70 // width))
    for row in range(3):
        for place, part in enumerate(weight[row].split(width)):
            scale, error = naive_scale(part.tolist(), scheme)
            mine = (value[row].split(width)[place] - part).double().square().sum()
            assert float(mine) == pytest.approx(error, rel=1e-4)
            assert float(scales[row, place]) == pytest.approx(scale, rel=1e-5)


def test_zeros_and_tiny_weights_have_a_scale() -> None:
    for weight in (torch.zeros(2, 40), torch.full((2, 40), 1e-42)):
        value, scales = rounded(weight, SCHEMES["int4"])
        assert bool((scales > 0).all()) and bool(torch.isfinite(value).all()) and float(value.abs().max()) < 1e-37


@pytest.mark.parametrize("scheme", ALL)
def test_the_node_reads_the_same_weights(scheme: Scheme) -> None:
    weight, identity = gaussian(1, 64, 64), torch.eye(64)[None]
    tensors = {}
    for name, value in (("one", weight), ("two", identity)):
        _, scales = rounded(value, scheme)
        tensors[name] = pack(codes(value, scales, scheme), scheme)
        tensors[f"{name}_scales"] = scales if scheme.block else scales[..., 0]
    inputs = ["x", "logits", "one", "one_scales", "", "two", "two_scales"]
    attributes: dict[str, Any] = {"k": 1, "activation_type": "identity", "expert_weight_bits": scheme.bits}
    attributes |= {"block_size": scheme.block} if scheme.block else {}
    feed = {"x": torch.eye(64), "logits": torch.zeros(64, 1)}
    read = run_node("QMoE", inputs, attributes, feed, tensors)  # row i: column i of the weight
    torch.testing.assert_close(read.T, rounded(weight, scheme)[0][0], rtol=1e-5, atol=1e-6)


SHAPES = ((1, 1), (1, 7), (3, 5), (2, 33), (4, 16))
WIDE: dict[str, Any] = {"hidden_size": 48}  # one block and a half; 24 in the middle is less than one


@dataclass(frozen=True)
class Exported:
    """A checkpoint and its graph."""

    source: Path
    folder: Path
    summary: ExportSummary
    quantize: str

    @cached_property
    def graph(self) -> onnx.GraphProto:
        """The graph with its weights."""
        return onnx.load(str(self.folder / "model.onnx")).graph

    @cached_property
    def stock(self) -> Any:
        """The stock model with the experts that are in the graph, in place of its own."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.source, dtype=torch.float32)
        model.train(False)
        weights = {entry.name: entry for entry in self.graph.initializer}
        for name, experts in experts_modules(model):
            for parameter in ("gate_up_proj", "down_proj"):
                codes, scales = (numpy_helper.to_array(weights[f"{name}.{parameter}{end}"]) for end in ("", "_scales"))
                plain = plainly(codes, scales, self.quantize)
                experts.get_parameter(parameter).data = stock_layout(experts, parameter, torch.from_numpy(plain))
        return model


def plainly(codes: np.ndarray, scales: np.ndarray, quantize: str) -> np.ndarray:
    """What stored bytes mean, as the node's documentation says: [E, N, K] float32."""
    if quantize == "int4":
        whole = np.empty((*codes.shape[:2], codes.shape[2] * 2), np.float32)
        whole[..., 0::2], whole[..., 1::2] = codes % 16, codes // 16
        return (whole - 8) * np.repeat(scales, 32, axis=2)
    return (codes.astype(np.float32) - 128) * scales[:, :, None]


def stock_layout(experts: Any, parameter: str, weight: Tensor) -> Tensor:
    """Without added zeros, in the order of the stock parameter."""
    shape = experts.get_parameter(parameter).shape
    rows, columns = (shape[2], shape[1]) if experts.is_transposed else (shape[1], shape[2])
    assert not bool(weight[:, rows:].any()) and not bool(weight[:, :, columns:].any())
    weight = weight[:, :rows, :columns]
    if parameter == "gate_up_proj" and experts.is_concatenated:
        weight = torch.cat([weight[:, 0::2], weight[:, 1::2]], 1)
    return (weight.transpose(1, 2) if experts.is_transposed else weight).contiguous()


def made(source: Path, quantize: str, **options: Any) -> Exported:
    folder = source.parent / f"{source.name}-{quantize}"
    return Exported(source, folder, export(source, folder, ExportOptions(quantize=quantize, **options)), quantize)


def cut_demo(folder: Path) -> Path:
    """The demo model with half of its experts."""
    with demo_checkpoint() as demo:
        api.compress(
            str(demo), folder, experts=8, strategy="count-guided", calibration="demo", samples=4, sequence_length=32
        )
    return folder


OTHERS = ("olmoe int8", "qwen3_moe int4", "deepseek_v3 int8", "gpt_oss int8", "smaller-demo int4")


@pytest.fixture(scope="module", params=[*map(zoo.full, ["mixtral-wide int4", *OTHERS])])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    name, quantize = request.param.split()
    source = tmp_path_factory.mktemp("onnx") / name
    if name == "smaller-demo":
        cut_demo(source)
    else:
        sizes = WIDE if name.endswith("wide") else {}
        layers = 2 if name in ("deepseek_v3", "gpt_oss") else 1  # one of each kind
        zoo.build(name.split("-")[0], num_hidden_layers=layers, **sizes).save_pretrained(source)
    return made(source, quantize)


@torch.no_grad()
def test_logits_are_those_of_torch_with_the_weights_in_the_file(case: Exported) -> None:
    session = session_of(case.folder)
    for rows, length in SHAPES:
        tokens = zoo.tokens(case.stock, rows, length, seed=length)
        wanted = case.stock(input_ids=tokens, use_cache=False).logits
        torch.testing.assert_close(Runner(session, rows)(tokens), wanted, rtol=0, atol=1e-4)


def test_every_layer_is_one_node_without_float_experts(case: Exported) -> None:
    layers = [name for name, _ in experts_modules(case.stock)]
    assert [(route.layer, route.route) for route in case.summary.routes] == [(name, "QMoE") for name in layers]
    assert [node.op_type for node in case.graph.node if "MoE" in node.op_type] == ["QMoE"] * len(layers)
    kinds = {entry.name: entry.data_type for entry in case.graph.initializer if ".experts." in entry.name}
    floats = {name for name, kind in kinds.items() if kind != onnx.TensorProto.UINT8}
    assert all(name.endswith(("_scales", "_bias")) for name in floats)


def test_the_record_says_what_rounding_costs(case: Exported) -> None:
    record = json.loads((case.folder / "onnx_export.json").read_text(encoding="utf-8"))
    assert SCHEMES[case.quantize].describe() in record["verification"]["reference"]
    assert record["verification"]["largest_difference"] < 1e-4
    assert record["verification"]["tokens_equal"] == record["verification"]["tokens_compared"] > 50
    cost, summary = record["rounding"], case.summary.rounding
    assert summary is not None and cost["largest_difference"] == summary.largest_difference
    before = transformers.AutoModelForCausalLM.from_pretrained(case.source, dtype=torch.float32)
    wanted = rounding_cost(observe(before, False, 0), observe(case.stock, False, 0))
    assert cost["largest_difference"] == pytest.approx(wanted.largest_difference, rel=1e-2)
    assert cost["same_choice"] == pytest.approx(wanted.same_choice, abs=0.02)
    assert 1e-3 < cost["largest_difference"] < cost["largest_logit"]


@pytest.mark.parametrize("quantize", SCHEMES)
@pytest.mark.parametrize(("name", "overrides"), [("mixtral", WIDE), ("gpt_oss", {}), ("nemotron_h", {})])
def test_the_nodes_tensors_mean_the_rounded_weights(name: str, overrides: dict[str, Any], quantize: str) -> None:
    experts, scheme = experts_of(name, **overrides), SCHEMES[quantize]
    if not experts.has_gate:
        experts.act_fn = nn.SiLU()  # its own is none of the node's
    names = [key for key, value in experts._parameters.items() if value is not None and "proj" in key]
    names = [key for key in names if not key.endswith("bias")]
    before = {key: getattr(experts, key).clone() for key in names}
    round_experts(experts, scheme)
    _, tensors = moe_node(experts, scheme)
    for key in names:
        now = getattr(experts, key)
        scales = tensors[f"{key}_scales"]
        plain = torch.from_numpy(plainly(tensors[key].numpy(), scales.numpy(), quantize))
        assert torch.equal(stock_layout(experts, key, plain), now) and not torch.equal(now, before[key])
        assert float((now - before[key]).abs().max()) < float(scales.max()) * 4


def test_loaded_weights_are_never_written_to() -> None:
    experts = experts_of("gpt_oss")
    loaded = {name: (value.data, value.data.clone()) for name, value in experts.named_parameters()}
    round_experts(experts, SCHEMES["int4"])
    assert all(torch.equal(value, before) for value, before in loaded.values())


def test_a_weight_that_is_not_finite_is_refused() -> None:
    experts = experts_of("mixtral")
    experts.down_proj.data[3, 0, 0] = torch.inf
    with pytest.raises(CompressionError, match=r"down_proj of expert 3 holds a value that is not finite.*none"):
        round_experts(experts, SCHEMES["int8"])
