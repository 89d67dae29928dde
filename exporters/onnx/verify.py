"""Verify that an ONNX graph computes what the stock model does, on all of its cases.

A graph is cut into parts that follow one another: what comes before the layers, each layer, and what comes after; or
it is one part, where it fits into memory. All cases pass a part before the next one is loaded. A case in chunks, with
the cache of one handed to the next, passes each part chunk by chunk: a layer alone needs its cache.
"""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressor.errors import CompressionError, reason_of
from compressor.evaluation.decoders import LOGITS, MASK, POSITIONS, TOKENS, ort_value
from compressor.progress import Progress
from exporters.onnx.reference import CONTINUED, PROMPT, Case, Reference, unit_of
from exporters.onnx.trace import present_name

STOCK = "the stock model in float32"
WHOLE = "the whole graph, the likeliest token after each of a given text"
LAYERS = "layer by layer, the likeliest token after each of a given text"
SHAPES = ("Shape", "Size")  # what asks a tensor for no value


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far logits may be off: `absolute`, or `relative` times the largest logit if that is more.

    A model that amplifies rounding is as far from itself in another order of adding: a graph may be off by `units`
    times what one unit in the last place of the layers' inputs moves the logits, up to a thousandth of the largest. A
    fault of a graph moves them by far more. In rounded arithmetic a router's near tie may be broken differently, and
    the token gets another expert: up to a `share` of the tokens may lie beyond.
    """

    absolute: float
    relative: float
    share: float = 0.0
    units: float = 8.0  # correct graphs of models that amplify rounding came to 2 to 3

    def of(self, reference: Reference) -> float:
        """The bound for the logits of a graph."""
        largest = reference.largest
        return max(self.absolute, self.relative * largest, min(self.units * reference.sensitivity, MOST * largest))


MOST = 1e-3  # of the largest logit, however much a model amplifies rounding
EXACT = Tolerance(1e-4, 1e-5)
HALF = Tolerance(1e-2, 1e-2, share=0.02)


@dataclass(frozen=True, slots=True)
class Verification:
    """How well a graph agreed with the stock model."""

    largest_difference: float  # of any logit in any case, but for the ties
    tolerance: float
    largest_logit: float
    shapes: tuple[tuple[int, int], ...]
    cases: tuple[tuple[str, float], ...]  # the largest difference of each case
    tokens_compared: int
    tokens_equal: int
    reference: str = STOCK
    how: str = WHOLE  # in one piece, or layer by layer
    ties: int = 0  # tokens beyond the tolerance, of those that rounded arithmetic may send to another expert
    tokens: int = 0  # whose logits were compared
    sensitivity: float = 0.0  # how far one unit in the last place of its layers' inputs moves the stock logits


def compare(
    logits: Iterable[Tensor], reference: Reference, tolerance: Tolerance, label: str = STOCK, how: str = WHOLE
) -> Verification:
    """Compare a graph's logits [B, S, V] of each case with the stock model's, with the same rounded weights if any.

    Raises `CompressionError` at the first case with more tokens beyond the tolerance than may be near ties.
    """
    bound, cases = tolerance.of(reference), list[tuple[str, float]]()
    ties, tokens, compared, equal = 0, 0, 0, 0
    for case, computed in zip(reference.cases, logits, strict=True):
        if computed.shape != case.logits.shape:
            computed = torch.full_like(case.logits, torch.nan)
        gaps = (computed[case.mask.bool()] - case.real).abs().amax(-1)  # [T], infinite where there is no number
        gaps = gaps.nan_to_num(nan=torch.inf, posinf=torch.inf)
        beyond = ~(gaps <= bound)
        if int(beyond.sum()) > int(tolerance.share * len(gaps) + 0.5) or bool(gaps.isinf().any()):
            raise CompressionError(
                f"the ONNX graph of {reference.model} is wrong in the case {case.name!r}: its logits differ from the "
                f"stock model's by {float(gaps.max()):.2g}, more than {bound:.2g}; nothing was written"
            )
        cases.append((case.name, float(gaps.where(~beyond, 0.0).max())))
        ties, tokens = ties + int(beyond.sum()), tokens + len(gaps)
        if case.name == CONTINUED:
            same = computed[0, PROMPT - 1 :].argmax(-1) == case.logits[0, PROMPT - 1 :].argmax(-1)
            compared, equal = len(same), int(same.sum())
    return Verification(
        largest_difference=max(largest for _, largest in cases),
        tolerance=bound,
        largest_logit=reference.largest,
        shapes=tuple((len(case.tokens), case.tokens.shape[1]) for case in reference.cases if case.name != CONTINUED),
        cases=tuple(cases),
        tokens_compared=compared,
        tokens_equal=equal,
        reference=label,
        how=how,
        ties=ties,
        tokens=tokens,
        sensitivity=reference.sensitivity,
    )


@dataclass(frozen=True, slots=True)
class RoundingCost:
    """What rounding the experts changes: the stock model's logits before and after."""

    largest_difference: float
    largest_logit: float  # before
    same_choice: float  # the share of the tokens after which the most likely token is the same


