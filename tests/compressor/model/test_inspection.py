"""`inspect` against the stock model's own modules and against what compressing really leaves."""

from pathlib import Path

import pytest
import torch

import compressor
from compressor.checkpoint.reader import Checkpoint
from compressor.errors import CompressionError
from tests.support import small, zoo

FAST = ("mixtral", "gpt_oss", "qwen3_vl_moe")
FULL = ("qwen2_moe", "deepseek_v3", "granitemoe", "jamba", "ernie4_5_moe", "zaya")
FAMILIES = [*FAST, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)]


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_the_stock_modules_and_compressing_leaves_what_it_says(family: str, tmp_path: Path) -> None:
    stock = zoo.save(family, tmp_path / "in")
    report = compressor.inspect(str(tmp_path / "in"), experts=4)
    done = compressor.compress(str(tmp_path / "in"), tmp_path / "out", experts=4, strategy="model-centric")
    assert (report.parameters, report.bytes) == (done.before.parameters, done.before.bytes)
    assert [(o.experts, o.parameters, o.bytes) for o in report.outcomes] == [
        (4, done.after.parameters, done.after.bytes)
    ]
    assert report.bytes_written == done.after.bytes
    written = Checkpoint(tmp_path / "out").tensors.values()
    assert sum(tensor.nbytes for tensor in written) == report.bytes_written
    parts = {part.name: part.parameters for part in report.parts}
    assert sum(parts.values()) == report.parameters
    assert sum(part.bytes for part in report.parts) == report.bytes
    experts = {id(p): p for name in zoo.experts(stock) for p in stock.get_submodule(name).parameters()}
    own = [p for p in experts.values() if p.shape[0] == 8]
    assert parts["routed experts"] == sum(p.numel() for p in own)
    ends = {
        id(m.weight): m.weight for m in (stock.get_input_embeddings(), stock.get_output_embeddings()) if m is not None
    }
    assert parts["embeddings"] == sum(weight.numel() for weight in ends.values())
    shared = sum(p.numel() for name, p in stock.named_parameters() if "shared_expert" in name)
    assert parts.get("shared experts", 0) == shared


def test_the_largest_layer_is_the_largest_decoder_layer(tmp_path: Path) -> None:
    stock = zoo.save("deepseek_v3", tmp_path)
    sizes = [sum(v.numel() * v.element_size() for v in layer.state_dict().values()) for layer in stock.model.layers]
    report = compressor.inspect(str(tmp_path))
    assert report.largest_layer_bytes == max(sizes)
    assert report.export_memory == 4 * sum(value.numel() for value in stock.state_dict().values())
    assert (report.moe_layers, report.layers) == (2, 3)


def test_no_tensor_is_read(tmp_path: Path) -> None:
    """Else NaN among them would be refused."""
    zoo.save("mixtral", tmp_path)
    small.edit_tensors(tmp_path, lambda tensors: [value.fill_(torch.nan) for value in tensors.values()])
    assert [outcome.experts for outcome in compressor.inspect(str(tmp_path)).outcomes] == [6, 4, 2]


def test_a_model_whose_tokens_visit_every_expert_has_nothing_to_leave(tmp_path: Path) -> None:
    zoo.build("mixtral", num_experts_per_tok=8).save_pretrained(tmp_path)
    report = compressor.inspect(str(tmp_path))
    assert report.outcomes == ()
    assert report.bytes_written == report.bytes
    with pytest.raises(CompressionError, match="4 experts are fewer than the top-k of 8"):
        compressor.inspect(str(tmp_path), experts=4)
