"""What is made of an output of `quantize`: fewer experts as they are stored, or refitted ones, and what is said."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from compressor import Outcome, Quantize, compress
from compressor.checkpoint.reader import Checkpoint, Size
from compressor.document.blocks import Text, plain_words
from compressor.formatting import human_bytes
from compressor.hub.card import card_text
from compressor.pipeline.outcome import read_outcome
from compressor.report.terminal import outcome_blocks
from tests.support import quantized, small, zoo

KEPT = 6


def quantised(folder: Path, scheme: str) -> Path:
    """A small Mixtral, quantised."""
    small.save(folder / "model", intermediate_size=32)
    compress(str(folder / "model"), folder / scheme, [Quantize(scheme=scheme)])
    return folder / scheme


def pruned(source: Path, correct: str) -> Outcome:
    """Made of it with fewer experts, chosen on text."""
    wanted = {"experts": KEPT, "strategy": "count-guided", "correct": correct, "samples": 8, "sequence_length": 32}
    text = small.text_file(source.parent)
    return compress(str(source), source.parent / correct, calibration=str(text), **wanted)


def parameters(folder: Path) -> int:
    """Of the stock model of a config, without the quantisation."""
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return sum(value.numel() for value in AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.parametrize("scheme", ["int4", zoo.full("fp8"), "nvfp4"])
def test_experts_are_dropped_as_they_are_stored(scheme: str, tmp_path: Path) -> None:
    source = quantised(tmp_path, scheme)
    outcome = pruned(source, "none")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "none"))
    layers = {int(layer.module.split(".")[2]): layer for layer in outcome.expert_plan.layers}
    assert len(before) - len(after) == sum(
        len([name for name in before if f"layers.{number}." in name and f"experts.{expert}." in name])
        for number, layer in layers.items()
        for expert in layer.dropped
    )
    for name, value in after.items():
        parts = name.split(".")
        if "experts" in parts:
            place = parts.index("experts") + 1
            parts[place] = str(layers[int(parts[2])].groups[int(parts[place])].members[0])
            assert torch.equal(value.view(torch.uint8), before[".".join(parts)].view(torch.uint8))
    assert outcome.after.parameters == parameters(tmp_path / "none") < outcome.before.parameters
    assert outcome.before.parameters == parameters(tmp_path / "model")
    assert outcome.before.bytes == sum(value.nbytes for value in before.values())  # of what was read, not of its base
    assert outcome.quantized is not None and {"compressed-tensors", scheme} <= tags(tmp_path / "none")


def test_sizes_before_are_those_of_the_folder_that_was_read(tmp_path: Path) -> None:
    source = quantised(tmp_path, "int4")
    pruned(source, "none")
    again = compress(str(tmp_path / "none"), tmp_path / "again", experts=2, strategy="aimer")
    read = load_file(tmp_path / "none" / "model.safetensors")
    for outcome in (again, read_outcome(tmp_path / "again")):
        assert (outcome.experts_before, outcome.experts_after) == (KEPT, 2)
        assert outcome.before == Size(parameters(tmp_path / "none"), sum(value.nbytes for value in read.values()))


def test_what_is_refitted_is_not_called_quantised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = quantised(tmp_path, "int4")
    outcome = pruned(source, "ridge")
    sizes = [human_bytes(size.bytes) for size in (outcome.after, outcome.before)]
    assert f"all weights are written in bfloat16: {sizes[0]}, the source has {sizes[1]}" in caplog.text
    told = " ".join(plain_words(block.words) for block in outcome_blocks(outcome) if isinstance(block, Text))
    assert outcome.quantized is None and "Quantised" not in told
    assert "compressed-tensors" not in tags(tmp_path / "ridge")


def tags(folder: Path) -> set[str]:
    """Of the card."""
    lines = card_text(folder, "org/smaller", base=folder).text.split("---\n")[1].splitlines()
    return {line.removeprefix("- ") for line in lines if line.startswith("- ")}


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "pack-quantized", "float-quantized", "nvfp4-pack-quantized"])
def test_parameters_are_weights_however_they_are_packed(kind: str, tmp_path: Path) -> None:
    if kind in ("fp8", "mxfp4"):
        {"fp8": quantized.save_fp8, "mxfp4": quantized.save_mxfp4}[kind](tmp_path / "model")
    else:
        quantized.save_compressed_tensors(tmp_path / "model", format=kind)
    plain = quantized.dequantized(tmp_path / "model")
    weights = sum(math.prod(value.shape) for name, value in plain.items() if not name.endswith("input_global_scale"))
    assert Size.of(Checkpoint(tmp_path / "model").tensors.values()).parameters == weights
