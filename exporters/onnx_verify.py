"""Whether an ONNX graph computes what the stock model does: it is asked everything that was asked of that."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from compressor.errors import CompressionError, reason_of
from compressor.generation.decoders import DecoderGraph
from exporters.onnx_reference import PREFILL, Case, Reference

STOCK = "the stock model in float32"
GREEDY = "greedy"  # the name of the last case
WHOLE = "the whole graph, its own greedy tokens"
LAYERS = "layer by layer, the likeliest token after each of a given text"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far logits may be off: this much, and this much of the largest logit if that is more.

    A model that blows up roundings is as far from itself in another order of adding: where one unit in the last place
    of its layers' inputs moves its own logits, a graph may be off by `units` times as much, up to a thousandth of the
    largest logit. A fault of a graph moves them by far more.

    In rounded arithmetic a router's near tie may be broken differently, and the token gets another expert: such tokens
    may lie beyond, up to a `share` of those compared.
    """

    absolute: float
    relative: float
    share: float = 0.0
    units: float = 8.0  # graphs that are right, of models that blow up roundings, came to 2 to 3

    def ties(self, tokens: int) -> int:
        """How many of so many tokens may lie beyond."""
        return int(self.share * tokens + 0.5)

    def of(self, reference: Reference) -> float:
        """The bound for the logits of a model that answered so."""
        largest = reference.largest
        return max(self.absolute, self.relative * largest, min(self.units * reference.sensitivity, MOST * largest))


MOST = 1e-3  # of the largest logit, however much a model blows up roundings
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


def runtime_reason(error: Exception) -> str:
    """What ONNX Runtime says about a node that failed, without its codes and source files."""
    text = " ".join(str(error).split())
    node = re.search(r"running (\w+) node\b", text)
    plain = re.split(r"Status Message: | : [A-Z_]+ : |\w\([^()]*\) (?=\S)", text)[-1]
    return reason_of(type(error)(f"{node[1]}: {plain}" if node else plain))


def runtime_fault(error: Exception, shape: list[int], past: int) -> CompressionError:
    """The fault of a run with tokens of this shape after others, told."""
    return CompressionError(f"ONNX Runtime fails on {shape} tokens after {past}: {runtime_reason(error)}")


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


