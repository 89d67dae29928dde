"""Exported checkpoints in ONNX Runtime, held against the stock models that were never near the exporter."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.exporters.exporter_onnx import OnnxExporter

import compressor
from compressor.errors import CompressionError
from exporters.onnx import ExportOptions, export
from exporters.onnx import writing as exporter
from tests.support import small, zoo
from tests.support.onnx_answers import Runner, session_of

SHAPES = ((1, 1), (1, 9), (2, 5), (3, 21), (4, 2), (1, 200))
LENGTH = 512  # of the context


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint, what it was exported to, and the stock model in memory."""

    source: Path
    out: Path
    summary: exporter.ExportSummary
    stock: Any

    def session(self) -> Any:
        return session_of(self.out)


@pytest.fixture(scope="module", params=["mixtral", *map(zoo.full, ("olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss"))])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """One family after the other; that of two has its weights in a file of their own."""
    folder = tmp_path_factory.mktemp(request.param)
    source = small.save(folder / "source", request.param, max_position_embeddings=LENGTH, num_hidden_layers=2)
    external = request.param in ("olmoe", "gpt_oss")
    options = ExportOptions(external_bytes=0 if external else 2**30)
    summary = export(source, folder / "out", options)
    yield Made(source, folder / "out", summary, AutoModelForCausalLM.from_pretrained(source).eval())
    shutil.rmtree(folder)


@torch.no_grad()
def stock_logits(model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens, use_cache=False).logits
    return logits


@pytest.mark.full
def test_logits_of_many_shapes(made: Made) -> None:
    session = made.session()
    for rows, length in SHAPES:
        tokens = zoo.tokens(made.stock, rows, length, seed=7)
        error = (Runner(session, rows)(tokens) - stock_logits(made.stock, tokens)).abs().max()
        assert float(error) < 1e-5
    assert made.summary.verification.largest_difference < 1e-5


def test_padding_on_the_left_changes_nothing(made: Made) -> None:
    tokens = zoo.tokens(made.stock, 1, 9, seed=9)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), tokens], dim=1)
    other = zoo.tokens(made.stock, 1, 13, seed=10)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    runner = Runner(made.session(), 2)
    found = runner(torch.cat([padded, other]), mask, positions)
    torch.testing.assert_close(found[:1, 4:], stock_logits(made.stock, tokens), rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1:], stock_logits(made.stock, other), rtol=0, atol=1e-5)
    more = zoo.tokens(made.stock, 2, 1, seed=11)
    after = runner(more, torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1), positions[:, -1:] + 1)
    wanted = stock_logits(made.stock, torch.cat([tokens, more[:1]], 1))[:, -1:]
    torch.testing.assert_close(after[:1], wanted, rtol=0, atol=1e-5)


def test_64_greedy_tokens_are_those_of_generate(made: Made) -> None:
    prompt = zoo.tokens(made.stock, 1, 6, seed=12)
    runner, tokens = Runner(made.session(), 1), prompt
    for _ in range(64):
        logits = runner(tokens[:, runner.length :])
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    settings = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "eos_token_id": 10**6}
    wanted = made.stock.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **settings)
    assert tokens.tolist() == wanted.tolist()
    verification = made.summary.verification
    assert verification.tokens_equal == verification.tokens_compared == 64


def test_the_graph_is_sound_and_has_one_node_for_each_moe_layer(made: Made) -> None:
    path = made.out / exporter.GRAPH
    onnx.checker.check_model(str(path), full_check=True)
    onnx.shape_inference.infer_shapes(onnx.load(str(path)), check_type=True, strict_mode=True, data_prop=True)
    graph = onnx.load(str(path)).graph
    nodes = [node for node in graph.node if node.domain == "com.microsoft"]
    assert [node.op_type for node in nodes] == ["MoE"] * len(zoo.experts(made.stock))
    assert [route.layer for route in made.summary.routes] == list(zoo.experts(made.stock))
    assert not made.summary.fallen_back and made.summary.nodes == len(graph.node)
    is_external = made.source.parent.name[:5] in ("olmoe", "gpt_o")
    assert made.summary.external == (made.out / exporter.WEIGHTS).exists() == is_external
    weights = sum(value.numel() * 4 for value in made.stock.parameters())
    assert weights <= made.summary.nbytes < weights + 300_000  # nothing is stored twice


