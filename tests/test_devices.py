"""On another device than the CPU: no tensor meets one of the CPU's, and the output is the CPU's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import compressor
from tests import small

ROOT = Path(__file__).parent.parent


@pytest.mark.full
@pytest.mark.usefixtures("offline", "hasty")
def test_compressing_on_a_device_keeps_its_tensors_apart_from_the_processors(tmp_path: Path) -> None:
    model, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    environment = {**os.environ, "HF_DEACTIVATE_ASYNC_LOAD": "1", "PYTHONPATH": str(ROOT)}  # a mode is a thread's own
    command = [sys.executable, "-m", "tests.pretended", str(model), str(text), str(tmp_path / "there")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "Expected all tensors to be on the same device" in ran.stdout  # it does notice
    compressor.compress(
        str(model), tmp_path / "here", experts=4, strategy="auto", correct="tune", calibration=str(text), samples=4,
        sequence_length=32, dtype="float32", device="cpu",
    )  # fmt: skip
    here, there = (load_file(tmp_path / out / "model.safetensors") for out in ("here", "there"))
    torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-5)
