"""A graph in ONNX Runtime, asked step by step with its cache."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError, reason_of
from exporters.onnx_graph import CACHE

DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(int64)": torch.int64,
    "tensor(bool)": torch.bool,
}


def runtime_reason(error: Exception) -> str:
    """What ONNX Runtime says about a node that failed, without its codes and source files."""
    text = " ".join(str(error).split())
    node = re.search(r"running (\w+) node\b", text)
    plain = re.split(r"Status Message: | : [A-Z_]+ : |\w\([^()]*\) (?=\S)", text)[-1]
    return reason_of(type(error)(f"{node[1]}: {plain}" if node else plain))


class Session:
    """A graph in ONNX Runtime on the CPU, with its cache between calls."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 4  # what fails is told by the exception
        settings.intra_op_num_threads = torch.get_num_threads()
        try:
            self.inner = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime raises classes of its own
            raise CompressionError(f"ONNX Runtime does not load the exported graph: {reason_of(error)}") from error
        self.inputs = {entry.name: entry for entry in self.inner.get_inputs()}
        self.outputs = [entry.name for entry in self.inner.get_outputs()]
        self.cache: dict[str, Any] = {}
        self.past = 0

    def start(self, rows: int) -> None:
        """Empty the cache for so many sequences."""
        sizes = {"batch": rows, "past": 0}
        self.past = 0
        self.cache = {
            name: torch.zeros([sizes.get(dim, dim) for dim in entry.shape], dtype=DTYPES[entry.type]).numpy()
            for name, entry in self.inputs.items()
            if name.startswith(CACHE)
        }

    def step(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Logits [B, S, V] of new tokens [B, S]; the mask [B, past + S] covers the earlier ones too."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, self.past :].contiguous()
        given = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        feed = {name: value.numpy() for name, value in given.items() if name in self.inputs}
        try:
            values = self.inner.run(None, {**feed, **self.cache})
        except Exception as error:
            raise CompressionError(
                f"ONNX Runtime fails on {list(tokens.shape)} tokens after {self.past}: {runtime_reason(error)}"
            ) from error
        found = dict(zip(self.outputs, values, strict=True))
        self.cache = {name: found[name.replace(CACHE, "present", 1)] for name in self.cache}
        self.past += tokens.shape[1] if self.cache else 0
        return torch.from_numpy(found["logits"]).float()