def test_what_lies_beside_the_graph(made: Made) -> None:
    for name in ("config.json", "generation_config.json"):
        assert json.loads((made.out / name).read_text()) == json.loads((made.source / name).read_text())
    text = "the quick brown fox"
    assert AutoTokenizer.from_pretrained(made.out)(text) == AutoTokenizer.from_pretrained(made.source)(text)
    record = json.loads((made.out / exporter.RECORD).read_text())
    assert record["inputs"] == [entry.name for entry in made.session().get_inputs()]
    assert record["outputs"] == [entry.name for entry in made.session().get_outputs()]
    assert record["verification"]["largest_difference"] <= record["verification"]["tolerance"] == 1e-4
    assert {route["route"] for route in record["routes"]} == {"MoE"}
    assert str(made.source.parent) not in json.dumps(record)
    assert not [path.name for path in made.out.parent.iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of one layer."""
    return small.save(tmp_path_factory.mktemp("one") / "source", "mixtral", num_hidden_layers=1)


@pytest.fixture(scope="module")
def whole(source: Path) -> Path:
    """The same, exported without a cache; tests work on copies."""
    export(source, source.parent / "whole", ExportOptions(past=False, tokens=4))
    return source.parent / "whole"


@pytest.mark.full
def test_without_a_cache(source: Path, whole: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(source).eval()
    session = session_of(whole)
    assert [entry.name for entry in session.get_inputs()] == ["input_ids", "attention_mask", "position_ids"]
    assert [entry.name for entry in session.get_outputs()] == ["logits"]
    for rows, length in SHAPES:
        tokens = zoo.tokens(stock, rows, length, seed=7)
        found = Runner(session, rows)(tokens)
        torch.testing.assert_close(found, stock_logits(stock, tokens), rtol=0, atol=1e-5)


@pytest.mark.full
def test_half_precision(source: Path, tmp_path: Path) -> None:
    summary = export(source, tmp_path / "out", ExportOptions(dtype="fp16", opset=18, tokens=16))
    stock = AutoModelForCausalLM.from_pretrained(source).eval().half().float()
    graph = onnx.load(str(tmp_path / "out" / exporter.GRAPH))
    assert {entry.version for entry in graph.opset_import if entry.domain == ""} == {18}
    weights = [value for value in graph.graph.initializer if len(value.dims) > 1]
    assert {value.data_type for value in weights} == {onnx.TensorProto.FLOAT16}
    tokens = zoo.tokens(stock, 2, 9)
    found = Runner(session_of(tmp_path / "out"), 2)(tokens).float()
    torch.testing.assert_close(found, stock_logits(stock, tokens), rtol=0, atol=1e-2)
    assert "rounded to float16" in summary.verification.reference


@pytest.fixture
def retraced(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished graph, which transformers gives as what it has just traced."""
    graph = tmp_path / "elsewhere" / exporter.GRAPH
    graph.parent.mkdir()
    shutil.copyfile(whole / exporter.GRAPH, graph)
    monkeypatch.setattr(OnnxExporter, "export", lambda *_: SimpleNamespace(program=onnx_ir.load(graph)))
    return graph


def tamper(graph: Path, change: Callable[[Any], None]) -> None:
    """Change the second projection of all experts, in place."""
    model = onnx.load(str(graph))
    (stored,) = [value for value in model.graph.initializer if value.name.endswith("down_proj")]
    weight = numpy_helper.to_array(stored).copy()
    change(weight)
    stored.CopyFrom(numpy_helper.from_array(weight, stored.name))
    onnx.save(model, str(graph))


def swap(weight: Any) -> None:
    weight[[2, 3]] = weight[[3, 2]]


def spoil(weight: Any) -> None:
    weight[5, 0, 0] = np.nan


def unsound(graph: Path) -> None:
    model = onnx.load(str(graph))
    model.graph.node[3].input[0] = "nowhere"
    onnx.save(model, str(graph))


PLAIN: dict[str, Any] = {"past": False, "tokens": 4}


@pytest.mark.full
@pytest.mark.parametrize("change", [partial(tamper, change=spoil), unsound])
def test_a_wrong_graph_leaves_nothing(change: Any, source: Path, retraced: Path, tmp_path: Path) -> None:
    change(retraced)
    wrong = r"ONNX graph of MixtralForCausalLM is wrong in .*; nothing was written"
    with pytest.raises(CompressionError, match="" if change is unsound else wrong):
        compressor.export(source, tmp_path / "out", **PLAIN)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


@pytest.mark.full
def test_equal_runs_give_equal_records_and_a_wrong_successor_replaces_none(
    source: Path, retraced: Path, tmp_path: Path
) -> None:
    trees = []
    for _ in range(2):
        summary = compressor.export(source, tmp_path / "out", overwrite=True, **PLAIN)
        assert summary.verification.tokens_equal == 4
        trees.append(small.tree(tmp_path / "out"))
    assert trees[0] == trees[1]
    tamper(retraced, swap)
    with pytest.raises(CompressionError, match="nothing was written"):
        compressor.export(source, tmp_path / "out", overwrite=True, **PLAIN)
    with pytest.raises(CompressionError, match="exists already; name another folder or pass --overwrite"):
        compressor.export(source, tmp_path / "out", **(PLAIN | {"tokens": 5}))
    assert small.tree(tmp_path / "out") == trees[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "out"]


SHORT = 250


def rotated(name: str, kind: str, folder: Path, short: int = SHORT) -> Path:
    """A model whose rotary embeddings were made for so many positions; `SHORT` are more than an export is verified
    with."""
    config = zoo.configure(name)
    half = (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) // 2
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * half, "long_factor": [2.0 + place for place in range(half)]}
        rope |= {"original_max_position_embeddings": short, "short_mscale": 1.1, "long_mscale": 1.3}
    positions = SHORT if kind == "dynamic" else LENGTH
    return small.save(folder, name, rope_parameters=rope, max_position_embeddings=positions)


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_rotations_for_long_texts_are_in_the_graph_too(name: str, tmp_path: Path) -> None:
    source = rotated(name, "longrope", tmp_path / "source")
    export(source, tmp_path / "out", ExportOptions())
    stock = AutoModelForCausalLM.from_pretrained(source).eval()
    session = session_of(tmp_path / "out")
    starts = {}
    for length in (9, SHORT, SHORT + 1, SHORT + 90):
        tokens = zoo.tokens(stock, 2, SHORT + 90, seed=7)[:, :length]
        expected = stock_logits(stock, tokens)
        torch.testing.assert_close(Runner(session, 2)(tokens), expected, rtol=0, atol=1e-4)
        starts[length] = expected[:, :9]
    assert torch.allclose(starts[9], starts[SHORT], atol=1e-4)
    assert float((starts[SHORT] - starts[SHORT + 1]).abs().max()) > 1e-2  # the other range
    step = Runner(session, 2)
    parts = tokens.split([SHORT - 60, 100, 50], dim=1)
    found = [step(part) for part in parts]
    cache = None
    for part, graph in zip(parts, found, strict=True):
        with torch.no_grad():
            output = stock(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        torch.testing.assert_close(graph, output.logits, rtol=0, atol=1e-4)


@pytest.mark.full
def test_rotations_that_change_within_the_verified_lengths_are_exported(tmp_path: Path) -> None:
    source = rotated("qwen3_moe", "longrope", tmp_path / "source", 16)
    export(source, tmp_path / "out", ExportOptions())
    stock = AutoModelForCausalLM.from_pretrained(source).eval()
    for length in (16, 17, 40):
        tokens = zoo.tokens(stock, 2, length)
        found = Runner(session_of(tmp_path / "out"), 2)(tokens)
        torch.testing.assert_close(found, stock_logits(stock, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "kind"), [("mixtral", "dynamic"), ("qwen3_moe", "dynamic"), ("phimoe", "longrope")])
def test_rotations_that_branch_by_length_are_refused_with_the_cause(name: str, kind: str, tmp_path: Path) -> None:
    source = rotated(name, kind, tmp_path / "source")
    with pytest.raises(CompressionError, match=rf"its rotary embeddings \({kind}\) take another branch .*rope_type"):
        compressor.export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
