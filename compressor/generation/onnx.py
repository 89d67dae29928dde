"""The next token by ONNX Runtime; names, shapes and dtypes are the graph's own, so that any layout of a cache works."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.reader import MODEL_NAME
from compressor.errors import CompressionError, reason_of

TOKENS, MASK, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
RENAMINGS = (("past_key_values", "present"), ("past", "present"), ("input", "output"))  # of a cache: in -> out
DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(bool)": torch.bool,
}


@dataclass(frozen=True, slots=True)
class GraphInput:
    """An input of the graph; a dimension is a number, or the name of an axis whose length may vary."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """What a decoder's graph takes and gives; `caches` pairs the name of every cache's input with its output's."""

    inputs: dict[str, GraphInput]
    caches: tuple[tuple[str, str], ...]

    @property
    def outputs(self) -> tuple[str, ...]:
        """What is asked of a run: the logits, then the caches."""
        return (LOGITS, *(output for _, output in self.caches))


def read_graph(session: Any) -> Graph:
    """Find tokens, logits and caches; raises `CompressionError` for a graph that is no decoder."""
    inputs = {entry.name: _graph_input(entry) for entry in session.get_inputs()}
    outputs = {entry.name for entry in session.get_outputs()}
    for name, found, what in ((TOKENS, inputs, "input"), (LOGITS, outputs, "output")):
        if name not in found:
            raise CompressionError(
                f"{MODEL_NAME} has no {what} {name!r} but {', '.join(sorted(found))}; export a causal language model"
            )
    caches = tuple((name, _output_of(name, outputs)) for name in inputs if name not in (TOKENS, MASK, POSITIONS))
    return Graph(inputs, caches)


def _graph_input(entry: Any) -> GraphInput:
    if entry.type not in DTYPES:
        raise CompressionError(f"{MODEL_NAME}: input {entry.name!r} is a {entry.type}; known are {', '.join(DTYPES)}")
    return GraphInput(entry.name, DTYPES[entry.type], tuple(entry.shape))


def _output_of(name: str, outputs: set[str]) -> str:
    """The output that gives a cache's next value."""
    for old, new in RENAMINGS:
        if old in name and (output := name.replace(old, new, 1)) in outputs:
            return output
    raise CompressionError(
        f"{MODEL_NAME}: nothing is known to feed its input {name!r} with, and no output gives its next value; "
        "export the model again"
    )


def empty_cache(entry: GraphInput) -> Tensor:
    """What a cache holds before the first token: batch 1, no past, zeros along axes that are fixed."""
    shape = [
        size if isinstance(size, int) else 1 if axis == 0 or "batch" in (size or "") else 0
        for axis, size in enumerate(entry.shape)
    ]
    return torch.zeros(shape, dtype=entry.dtype)


class OnnxDecoder:
    """Takes tokens that are new, [S], and returns the logits of the token after them, [V] in float32."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._graph = read_graph(session)
        self._value = importlib.import_module("onnxruntime").OrtValue
        self._seen: list[int] = []
        # caches go from one run to the next as they are: no copy, and no dtype that numpy must know
        self._caches = {
            name: self._value.from_dlpack(empty_cache(self._graph.inputs[name])) for name, _ in self._graph.caches
        }

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        self._seen.extend(tokens)
        fresh = list(tokens) if self._graph.caches else self._seen  # without a cache all of it is read again
        total = len(self._seen)
        ids = {
            TOKENS: torch.tensor([fresh]),
            MASK: torch.ones(1, total),
            POSITIONS: torch.arange(total - len(fresh), total)[None],
        }
        fed = {
            name: self._value.from_dlpack(value.to(self._graph.inputs[name].dtype))
            for name, value in ids.items()
            if name in self._graph.inputs
        }
        logits, *caches = self._session.run_with_ort_values(list(self._graph.outputs), fed | self._caches)
        self._caches = {name: value for (name, _), value in zip(self._graph.caches, caches, strict=True)}
        every = torch.utils.dlpack.from_dlpack(logits)
        return every[0, -1].to("cpu", torch.float32, copy=True)


def providers(device: str, available: Sequence[str]) -> list[Any]:
    """Execution providers for `auto`, `cpu`, `cuda` or `cuda:1`; refuses one that is not installed."""
    cpu, cuda = "CPUExecutionProvider", "CUDAExecutionProvider"
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and not number.isdecimal()):
        raise CompressionError(f"ONNX Runtime has no device {device!r} here; pass --device cpu, cuda or auto")
    if kind == "cuda" and cuda not in available:
        raise CompressionError(f"device {device!r} needs onnxruntime-gpu, which is not installed; pass --device cpu")
    if kind == "cpu" or cuda not in available:
        return [cpu]
    return [(cuda, {"device_id": int(number or 0)}), cpu]


def onnx_decoder(folder: Path, device: str, dtype: str) -> OnnxDecoder:
    """Open the folder's graph; raises `CompressionError` if ONNX Runtime is not there or cannot read it."""
    if dtype != "auto":
        raise CompressionError(f"{folder} is an ONNX model, which computes in the dtype it has; leave out --dtype")
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise CompressionError(
            f'{folder} is an ONNX model, and onnxruntime is not installed; run pip install "moe-compressor[onnx]"'
        ) from error
    chosen = providers(device, runtime.get_available_providers())
    settings = runtime.SessionOptions()
    settings.log_severity_level = 3  # what fails is raised, too
    try:
        session = runtime.InferenceSession(str(folder / MODEL_NAME), settings, providers=chosen)
    except Exception as error:  # ONNX Runtime's exceptions share no class
        raise CompressionError(
            f"ONNX Runtime cannot read {folder / MODEL_NAME}: {reason_of(error)}; export it again"
        ) from error
    return OnnxDecoder(session)
