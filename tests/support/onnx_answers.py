"""What stock models in memory answer, without the exporter's streaming, and graphs in ONNX Runtime call by call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from compressor.model.architecture import experts_modules
from exporters.onnx.reference import Case, Reference, model_inputs, questions
from tests.support import zoo

Answer = Callable[[Case], Tensor]
KINDS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


@torch.no_grad()
def answer(model: Any, case: Case) -> Tensor:
    """Logits [B, S, V] of the whole case at once."""
    logits: Tensor = model(**model_inputs(model, case.tokens, 0, case.mask), use_cache=False).logits
    return logits.float().clone()


def observe(model: Any, past: bool, tokens: int = 64) -> Reference:
    """The answers to all cases of a graph; no sensitivity."""
    cases = questions(model, past, tokens)
    answered = (Case(each.name, each.tokens, each.mask, each.chunks, answer(model, each)) for each in cases)
    return Reference(type(model).__name__, tuple(answered))


def answers(reference: Reference, wrong: Callable[[Case, Tensor], Tensor]) -> Iterator[Tensor]:
    """The reference's own logits, changed by `wrong`."""
    return (wrong(case, case.logits.clone()) for case in reference.cases)


def experts_of(name: str, **overrides: Any) -> Any:
    """The first experts module of a tiny model."""
    return next(iter(experts_modules(zoo.build(name, **overrides))))[1]


def session_of(folder: Path) -> Any:
    """The exported graph in one thread of ONNX Runtime."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(folder / "model.onnx"), settings, ["CPUExecutionProvider"])


def run_node(
    kind: str,
    inputs: Sequence[str],
    attributes: Mapping[str, Any],
    feed: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    half: bool = False,
) -> Tensor:
    """One com.microsoft node alone in ONNX Runtime: float32 of the shape of `x`, computed in float16 if `half`."""
    dtype, code = (np.float16, TensorProto.FLOAT16) if half else (np.float32, TensorProto.FLOAT)
    arrays = {name: value.detach().numpy() for name, value in tensors.items()}
    stored = [
        numpy_helper.from_array(array.astype(dtype) if array.dtype == np.float32 else array, name)
        for name, array in arrays.items()
    ]
    infos = [helper.make_tensor_value_info(name, code, list(value.shape)) for name, value in feed.items()]
    output = helper.make_tensor_value_info("y", code, list(feed["x"].shape))
    node = helper.make_node(kind, inputs, ["y"], domain="com.microsoft", **attributes)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "node", infos, [output], stored)
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {name: value.numpy().astype(dtype) for name, value in feed.items()})
    return torch.from_numpy(found.astype(np.float32))


class Runner:
    """Calls a graph by the names of its inputs and outputs alone, and keeps its cache tensors as the past."""

    def __init__(self, session: Any, rows: int) -> None:
        sizes = {"batch": rows, "past": 0}
        self.session, self.length = session, 0
        self.past = {
            entry.name: np.zeros([sizes.get(side, side) for side in entry.shape], KINDS[entry.type])
            for entry in session.get_inputs()
            if entry.name.startswith("past_key_values.")
        }

    def __call__(self, tokens: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """[B, S] after the tokens of earlier calls -> [B, S, V]."""
        rows, count = tokens.shape
        if mask is None:
            mask = torch.ones(rows, self.length + count, dtype=torch.long)
        if positions is None:
            positions = torch.arange(self.length, self.length + count).expand(rows, -1)
        feed = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        names = [entry.name for entry in self.session.get_outputs()]
        inputs = {name: value.contiguous().numpy() for name, value in feed.items()} | self.past
        outputs = dict(zip(names, self.session.run(None, inputs), strict=True))
        self.past = {name: outputs[name.replace("past_key_values", "present")] for name in self.past}
        self.length += count
        return torch.from_numpy(outputs["logits"])