class Session(DecoderGraph):
    """An exported graph in ONNX Runtime on the CPU, whose faults are told."""

    def __init__(self, path: Path) -> None:
        super().__init__(open_session(path))

    def step(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Logits [B, S, V] of new tokens [B, S] in float32; the mask [B, past + S] covers the earlier ones too."""
        try:
            return self.run(tokens, mask).float()
        except Exception as error:
            raise runtime_fault(error, list(tokens.shape), self.past) from error


def run_case(session: Session, case: Case) -> Tensor:
    """The graph's logits [B, S, V] of a case, chunk by chunk."""
    session.start(case.tokens.shape[0])
    pieces = case.tokens.split(case.chunks, dim=1)
    return torch.cat([session.step(new, case.mask[:, : session.past + new.shape[1]]) for new in pieces], dim=1)


def run_greedy(session: Session, reference: Reference) -> Tensor:
    """The logits [N, V] from which the graph would choose each greedy token, given the earlier reference tokens."""
    session.start(1)
    text, begin = reference.text, reference.prompt.shape[1]
    given = (text[:, :end] for end in range(begin, text.shape[1]))
    return torch.stack([session.step(tokens[:, session.past :], torch.ones_like(tokens))[0, -1] for tokens in given])


def _gaps(one: Tensor, two: Tensor) -> Tensor:
    """The largest absolute difference of each token's logits, [T, V] twice -> [T]; infinite without a number."""
    if one.shape != two.shape:
        return torch.full((len(two),), torch.inf)
    return (one - two).abs().amax(-1).nan_to_num(nan=torch.inf, posinf=torch.inf)


@dataclass(frozen=True, slots=True)
class _Agreement:
    """How well one case's tokens agree."""

    name: str
    largest: float  # within the bound
    ties: int  # beyond it
    tokens: int


def _agreement(name: str, gaps: Tensor, tolerance: Tolerance, reference: Reference) -> _Agreement:
    """What the gaps [T] of one case come to; raises `CompressionError` if too many are too large."""
    bound = tolerance.of(reference)
    beyond = ~(gaps <= bound)
    count = int(beyond.sum())
    if count > tolerance.ties(len(gaps)) or bool(gaps.isinf().any()):
        where = "greedy generation" if name == GREEDY else f"the case {name!r}"
        raise CompressionError(
            f"the ONNX graph of {reference.model} is wrong in {where}: its logits differ from the stock model's by "
            f"{float(gaps.max()):.2g}, more than {bound:.2g}"
        )
    return _Agreement(name, float(gaps.where(~beyond, 0.0).max()), count, len(gaps))


@contextmanager
def _faults_told(name: str, right: Sequence[_Agreement]) -> Iterator[None]:
    """Add for which shapes the graph is right, and what it means that others fail."""
    try:
        yield
    except CompressionError as error:
        where = ""
        if right and name.startswith(PREFILL):
            shapes = ", ".join(entry.name.removeprefix(f"{PREFILL} ") for entry in right)
            failed = error.__cause__ is not None  # in ONNX Runtime, rather than giving other logits
            fixed = "; the stock code's loop over tokens or chunks is traced for some lengths only" if failed else ""
            where = f" (it is right for {shapes}{fixed})"
        raise CompressionError(f"{error}{where}; nothing was written") from error


class WholeGraph:
    """Answers by the graph in one session, as whoever uses it will run it."""

    how = WHOLE

    def __init__(self, path: Path) -> None:
        self.session = Session(path)

    def case(self, case: Case) -> Tensor:
        """The logits [B, S, V] of a case."""
        return run_case(self.session, case)

    def greedy(self, reference: Reference) -> Tensor:
        """The logits [N, V] from which each token after the prompt would be chosen."""
        return run_greedy(self.session, reference)


class Answers(Protocol):
    """Whatever runs a graph."""

    how: str

    def case(self, case: Case) -> Tensor:
        """The logits [B, S, V] of a case."""

    def greedy(self, reference: Reference) -> Tensor:
        """The logits [N, V] from which each token after the prompt would be chosen."""


def compare(answers: Answers, reference: Reference, tolerance: Tolerance, label: str = STOCK) -> Verification:
    """Ask the graph everything that the stock model was asked; raises `CompressionError` at the first disagreement.

    A greedy token that differs is a fault unless the stock model itself was undecided by less than the tolerance.
    For a graph with rounded weights, `reference` is made with the same rounded weights; `label` says so.
    """
    bound, equal = tolerance.of(reference), 0
    found: list[_Agreement] = []
    for case in reference.cases:
        real = case.mask.bool()
        with _faults_told(case.name, found):
            gaps = _gaps(answers.case(case)[real], case.logits[real])
            found.append(_agreement(case.name, gaps, tolerance, reference))
    if len(reference.greedy):
        with _faults_told(GREEDY, found):
            logits = answers.greedy(reference)
            gaps = _gaps(logits, reference.greedy_logits)
            equal = _equal_tokens(logits, reference, bound, tolerance.ties(len(gaps)))
            found.append(_agreement(GREEDY, gaps, tolerance, reference))
    return Verification(
        largest_difference=max(entry.largest for entry in found),
        tolerance=bound,
        largest_logit=reference.largest,
        shapes=tuple((case.tokens.shape[0], case.tokens.shape[1]) for case in reference.cases),
        cases=tuple((entry.name, entry.largest) for entry in found),
        tokens_compared=len(reference.greedy),
        tokens_equal=equal,
        reference=label,
        how=answers.how,
        ties=sum(entry.ties for entry in found),
        tokens=sum(entry.tokens for entry in found),
        sensitivity=reference.sensitivity,
    )


def _equal_tokens(logits: Tensor, reference: Reference, bound: float, ties: int = 0) -> int:
    """How many greedy tokens are the same; raises `CompressionError` at one too many that the stock model refuses."""
    chosen, refused = logits.argmax(-1), 0
    for number, (mine, theirs) in enumerate(zip(chosen.tolist(), reference.greedy.tolist(), strict=True)):
        margin = float(reference.greedy_logits[number, theirs] - reference.greedy_logits[number, mine])
        refused += margin > 2 * bound
        if refused > ties:
            raise CompressionError(
                f"the ONNX graph of {reference.model} generates token {mine} instead of {theirs} at step {number}"
            )
    return int((chosen == reference.greedy).sum())
