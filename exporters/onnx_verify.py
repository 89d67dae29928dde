"""Whether an ONNX graph computes what the stock model does: many shapes, chunks, padding, cached decoding.

The stock model is asked first, and what it said is kept; the graph is asked afterwards. So the two need not be in
memory together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError
from exporters.onnx_graph import model_inputs
from exporters.onnx_session import Session

TRACED = (2, 3)  # batch and sequence of the example that a graph is traced with
SHAPES = (TRACED, (1, 1), (1, 7), (3, 5), (2, 33), (4, 16), (1, 300))  # with an empty past
PREFILL = "prefill"
CHUNKS = (1, 9, 1, 14)  # of 25 tokens, two sequences: prefill, chunks and single tokens in turn
PADDING = (0, 3, 6)  # tokens of padding on the left of three sequences of 12 places
PADDED_LENGTH = 12
PROMPT = 8
TOKENS = 64


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far logits may be off: this much, and this much of the largest logit if that is more.

    In rounded arithmetic a router's near tie may be broken differently, and the token gets another expert: such tokens
    may lie beyond, up to a `share` of those compared.
    """

    absolute: float
    relative: float
    share: float = 0.0

    def ties(self, tokens: int) -> int:
        """How many of so many tokens may lie beyond."""
        return int(self.share * tokens + 0.5)

    def of(self, largest: float) -> float:
        """The bound for logits whose largest absolute value is this."""
        return max(self.absolute, self.relative * largest)


EXACT = Tolerance(1e-4, 1e-5)
HALF = Tolerance(1e-2, 1e-2, share=0.02)


@dataclass(frozen=True, slots=True)
class Case:
    """Some tokens [B, S] with their mask [B, S], cut into chunks, and the stock model's logits [B, S, V]."""

    name: str
    tokens: Tensor
    mask: Tensor
    chunks: tuple[int, ...]
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Reference:
    """What the stock model said: the cases, and one greedy continuation with its logits (none without a cache)."""

    model: str
    cases: tuple[Case, ...]
    prompt: Tensor  # [1, P]
    greedy: Tensor  # [N]
    greedy_logits: Tensor  # [N, V]: what each greedy token was chosen from

    @property
    def largest(self) -> float:
        """The largest absolute logit of the real tokens."""
        sizes = [float(case.logits[case.mask.bool()].abs().max()) for case in self.cases]
        return max([*sizes, *(float(row.abs().max()) for row in self.greedy_logits)])


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
    reference: str = "the stock model in float32"
    ties: int = 0  # tokens beyond the tolerance, of those that rounded arithmetic may send to another expert
    tokens: int = 0  # whose logits were compared


def special_tokens(config: Any) -> frozenset[int]:
    """Token ids that the config gives a meaning: padding, images and so on."""
    found: set[Any] = set()
    for node in (config, config.get_text_config(decoder=True)):
        for name, value in vars(node).items():
            if name.endswith(("_token_id", "_token_index")):
                found.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(value for value in found if isinstance(value, int))


def random_tokens(config: Any, rows: int, length: int, seed: int) -> Tensor:
    """Ordinary token ids [rows, length], the same ones for the same seed."""
    text = config.get_text_config(decoder=True)
    vocabulary = getattr(text, "unpadded_vocab_size", None) or text.vocab_size
    ordinary = torch.tensor(sorted(set(range(vocabulary)) - special_tokens(config)))
    return ordinary[torch.randint(len(ordinary), (rows, length), generator=torch.Generator().manual_seed(seed))]


@torch.no_grad()
def _case(model: Any, name: str, tokens: Tensor, mask: Tensor, chunks: Sequence[int]) -> Case:
    output = model(**model_inputs(model, tokens, 0, mask), use_cache=False)
    if output.logits.shape[:2] != tokens.shape:
        raise CompressionError(
            f"{type(model).__name__} does not give one row of logits for each token; only language models that "
            "do can be exported"
        )
    return Case(name, tokens, mask, tuple(chunks), output.logits.float().clone())


@torch.no_grad()
def _greedy(model: Any, prompt: Tensor, count: int, past: bool) -> tuple[Tensor, Tensor]:
    """The stock model's greedy continuation, [N] and [N, V] logits: with its own cache, or from the start each time."""
    tokens, logits, cache, fed = prompt, [], None, 0
    for _ in range(count):
        output = model(**model_inputs(model, tokens[:, fed:], fed), use_cache=past, past_key_values=cache)
        if past:
            cache, fed = output.past_key_values, tokens.shape[1]
        logits.append(output.logits[0, -1].float().clone())
        tokens = torch.cat([tokens, logits[-1].argmax().view(1, 1)], dim=1)
    return tokens[0, prompt.shape[1] :], torch.stack(logits)


