"""The traced graph: names, axes, one node for each MoE layer however many experts, and clear refusals."""

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnx_ir
import pytest
import torch
from torch import Tensor

from compressor.errors import CompressionError
from exporters.onnx import ExportOptions, export, moe, trace
from exporters.onnx.reference import model_inputs
from tests.support import zoo
from tests.support.onnx_answers import Runner, session_of


def traced(count: int) -> Any:
    """The graph of a Mixtral of one layer and so many experts."""
    model = zoo.build("mixtral", num_local_experts=count, num_hidden_layers=1)
    inputs = trace.trace_inputs(model, past=True)
    moe.use_nodes(model)
    return trace.export_graph(model, inputs, 20)


@pytest.mark.full
def test_nodes_axes_and_names_do_not_depend_on_the_number_of_experts_or_on_this_machine(tmp_path: Path) -> None:
    graphs = {count: traced(count) for count in (8, 16)}
    kinds = [Counter(node.op_type for node in program.graph.all_nodes()) for program in graphs.values()]
    assert kinds[0] == kinds[1]
    assert kinds[0]["MoE"] == 1 and kinds[0]["Loop"] == kinds[0]["If"] == 0
    graph = graphs[8].graph
    shapes = {value.name: " ".join(map(str, value.shape)) for value in (*graph.inputs, *graph.outputs)}
    past = {f"past_key_values.0.{part}": "batch 2 past 16" for part in ("key", "value")}
    present = {f"present.0.{part}": "batch 2 total 16" for part in ("key", "value")}
    ids = {"input_ids": "batch sequence", "attention_mask": "batch total", "position_ids": "batch sequence"}
    assert shapes == {**ids, **past, "logits": "batch sequence 96", **present}
    values = [value for node in graph.all_nodes() for value in node.outputs]
    dims = [dim for value in values for dim in value.shape or () if not isinstance(dim, int)]
    inside = {str(dim) for dim in dims if dim.value is not None}
    assert {"batch", "sequence", "total"} <= inside
    assert not any(trace.SYMBOL.search(name) for name in inside)
    onnx_ir.save(graphs[8], tmp_path / "model.onnx")
    content = (tmp_path / "model.onnx").read_bytes()
    for folder in (str(Path(torch.__file__).parents[1]), str(Path(__file__).parents[2])):
        assert folder.encode() not in content
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)


def test_a_cache_that_grows_otherwise_is_refused() -> None:
    one, two = torch.zeros(2, 3, 2), torch.zeros(3, 3, 3)
    with pytest.raises(CompressionError, match=r"layers\.0\.windows grows from 4 to 5 entries .*--no-past"):
        trace._axes("layers.0.windows", torch.zeros(2, 4, 2), torch.zeros(3, 5, 2))
    assert trace._axes("state", one[..., :1], two[..., :1]) == {0: "batch"}


def test_a_model_that_cannot_be_traced_is_refused_by_name() -> None:
    model = zoo.build("mixtral", num_hidden_layers=1)
    inputs = trace.trace_inputs(model, past=False)

    def undecided(**given: Tensor) -> Any:
        raise ValueError(f"{given['input_ids'].shape[0] // 2} is undecided\nmore lines")

    model.forward = undecided  # type: ignore[method-assign]
    with pytest.raises(CompressionError, match=r"MixtralForCausalLM cannot be traced as one ONNX graph: .*undecided"):
        trace.export_graph(model, inputs, 20)


def test_an_axis_that_the_trace_fixed_is_told() -> None:
    ids = onnx_ir.Value(name="input_ids", shape=onnx_ir.Shape(["s0", 3]))
    graph = SimpleNamespace(inputs=[ids], outputs=[onnx_ir.Value(name="output.logits")])
    with pytest.raises(CompressionError, match=r"depends on the sequence axis of input_ids .* the example's 3"):
        trace._rename(SimpleNamespace(graph=graph), {})


class Slots(torch.nn.Module):
    """Picks as many of its largest inputs as a limit and the length allow, as sparse attention does."""

    def forward(self, value: Tensor) -> Tensor:
        return value.topk(min(4, value.shape[1]), dim=1).values


def test_a_minimum_of_a_length_stays_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[__name__]
    monkeypatch.setattr(trace, "STOCK", __name__)
    example, shapes = (torch.zeros(2, 3),), ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    with trace._symbolic_minimum(Slots()):
        program = torch.export.export(Slots(), example, dynamic_shapes=shapes).module()
    assert not hasattr(module, "min")
    assert [program(torch.zeros(2, length)).shape[1] for length in (2, 4, 9)] == [2, 4, 4]


@pytest.mark.full
def test_a_recurrent_hybrid_is_right_for_one_chunk_and_for_many(tmp_path: Path) -> None:
    model = zoo.build("granitemoehybrid", mamba_chunk_size=8)
    model.save_pretrained(tmp_path / "model")
    found = export(tmp_path / "model", tmp_path / "graph", ExportOptions(tokens=10)).verification
    assert {(1, 1), (3, 5), (2, 33)} <= set(found.shapes) and found.largest_difference < found.tolerance
    tokens = torch.arange(1, 14)[None]
    inputs = {name: value.numpy() for name, value in model_inputs(model, tokens).items()}
    with torch.no_grad():
        stock = model(tokens).logits
    runner = Runner(session_of(tmp_path / "graph"), 1)
    logits = runner.session.run(["logits"], inputs | runner.past)[0]
    assert torch.allclose(torch.from_numpy(logits), stock, atol=1e-4)
