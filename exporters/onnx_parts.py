"""An ONNX graph run in ONNX Runtime one decoder layer after the other, so that it need not fit into memory.

The graph on disk is cut into parts that follow one another: what comes before the layers, each layer, and what comes
after. All questions pass a part before the next one is loaded. A question that comes in steps, with the cache of one
handed to the next, passes each part step by step, for a layer's cache is needed by that layer alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.generation.decoders import LOGITS, MASK, POSITIONS, TOKENS
from compressor.progress import Progress
from exporters.onnx_graph import CACHE
from exporters.onnx_reference import Case, Reference
from exporters.onnx_verify import GREEDY, LAYERS, open_session, runtime_fault

SHAPES = ("Shape", "Size")  # what asks a tensor for no value


@dataclass(frozen=True, slots=True)
class Part:
    """Some nodes of a graph as a model of its own: what it takes from the parts before it, and gives to those after."""

    model: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def _used(node: Any) -> set[str]:
    """The values that a node reads, in its inner graphs too."""
    found = set(node.input)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            own = {value.name for value in (*graph.input, *graph.initializer)}
            own |= {name for inner in graph.node for name in inner.output}
            outer = {name for inner in graph.node for name in _used(inner)} | {value.name for value in graph.output}
            found |= outer - own
    return found - {""}


def _levels(graph: Any, owners: Mapping[str, str], units: Sequence[str]) -> list[int]:
    """Of each node the part that it belongs to: no earlier than what it reads, and than the layer whose weights it has.

    0 comes before all layers, 1 is the first; behind the last, whoever reads another tensor is in a part of its own.
    """
    numbers = {unit: number for number, unit in enumerate(units, start=1)}

    def unit_of(name: str) -> int:
        owner = owners.get(name, name)
        return next((number for unit, number in numbers.items() if owner.startswith(f"{unit}.")), 0)

    weights = {value.name: unit_of(value.name) for value in graph.initializer}
    uses = [_used(node) for node in graph.node]
    past = {value.name: 0 for value in graph.input}
    while True:
        levels, known = [], {**weights, **past}
        for node, names in zip(graph.node, uses, strict=True):
            read = names - past.keys() if node.op_type in SHAPES else names
            level = max((known[name] for name in read), default=0)
            outside = any(weights.get(name) == 0 and name in owners for name in names)
            level += level == len(units) and outside
            known |= dict.fromkeys(node.output, level)
            levels.append(level)
        later = {name: max(level, known.get(name.replace(CACHE, "present", 1), 0)) for name, level in past.items()}
        if later == past:
            return levels
        past = later


def cut(model: Any, owners: Mapping[str, str], units: Sequence[str]) -> list[Part]:
    """The parts of an ONNX model [prelude, layers ..., rest]; `owners` tells of what tensor large weights are made."""
    import onnx

    graph = model.graph
    levels = _levels(graph, owners, units)
    given = {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}
    weights = {value.name: value for value in graph.initializer}
    uses = [_used(node) for node in graph.node]
    wanted = {value.name for value in graph.output}
    parts: list[Part] = []
    for level in reversed(range(max(levels) + 1)):
        nodes = [(node, names) for node, names, own in zip(graph.node, uses, levels, strict=True) if own == level]
        made = [name for node, _ in nodes for name in node.output if name]
        read = dict.fromkeys(name for _, names in nodes for name in sorted(names))
        inputs = [name for name in read if name not in weights and name not in {*made}]
        outputs = [name for name in made if name in wanted]
        if lacking := [name for name in inputs if name not in given or not given[name].type.tensor_type.elem_type]:
            raise CompressionError(f"the graph does not say of what type {lacking[0]!r} is; export with --no-stream")
        types = [
            onnx.helper.make_tensor_value_info(name, given[name].type.tensor_type.elem_type, None) for name in inputs
        ]
        piece = onnx.helper.make_graph(
            [node for node, _ in nodes],
            f"part {level}",
            types,
            [onnx.ValueInfoProto(name=name) for name in outputs],
            [weights[name] for name in read if name in weights],
        )
        whole = onnx.helper.make_model(
            piece, opset_imports=model.opset_import, ir_version=model.ir_version, functions=model.functions
        )
        if outputs:
            parts.append(Part(whole, tuple(inputs), tuple(outputs)))
        wanted |= {*inputs}
    return parts[::-1]


@dataclass(slots=True)
class Step:
    """New tokens [B, S] with the mask [B, past + S], and the values that the graph has given for them so far."""

    tokens: Tensor
    mask: Tensor
    values: dict[str, Any] = field(default_factory=dict)


def steps_of(tokens: Tensor, mask: Tensor, chunks: Sequence[int]) -> tuple[Step, ...]:
    """Tokens [B, S] with their mask, cut into chunks that follow one another."""
    pieces, ends = tokens.split(list(chunks), dim=1), torch.tensor(chunks).cumsum(0).tolist()
    return tuple(Step(piece, mask[:, :end]) for piece, end in zip(pieces, ends, strict=True))


class Parts:
    """A graph on disk that is asked everything at once, part by part."""

    def __init__(self, path: Path, owners: Mapping[str, str], units: Sequence[str]) -> None:
        import onnx

        model = onnx.load(str(path), load_external_data=False)
        self.place = path.with_name(f".{path.name}.part")  # beside the file of weights, which it names
        self.inputs = {value.name: value.type.tensor_type for value in model.graph.input}
        self.parts = cut(model, owners, units)
        self.outputs = {value.name for value in model.graph.output}

    def answer(self, questions: Sequence[Sequence[Step]]) -> Iterator[int]:
        """Have every step's `logits` [B, S, V] in its values in the end; yields how many parts have been passed."""
        last = {name: number for number, part in enumerate(self.parts) for name in part.inputs}
        for name in self.inputs.keys() & last.keys():
            present = name.replace(CACHE, "present", 1)
            last[present] = max(last.get(present, 0), last[name])
        for question in questions:
            for step in question:
                step.values |= self._given(step)
        for number, part in enumerate(self.parts):
            session = self._load(part)
            for question in questions:
                for place, step in enumerate(question):
                    self._pass(session, part, question[place - 1] if place else None, step)
                for step in question:
                    gone = [name for name in step.values if last.get(name, 0) <= number and name != LOGITS]
                    for name in gone:
                        del step.values[name]
            del session
            yield number + 1

    def _load(self, part: Part) -> Any:
        try:
            self.place.write_bytes(part.model.SerializeToString())
            return open_session(self.place)
        finally:
            self.place.unlink(missing_ok=True)

    def _given(self, step: Step) -> dict[str, Any]:
        """The inputs of a step beside the cache."""
        positions = (step.mask.cumsum(-1) - 1).clamp(min=0)[:, -step.tokens.shape[1] :]
        found = {TOKENS: step.tokens, MASK: step.mask, POSITIONS: positions}
        return {name: _value(value) for name, value in found.items() if name in self.inputs}

    def _pass(self, session: Any, part: Part, before: Step | None, step: Step) -> None:
        caches = {name: self._cache(name, before, step) for name in part.inputs if name not in step.values}
        fed = {name: step.values.get(name, caches.get(name)) for name in part.inputs}
        try:
            found = session.run_with_ort_values(list(part.outputs), fed)
        except Exception as error:
            past = step.mask.shape[1] - step.tokens.shape[1]
            raise runtime_fault(error, list(step.tokens.shape), past) from error
        step.values |= dict(zip(part.outputs, found, strict=True))

    def _cache(self, name: str, before: Step | None, step: Step) -> Any:
        """What the step before left, or nothing yet; zeros of that shape where the part comes before the one that uses
        the values."""
        present = name.replace(CACHE, "present", 1)
        if before is not None and present in before.values:
            return before.values[present]
        past = step.mask.shape[1] - step.tokens.shape[1]
        known = {"batch": step.tokens.shape[0], "past": past}
        shape = [known[dim.dim_param] if dim.dim_param else dim.dim_value for dim in self.inputs[name].shape.dim]
        return _value(torch.zeros(shape, dtype=_dtype(self.inputs[name].elem_type)))


