"""Layers written while they are loaded: how often a run reads the base, and that a plan alone makes the same files."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import compressor
from compressor.checkpoint.reader import READ_BYTES, Checkpoint
from tests.support import small, zoo


def tensors(folder: Path) -> dict[str, bytes]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value.numpy().tobytes() for file in files for name, value in load_file(file).items()}


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    "name", ["mixtral", zoo.full("deepseek_v3"), "gpt_oss", zoo.full("mixtral-tied")]
)  # single, dense, fused, tied
@pytest.mark.parametrize(("strategy", "method"), [("reap", "none"), ("hc-smoe", "none"), ("reap", "ridge")])
def test_a_run_reads_each_tensor_once_and_a_second_time_to_correct(
    name: str, strategy: str, method: str, tmp_path: Path
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    zoo.build(name, vocab_size=small.VOCABULARY).save_pretrained(base)
    small.tokenizer().save_pretrained(base)
    text: dict[str, Any] = {"calibration": str(small.text_file(tmp_path)), "samples": 80, "sequence_length": 12}
    steps = [compressor.Prune(strategy=strategy, experts=4, correct=method)]
    outcome = compressor.compress(str(base), out, steps, device="cpu", resident="no", **text)
    assert outcome.heldout is not None
    most = 1 if method == "none" else 2
    infos = Checkpoint(base).tensors
    reads = {tensor: READ_BYTES[base, tensor] / info.nbytes for tensor, info in infos.items()}
    assert {tensor: count for tensor, count in reads.items() if not 1 <= count <= most} == {}
    if method == "none":
        compressor.apply(outcome.plan, tmp_path / "again", model=str(base), device="cpu")
        assert tensors(tmp_path / "again") == tensors(out)
