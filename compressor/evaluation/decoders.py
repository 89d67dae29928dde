"""The next token by a model on disk: by stock transformers with the cache it makes itself, or by ONNX Runtime.

Of an ONNX graph, names, shapes and dtypes are its own, so that any layout of a cache works.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.reader import MODEL_NAME, Checkpoint
from compressor.devices import pick_device
from compressor.errors import CompressionError, reason_of
from compressor.extras import require
from compressor.model.architecture import build_stored, load_config, model_class
from compressor.model.inputs import cache_argument
from compressor.model.opened import load_dequantised, pick_dtype
from compressor.progress import quiet_transformers

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


class StockDecoder:
    """Takes tokens that are new, [S], and returns the logits of the token after them, [V] in float32 on the CPU."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._seen: list[int] = []
        self._cache: Any = None
        self._known = inspect.signature(model.forward).parameters
        self._cache_name = cache_argument(model)

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int]) -> Tensor:
        self._seen.extend(tokens)
        fresh = self._seen if self._cache is None else list(tokens)  # a model without a cache reads all of it again
        total, device = len(self._seen), self._model.device
        wanted = {
            # a cache whose first layer is linear attention may count no positions
            "position_ids": torch.arange(total - len(fresh), total, device=device)[None],
            # of a long prompt only the last logits are of use, and all of them take much memory
            "logits_to_keep": 1,
        }
        output = self._model(
            input_ids=torch.tensor([fresh], device=device),
            use_cache=True,
            **{self._cache_name: self._cache},
            **{name: value for name, value in wanted.items() if name in self._known},
        )
        self._cache = getattr(output, self._cache_name, None)
        logits: Tensor = output.logits[0, -1].float().cpu()
        return logits


def stock_decoder(folder: Path, device: str, dtype: str) -> StockDecoder:
    """A decoder by the stock model."""
    return StockDecoder(load_writing(folder, device, dtype))


def load_writing(folder: Path, device: str, dtype: str) -> Any:
    """A stock model that writes text, whole, in its own dtype for 'auto'; what is unfit is a `CompressionError`."""
    from transformers import GenerationMixin

    checkpoint, config, place = Checkpoint(folder), load_config(folder), pick_device(device)
    kind, wanted = model_class(config), pick_dtype(dtype, config, checkpoint)
    if not kind.can_generate():
        raise CompressionError(f"{kind.__name__} does not generate text; name the folder of a causal language model")
    if kind.generate is not GenerationMixin.generate:
        raise CompressionError(f"{kind.__name__} does not generate token by token; use its own generate() instead")
    if checkpoint.quantization:
        return load_dequantised(folder, wanted, place)
    build_stored(checkpoint, config)  # which refuses a config that asks for far more than is stored
    try:
        with quiet_transformers():
            model, report = kind.from_pretrained(str(folder), config=config, dtype=wanted, output_loading_info=True)
            model = model.to(place).eval()
    except Exception as error:  # the loader raises what it likes
        raise CompressionError(f"transformers cannot load {folder}: {reason_of(error)}; check its files") from error
    if missing := sorted(report["missing_keys"]):
        raise CompressionError(
            f"{folder} lacks {len(missing)} tensors of {kind.__name__}, such as {missing[0]!r}; restore its files"
        )
    return model


class OnnxDecoder:
    """Takes tokens that are new, [S], and returns the logits of the token after them, [V] in float32.

    Caches go from one run to the next as they are: no copy, and no dtype that numpy must know.
    """

    def __init__(self, session: Any) -> None:
        """Find tokens, logits and caches; raises `CompressionError` for a graph that is no decoder."""
        self._session = session
        self._inputs = {entry.name: entry for entry in session.get_inputs()}
        outputs = {entry.name for entry in session.get_outputs()}
        for name, entry in self._inputs.items():
            if entry.type not in DTYPES:
                known = ", ".join(DTYPES)
                raise CompressionError(f"{MODEL_NAME}: input {name!r} is a {entry.type}; known are {known}")
        for name, names, what in ((TOKENS, {*self._inputs}, "input"), (LOGITS, outputs, "output")):
            if name not in names:
                known = ", ".join(sorted(names))
                raise CompressionError(
                    f"{MODEL_NAME} has no {what} {name!r} but {known}; export a causal language model"
                )
        self._next, self._caches = dict[str, str](), dict[str, Any]()  # by input: the output of its next value, and now
        for name, entry in self._inputs.items():
            if name in (TOKENS, MASK, POSITIONS):
                continue
            renamed = [name.replace(old, new, 1) for old, new in RENAMINGS if old in name]
            if not (output := next((each for each in renamed if each in outputs), "")):
                raise CompressionError(
                    f"{MODEL_NAME}: nothing is known to feed its input {name!r} with, and no output gives its next "
                    "value; export the model again"
                )
            # no past before the first token, zeros along axes that are fixed; a name is that of a length that may vary
            shape = [
                size if isinstance(size, int) else int(axis == 0 or "batch" in (size or ""))
                for axis, size in enumerate(entry.shape)
            ]
            self._next[name], self._caches[name] = output, ort_value(torch.zeros(shape, dtype=DTYPES[entry.type]))
        self._past = 0  # tokens that the caches hold
        self._seen: list[int] = []

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        self._seen.extend(tokens)
        total, fresh = len(self._seen), self._seen[self._past :]  # without a cache all of it is read again
        inputs = {
            TOKENS: torch.tensor([fresh]),
            MASK: torch.ones(1, total, dtype=torch.long),
            POSITIONS: torch.arange(self._past, total)[None],
        }
        wanted = [name for name in inputs if name in self._inputs]
        fed = {name: ort_value(inputs[name].to(DTYPES[self._inputs[name].type])) for name in wanted}
        logits, *caches = self._session.run_with_ort_values([LOGITS, *self._next.values()], fed | self._caches)
        self._caches = dict(zip(self._next, caches, strict=True))
        self._past = total if self._next else 0
        last: Tensor = torch.utils.dlpack.from_dlpack(logits)[0, -1]
        return last.to("cpu", torch.float32, copy=True)


def ort_value(tensor: Tensor) -> Any:
    """The tensor as ONNX Runtime takes it."""
    from onnxruntime import OrtValue

    return OrtValue.from_dlpack(tensor.contiguous())


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
    require("onnxruntime")
    import onnxruntime

    chosen = providers(device, onnxruntime.get_available_providers())
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3  # what fails is raised, too
    try:
        session = onnxruntime.InferenceSession(str(folder / MODEL_NAME), settings, providers=chosen)
    except Exception as error:  # ONNX Runtime's exceptions share no class
        raise CompressionError(
            f"ONNX Runtime cannot read {folder / MODEL_NAME}: {reason_of(error)}; export it again"
        ) from error
    return OnnxDecoder(session)