def rounding_cost(before: Reference, after: Reference) -> RoundingCost:
    """Compare the cases that both references hold, at real tokens only."""
    later = {case.name: case for case in after.cases}
    pairs = [(case.real, later[case.name].real) for case in before.cases if case.name in later]
    one, two = (torch.cat(logits) for logits in zip(*pairs, strict=True))  # [T, V]
    return RoundingCost(
        largest_difference=float((one - two).abs().max()),
        largest_logit=float(one.abs().max()),
        same_choice=float((one.argmax(-1) == two.argmax(-1)).float().mean()),
    )


def runtime_reason(error: Exception) -> str:
    """What ONNX Runtime says about a node that failed, without its codes and source files."""
    text = " ".join(str(error).split())
    node = re.search(r"running (\w+) node\b", text)
    plain = re.split(r"Status Message: | : [A-Z_]+ : |\w\([^()]*\) (?=\S)", text)[-1]
    return reason_of(type(error)(f"{node[1]}: {plain}" if node else plain))


def open_session(path: Path) -> Any:
    """A graph in ONNX Runtime on the CPU; raises `CompressionError` for one that it does not load."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4  # what fails is told by the exception
    settings.intra_op_num_threads = torch.get_num_threads()
    try:
        return onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime raises classes of its own
        raise CompressionError(f"ONNX Runtime does not load the exported graph: {reason_of(error)}") from error


@dataclass(frozen=True, slots=True)
class Part:
    """Some nodes of a graph as a model of its own."""

    model: Any  # None: the whole graph as it lies on disk
    inputs: tuple[str, ...]  # taken from the parts before
    outputs: tuple[str, ...]  # given to the parts after


def _levels(
    graph: Any, reads: Mapping[Any, set[Any]], owners: Mapping[str, str], units: Sequence[str]
) -> dict[Any, int]:
    """Number each node's part: no earlier than what it reads, and than the layer whose weights it has.

    0 comes before all layers, 1 is the first; behind the last, whatever reads another tensor is in a part of its own.
    """
    numbers = {None: 0} | {unit: number for number, unit in enumerate(units, start=1)}
    weights = {value: numbers[unit_of(owners.get(name, name), units)] for name, value in graph.initializers.items()}
    presents = {value.name: value for value in graph.outputs}
    past = dict.fromkeys(graph.inputs, 0)
    while True:
        levels, known = dict[Any, int](), {**weights, **past}
        for node, values in reads.items():
            read = values - past.keys() if node.op_type in SHAPES else values
            level = max((known[value] for value in read), default=0)
            outside = any(weights.get(value) == 0 and value.name in owners for value in values)
            levels[node] = level + (level == len(units) and outside)
            known |= dict.fromkeys(node.outputs, levels[node])
        later = {each: max(level, known.get(presents.get(present_name(each.name)), 0)) for each, level in past.items()}
        if later == past:
            return levels
        past = later


def cut(program: Any, owners: Mapping[str, str], units: Sequence[str]) -> list[Part]:
    """The parts [prelude, layers ..., rest] of an onnx_ir model; `owners` tells what large weights are made of."""
    import onnx_ir
    from onnx_ir.analysis import analyze_implicit_usage

    graph, inner = program.graph, analyze_implicit_usage(program.graph)
    reads: dict[Any, set[Any]] = {}  # of each node, in its inner graphs too
    for node in graph:
        reads[node] = {value for value in node.inputs if value is not None}
        for attribute in node.attributes.values():
            if attribute.type == onnx_ir.AttributeType.GRAPH:
                reads[node] |= inner[attribute.as_graph()]
    levels = _levels(graph, reads, owners, units)
    wanted, imports, functions = {*graph.outputs}, graph.opset_imports, [*program.functions.values()]
    parts: list[Part] = []
    for level in reversed(range(max(levels.values()) + 1)):
        nodes = [node for node in graph if levels[node] == level]
        produced = [value for node in nodes for value in node.outputs]
        read = dict.fromkeys(value for node in nodes for value in sorted(reads[node], key=lambda value: value.name))
        inputs = [value for value in read if not value.is_initializer() and value not in {*produced}]
        outputs = [value for value in produced if value in wanted]
        if lacking := [value.name for value in inputs if value.dtype is None]:
            raise CompressionError(f"the graph does not say of what type {lacking[0]!r} is; export with --no-stream")
        weights = [value for value in read if value.is_initializer()]
        view = onnx_ir.GraphView(inputs, outputs, nodes=nodes, initializers=weights, opset_imports=imports, name="part")
        whole = onnx_ir.to_proto(onnx_ir.Model(view, ir_version=program.ir_version, functions=functions))
        del whole.graph.value_info[:]  # shapes, by which ONNX Runtime would fuse, and so round, otherwise
        for value in (*whole.graph.input, *whole.graph.output):
            value.type.tensor_type.ClearField("shape")
        if outputs:
            names = (tuple(value.name for value in values) for values in (inputs, outputs))
            parts.append(Part(whole, *names))
        wanted |= {*inputs}
    return parts[::-1]


@dataclass(slots=True)
class Step:
    """A chunk of new tokens, and the values that the graph has been given and has made for them so far."""

    shape: list[int]  # of the tokens: [B, S]
    past: int  # tokens before them
    values: dict[str, Any]

    def keep(self, needed: Set[str]) -> None:
        """Drop all other values."""
        self.values = {name: value for name, value in self.values.items() if name in needed}


class Graph:
    """A graph on disk: in one session, as whoever uses it will run it, or cut at its decoder layers."""

    def __init__(self, path: Path, owners: Mapping[str, str] | None = None, units: Sequence[str] = ()) -> None:
        """With `units` it is cut at these layers; `owners` tells of what tensor large weights are made."""
        import onnx_ir

        program = onnx_ir.load(path)
        self.path = path
        self.inputs = {value.name: value for value in program.graph.inputs}
        whole = Part(None, tuple(self.inputs), tuple(value.name for value in program.graph.outputs))
        self.parts = cut(program, owners or {}, units) if units else [whole]
        self.how = WHOLE if len(self.parts) == 1 else LAYERS  # as a record names it

    def answers(self, cases: Sequence[Case], progress: Progress) -> list[Tensor]:
        """The logits [B, S, V] of each case."""
        chunked = [self._steps(case) for case in cases]
        progress.start("verifying", len(chunked) * len(self.parts))
        for number, part in enumerate(self.parts):
            later = {name for other in self.parts[number + 1 :] for name in other.inputs}
            needed = {LOGITS, *later, *map(present_name, later)}
            session = self._load(part)
            for steps in chunked:
                for before, step in zip([None, *steps], steps, strict=False):
                    self._pass(session, part, before, step)
                    if before is not None:  # its values are needed by its successor, and by later parts
                        before.keep(needed)
                steps[-1].keep(needed)
                progress.advance(f"part {number + 1} of {len(self.parts)}")
            del session
        found = ([torch.utils.dlpack.from_dlpack(step.values[LOGITS]).float() for step in steps] for steps in chunked)
        return [torch.cat(logits, dim=1) for logits in found]

    def _steps(self, case: Case) -> list[Step]:
        steps = []
        for tokens, end in zip(case.tokens.split(list(case.chunks), dim=1), accumulate(case.chunks), strict=True):
            mask, past = case.mask[:, :end], end - tokens.shape[1]
            inputs = {TOKENS: tokens, MASK: mask, POSITIONS: (mask.cumsum(-1) - 1).clamp(min=0)[:, past:]}
            values = {name: ort_value(value) for name, value in inputs.items() if name in self.inputs}
            steps.append(Step(list(tokens.shape), past, values))
        return steps

    def _load(self, part: Part) -> Any:
        if part.model is None:
            return open_session(self.path)
        place = self.path.with_name(f".{self.path.name}.part")  # beside the file of weights, which it names
        try:
            place.write_bytes(part.model.SerializeToString())
            return open_session(place)
        finally:
            place.unlink(missing_ok=True)

    def _pass(self, session: Any, part: Part, before: Step | None, step: Step) -> None:
        """Run one part on one step, with the cache that the step before left, or zeros of its shape.

        Zeros of a cache with a past are for parts that come before the one that uses its values.
        """
        fed = {}
        for name in part.inputs:
            present = present_name(name)
            if name in step.values:
                fed[name] = step.values[name]
            elif before is not None and present in before.values:
                fed[name] = before.values[present]
            else:
                entry, sizes = self.inputs[name], {"batch": step.shape[0], "past": step.past}
                shape = [dim if isinstance(dim, int) else sizes[dim.value] for dim in entry.shape]
                fed[name] = ort_value(torch.from_numpy(np.zeros(shape, entry.dtype.numpy())))
        try:
            results = session.run_with_ort_values(list(part.outputs), fed)
        except Exception as error:
            reason = runtime_reason(error)
            raise CompressionError(
                f"ONNX Runtime fails on {step.shape} tokens after {step.past}: {reason}; nothing was written"
            ) from error
        step.values |= dict(zip(part.outputs, results, strict=True))