def _dtype(code: int) -> torch.dtype:
    import onnx_ir

    return {"FLOAT": torch.float32, "FLOAT16": torch.float16}.get(onnx_ir.DataType(code).name, torch.int64)


def _value(tensor: Tensor) -> Any:
    from onnxruntime import OrtValue

    return OrtValue.from_dlpack(tensor.contiguous())


class LayeredGraph:
    """Answers by the parts of a graph, which was asked everything beforehand."""

    how = LAYERS

    def __init__(self, parts: Parts, reference: Reference, chunked: bool, progress: Progress) -> None:
        """Ask everything; with `chunked` text after the prompt comes token by token, as with a cache it can."""
        asked = {case.name: steps_of(case.tokens, case.mask, case.chunks) for case in reference.cases}
        text, self.prompt = reference.text[:, :-1], reference.prompt.shape[1]
        if len(reference.greedy):
            chunks = (self.prompt, *[1] * (text.shape[1] - self.prompt)) if chunked else (text.shape[1],)
            asked[GREEDY] = steps_of(text, torch.ones_like(text), chunks)
        progress.start("verifying layer by layer", len(parts.parts))
        for number in parts.answer(list(asked.values())):
            progress.advance(f"part {number}")
        self.logits = {name: _logits_of(steps) for name, steps in asked.items()}

    def case(self, case: Case) -> Tensor:
        """The logits [B, S, V] of a case."""
        return self.logits[case.name]

    def greedy(self, reference: Reference) -> Tensor:
        """The logits [N, V] after the prompt and after each token that followed it but the last."""
        return self.logits[GREEDY][0, self.prompt - 1 :]


def _logits_of(question: Sequence[Step]) -> Tensor:
    """The logits [B, S, V] of all steps of an answered question in float32."""
    return torch.cat([torch.utils.dlpack.from_dlpack(step.values[LOGITS]).float() for step in question], dim=1)