def observe(model: Any, past: bool, tokens: int = TOKENS) -> Reference:
    """Everything that a graph of this model is compared with."""
    config = model.config
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or 10**9
    cases = []
    for number, (rows, wanted) in enumerate(SHAPES):
        length = min(wanted, longest)  # 300 is beyond the chunks of recurrent layers, whose loop a trace may unroll
        drawn = random_tokens(config, rows, length, number)
        cases.append(_case(model, f"{PREFILL} {rows} x {length}", drawn, torch.ones_like(drawn), (length,)))
    drawn = random_tokens(config, len(PADDING), PADDED_LENGTH, 11)
    mask = (torch.arange(PADDED_LENGTH) >= torch.tensor(PADDING)[:, None]).long()
    cases.append(_case(model, "left padding", drawn, mask, (PADDED_LENGTH,)))
    prompt = random_tokens(config, 1, PROMPT, 13)
    if past:
        drawn = random_tokens(config, 2, sum(CHUNKS), 12)
        cases.append(_case(model, "chunked prefill", drawn, torch.ones_like(drawn), CHUNKS))
        drawn = random_tokens(config, len(PADDING), PADDED_LENGTH, 14)
        decoded = (PADDED_LENGTH - 4, 1, 1, 1, 1)
        cases.append(_case(model, "left padding, cached decode", drawn, mask, decoded))
    count = max(0, min(tokens, longest - PROMPT)) if model.can_generate() else 0
    greedy, logits = (
        _greedy(model, prompt, count, past) if count else (torch.zeros(0, dtype=torch.long), torch.zeros(0, 1))
    )
    return Reference(type(model).__name__, tuple(cases), prompt, greedy, logits)


def run_case(session: Session, case: Case) -> Tensor:
    """The graph's logits [B, S, V] of a case, chunk by chunk."""
    session.start(case.tokens.shape[0])
    found, done = [], 0
    for size in case.chunks:
        found.append(session.step(case.tokens[:, done : done + size], case.mask[:, : done + size]))
        done += size
    return torch.cat(found, dim=1)


def run_greedy(session: Session, reference: Reference) -> Tensor:
    """The logits [N, V] from which the graph would choose each greedy token, given the earlier reference tokens."""
    session.start(1)
    tokens, found = reference.prompt, []
    for token in reference.greedy:
        new = tokens[:, session.past :]
        found.append(session.step(new, torch.ones_like(tokens))[0, -1])
        tokens = torch.cat([tokens, token.view(1, 1)], dim=1)
    return torch.stack(found) if found else torch.zeros(0, 1)


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


def _agreement(name: str, gaps: Tensor, tolerance: Tolerance, bound: float, model: str, where: str) -> _Agreement:
    """What the gaps [T] of one case come to; raises `CompressionError` if too many are too large."""
    beyond = ~(gaps <= bound)
    count = int(beyond.sum())
    if count > tolerance.ties(len(gaps)) or bool(gaps.isinf().any()):
        raise CompressionError(
            f"the ONNX graph of {model} is wrong in {where}: its logits differ from the stock model's by "
            f"{float(gaps.max()):.2g}, more than {bound:.2g}"
        )
    within = gaps[~beyond]
    return _Agreement(name, float(within.max()) if len(within) else 0.0, count, len(gaps))


def _where_right(case: Case, right: Sequence[_Agreement], failed: bool) -> str:
    """For which shapes the graph is right, and what it means that others fail."""
    if not (right and case.name.startswith(PREFILL)):
        return ""
    shapes = ", ".join(entry.name.removeprefix(f"{PREFILL} ") for entry in right)
    fixed = "; the stock code's loop over tokens or chunks is traced for some lengths only" if failed else ""
    return f" (it is right for {shapes}{fixed})"


def compare(path: Path, reference: Reference, tolerance: Tolerance, label: str | None = None) -> Verification:
    """Ask the graph everything that the stock model was asked; raises `CompressionError` at the first disagreement.

    A greedy token that differs is a fault unless the stock model itself was undecided by less than the tolerance.
    For a graph with rounded weights, `reference` is made with the same rounded weights; `label` says so.
    """
    session = Session(path)
    bound = tolerance.of(reference.largest)
    found: list[_Agreement] = []
    for case in reference.cases:
        real = case.mask.bool()
        try:
            gaps = _gaps(run_case(session, case)[real], case.logits[real])
            where = f"the case {case.name!r}"
            found.append(_agreement(case.name, gaps, tolerance, bound, reference.model, where))
        except CompressionError as error:
            failed = error.__cause__ is not None  # in ONNX Runtime, rather than giving other logits
            raise CompressionError(f"{error}{_where_right(case, found, failed)}; nothing was written") from error
    equal = 0
    if len(reference.greedy):
        logits = run_greedy(session, reference)
        gaps = _gaps(logits, reference.greedy_logits)
        equal = _equal_tokens(logits, reference, bound, tolerance.ties(len(gaps)))
        try:
            found.append(_agreement("greedy", gaps, tolerance, bound, reference.model, "greedy generation"))
        except CompressionError as error:
            raise CompressionError(f"{error}; nothing was written") from error
    verified = Verification(
        largest_difference=max(entry.largest for entry in found),
        tolerance=bound,
        largest_logit=reference.largest,
        shapes=tuple((case.tokens.shape[0], case.tokens.shape[1]) for case in reference.cases),
        cases=tuple((entry.name, entry.largest) for entry in found),
        tokens_compared=len(reference.greedy),
        tokens_equal=equal,
        ties=sum(entry.ties for entry in found),
        tokens=sum(entry.tokens for entry in found),
    )
    return verified if label is None else replace(verified, reference=label)


def _equal_tokens(logits: Tensor, reference: Reference, bound: float, ties: int = 0) -> int:
    """How many greedy tokens are the same; raises `CompressionError` at one too many that the stock model refuses."""
    chosen, refused = logits.argmax(-1), 0
    for number, (mine, theirs) in enumerate(zip(chosen.tolist(), reference.greedy.tolist(), strict=True)):
        margin = float(reference.greedy_logits[number, theirs] - reference.greedy_logits[number, mine])
        refused += margin > 2 * bound
        if refused > ties:
            raise CompressionError(
                f"the ONNX graph of {reference.model} generates token {mine} instead of {theirs} at step {number}; "
                "nothing was written"
            )
    return int((chosen == reference.greedy).sum())
