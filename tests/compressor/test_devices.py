"""On another device than the CPU: no tensor meets one of the CPU's, none is of a dtype that it lacks, same outputs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import compressor
from compressor.devices import as_float64, float64_device, free_memory, pick_device
from tests.support import small
from tests.support.fake_device import REQUESTS

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("lacking", ["", "float64"])
def test_compressing_on_a_device_keeps_its_tensors_apart_from_the_processors(tmp_path: Path, lacking: str) -> None:
    model, text = small.save(tmp_path / "model"), small.text_file(tmp_path, 4 * small.TEXT)
    environment = {**os.environ, "HF_DEACTIVATE_ASYNC_LOAD": "1", "PYTHONPATH": str(ROOT)}  # a mode is a thread's own
    command = [sys.executable, "-m", "tests.support.fake_device", *map(str, (model, text, tmp_path / "there", lacking))]
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "Expected all tensors to be on the same device" in ran.stdout  # it does notice
    for name, request in REQUESTS.items():
        compressor.compress(
            str(model), tmp_path / "here" / name, experts=4, calibration=str(text), samples=16, sequence_length=32,
            dtype="float32", device="cpu", **request,
        )  # fmt: skip
        here, there = (load_file(tmp_path / place / name / "model.safetensors") for place in ("here", "there"))
        torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-5)


def test_float64_is_on_the_device_that_has_it() -> None:
    values = torch.ones(2)
    assert float64_device(values.device) == values.device and as_float64(values).dtype == torch.float64
    assert pick_device("auto").type == (torch.accelerator.current_accelerator() or torch.device("cpu")).type
    assert (free_memory(torch.device("cpu")) or 1) > 0
