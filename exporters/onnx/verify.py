"""Verify that an ONNX graph computes what the stock model does, on all of its cases."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from compressor.answers.onnx import OnnxDecoder, open_session
from compressor.errors import CompressionError, reason_of
from compressor.frozen import frozen
from compressor.progress import Progress
from exporters.onnx.reference import CONTINUED, PROMPT, Case, Reference

STOCK = "the stock model in float32"
WHOLE = "the whole graph, the likeliest token after each of a given text"
MAPPED = (
    "the whole graph with its weights mapped from their file, the likeliest token after each "
    "of a given text"
)


@frozen
class Tolerance:
    """The error that logits may have: `absolute`, or `relative` times the largest logit if that is
    more.

    A model that amplifies rounding is as far from itself in another order of adding: a graph may be
    off by `units` times what one unit in the last place of the layers' inputs moves the logits, up
    to a thousandth of the largest. A fault of a graph moves them by far more. In rounded arithmetic
    a router's near tie may be broken differently, and the token gets another expert: up to a
    `share` of the tokens may lie beyond. In float32 that may be tokens whose stock logits move as
    far when the layers' inputs are nudged: near ties, and what attends to them."""

    absolute: float
    relative: float
    share: float = 0.0
    units: float = 8.0  # correct graphs of models that amplify rounding came to 2 to 3


TIED = 0.25  # of all tokens that near ties may move, with those that attend to them
MOVED = 2.0  # times what nudges have moved a token's logits
MOST = 1e-3  # of the largest logit, however much a model amplifies rounding
EXACT = Tolerance(1e-4, 1e-5)
HALF = Tolerance(1e-2, 1e-2, share=0.02)


@frozen
class Verification:
    """A graph's agreement with the stock model."""

    largest_difference: float  # of any logit in any case, but for the ties
    tolerance: float
    largest_logit: float
    shapes: tuple[tuple[int, int], ...]
    cases: tuple[tuple[str, float], ...]  # the largest difference of each case
    tokens_compared: int
    tokens_equal: int
    reference: str = STOCK
    how: str = WHOLE  # or with mapped weights
    # tokens beyond the tolerance, which another order of adding sends to another expert
    ties: int = 0
    tokens: int = 0  # whose logits were compared
    # how far one unit in the last place of its layers' inputs moves the stock logits
    sensitivity: float = 0.0


def compare(
    logits: Iterable[Tensor],
    reference: Reference,
    tolerance: Tolerance,
    label: str = STOCK,
    how: str = WHOLE,
) -> Verification:
    """Compare a graph's logits [B, S, V] of each case with the stock model's, with the same rounded
    weights if any.

    Raises `CompressionError` at the first case with more tokens beyond the tolerance than may be
    near ties."""
    largest = max(float(case.real.abs().max()) for case in reference.cases)
    amplified = min(tolerance.units * reference.sensitivity, MOST * largest)
    bound = max(tolerance.absolute, tolerance.relative * largest, amplified)
    cases = dict[str, float]()
    shapes = []
    ties = tied = tokens = compared = equal = 0
    whole = sum(len(case.real) for case in reference.cases)
    for case, computed in zip(reference.cases, logits, strict=True):
        if computed.shape != case.logits.shape:
            computed = torch.full_like(case.logits, torch.nan)
        # [T], infinite where there is no number
        gaps = (computed[case.mask.bool()] - case.real).abs().amax(-1)
        gaps = gaps.nan_to_num(nan=torch.inf, posinf=torch.inf)
        beyond = ~(gaps <= bound)
        explained = beyond & (gaps <= MOVED * case.moved)
        tied += int(explained.sum())
        wrong = int(beyond.sum()) - int(explained.sum())
        if (
            wrong > int(tolerance.share * len(gaps) + 0.5)
            or tied > TIED * whole
            or bool(gaps.isinf().any())
        ):
            raise CompressionError(
                f"the ONNX graph of {reference.model} is wrong in the case {case.name!r}: its "
                f"logits differ from the stock model's by {float(gaps.max()):.2g}, more than "
                f"{bound:.2g}; nothing was written"
            )
        cases[case.name] = float(gaps.where(~beyond, 0.0).max())
        ties += int(beyond.sum())
        tokens += len(gaps)
        if case.name != CONTINUED:
            shapes.append((len(case.tokens), case.tokens.shape[1]))
            continue
        same = computed[0, PROMPT - 1 :].argmax(-1) == case.logits[0, PROMPT - 1 :].argmax(-1)
        compared = len(same)
        equal = int(same.sum())
    return Verification(
        largest_difference=max(cases.values()),
        tolerance=bound,
        largest_logit=largest,
        shapes=tuple(shapes),
        cases=tuple(cases.items()),
        tokens_compared=compared,
        tokens_equal=equal,
        reference=label,
        how=how,
        ties=ties,
        tokens=tokens,
        sensitivity=reference.sensitivity,
    )


@frozen
class RoundingCost:
    """The cost of rounding the experts: the stock model's logits before and after."""

    largest_difference: float
    largest_logit: float  # before
    same_choice: float  # the share of the tokens after which the most likely token is the same


def rounding_cost(before: Reference, after: Reference) -> RoundingCost:
    """Compare the cases that both references hold, at real tokens only."""
    later = {case.name: case for case in after.cases}
    pairs = [(case.real, later[case.name].real) for case in before.cases if case.name in later]
    first, second = (torch.cat(logits) for logits in zip(*pairs, strict=True))  # [T, V]
    return RoundingCost(
        largest_difference=float((first - second).abs().max()),
        largest_logit=float(first.abs().max()),
        same_choice=float((first.argmax(-1) == second.argmax(-1)).float().mean()),
    )


class Graph:
    """A graph on disk in ONNX Runtime: as whoever uses it will run it, or with its weights `mapped`
    from their file.

    Mapped weights take no memory of the process. Pages come from the disk as nodes read them, and
    go where memory is short; so nothing is optimised in a way that copies a weight."""

    def __init__(self, path: Path, mapped: bool = False) -> None:
        """Raises `CompressionError` for a graph that ONNX Runtime does not load."""
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = torch.get_num_threads()
        if mapped:
            settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            settings.add_session_config_entry("session.disable_prepacking", "1")
        self.session = open_session(path, settings, ["CPUExecutionProvider"])
        self.how = MAPPED if mapped else WHOLE  # as a record names it

    def answers(self, cases: Sequence[Case], progress: Progress) -> Iterator[Tensor]:
        """The logits [B, S, V] of each case."""
        progress.start("verifying", len(cases))
        for case in cases:
            decoder = OnnxDecoder(self.session, len(case.tokens))
            logits = []
            past = 0
            # the cache of one chunk is handed to the next
            for tokens in case.tokens.split(list(case.chunks), dim=1):
                mask = case.mask[:, : past + tokens.shape[1]]
                try:
                    logits.append(decoder.run(tokens, mask).float().clone())
                except Exception as error:  # the runtime raises classes of its own
                    raise CompressionError(
                        f"ONNX Runtime fails on {list(tokens.shape)} tokens after {past}: "
                        f"{reason_of(error)}; nothing was written"
                    ) from error
                past += tokens.shape[1]
            yield torch.cat(logits, dim=1)
            progress.advance(case.name)
