"""Log likelihoods of many continuations from one streamed pass: equal inputs run once, logits only where they count.

B rows of a batch, S tokens, N scored positions, H hidden size, V words of the vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.distributed.ranks import here
from compressor.memory import available
from compressor.model.architecture import head_of
from compressor.model.opened import OpenModel
from compressor.model.streaming import DEFAULT_ACTIVATION_BUDGET, LayerVisitor, Pass
from compressor.progress import Progress

LOGIT_BYTES = 2**29  # of a batch's logits in float32, unless one row alone has more
TOGETHER = 256  # positions whose probabilities are held at once
WAITING_SHARE = 4  # a part this large of free memory holds hidden states; what is beyond goes to disk

Request = tuple[Sequence[int], Sequence[int]]  # tokens, and the continuation of them that is asked for
Answer = tuple[float, bool]  # log likelihood in nats, and whether every token of it is the likeliest one


@dataclass(frozen=True, slots=True)
class Input:
    """What a model runs once, [S] tokens, and the continuations that end with the token it predicts last."""

    tokens: tuple[int, ...]
    continuations: tuple[tuple[int, tuple[int, ...]], ...]  # each with the number of its request

    @property
    def scored(self) -> int:
        """How many of the last positions are asked for their logits."""
        return max(len(tokens) for _, tokens in self.continuations)


def inputs_of(requests: Sequence[Request], most: int) -> list[Input]:
    """The different inputs of all requests, longest first, cut on the left to `most` tokens as lm-eval cuts them.

    The answers A and B to one question differ in their last token alone, so they share an input.
    """
    found = dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]()
    for number, (before, after) in enumerate(requests):
        whole = (*before, *after)[-most - 1 :]
        found.setdefault(whole[:-1], []).append((number, tuple(after)))
    different = [Input(tokens, tuple(continuations)) for tokens, continuations in found.items()]
    return sorted(different, key=lambda each: (-len(each.tokens), each.tokens))


def batches_of(inputs: Iterable[Input], rows: int, positions: int) -> list[list[Input]]:
    """The inputs in their order, at most so many rows and scored positions to a batch, of which each has a row."""
    found: list[list[Input]] = []
    room = 0
    for each in inputs:
        if not found or len(found[-1]) == rows or each.scored > room:
            found.append([])
            room = positions
        found[-1].append(each)
        room -= each.scored
    return found


def padded(batch: Sequence[Input]) -> Tensor:
    """[B, S], padded on the right: what follows a token does not reach it, so no mask is needed, nor in memory."""
    length = max(len(each.tokens) for each in batch)
    return torch.tensor([[*each.tokens, *[0] * (length - len(each.tokens))] for each in batch])


def scores(logits: Tensor, continuations: Sequence[Sequence[int]]) -> list[Answer]:
    """The answers of continuations that end where the logits [N, V] of one row do, none of more than N tokens."""
    wanted = torch.zeros(len(logits), len(continuations), dtype=torch.long, device=logits.device)
    for column, tokens in enumerate(continuations):
        wanted[len(logits) - len(tokens) :, column] = torch.tensor(tokens, device=logits.device)
    found, likeliest = [], []
    for part, targets in zip(logits.split(TOGETHER), wanted.split(TOGETHER), strict=True):
        likelihoods = part.log_softmax(-1, dtype=torch.float32)
        found.append(likelihoods.gather(1, targets))
        likeliest.append(likelihoods.argmax(-1, keepdim=True) == targets)
    values, greedy = torch.cat(found), torch.cat(likeliest)
    return [
        (float(values[-len(tokens) :, column].sum()), bool(greedy[-len(tokens) :, column].all()))
        for column, tokens in enumerate(continuations)
    ]


class _Answers(LayerVisitor):
    """Takes the answers where a batch reaches the head, which is shown the scored positions alone."""

    def __init__(self, batches: Sequence[Sequence[Input]], count: int) -> None:
        self.batches, self.count, self.found = batches, count, dict[int, Answer]()
        self.chosen = False

    def entering(self, batch: int) -> None:
        self.chosen = False

    def before_head(self, head: Any, args: tuple[Any, ...]) -> Any:
        """Hidden states [B, S, H] -> [1, N, H]; others, which a head of another form may take, stay."""
        hidden, batch = args[0], self.batches[self.at.batch]
        if hidden.shape[:-1] != (len(batch), max(len(each.tokens) for each in batch)):
            return None
        self.chosen = True
        return (_scored(hidden, batch)[None], *args[1:])

    @torch.no_grad()
    def finished(self, batch: int, output: Any) -> None:
        rows = self.batches[batch]
        logits = output.logits[0] if self.chosen else _scored(output.logits, rows)
        for each, part in zip(rows, logits.split([each.scored for each in rows]), strict=True):
            answers = scores(part, [tokens for _, tokens in each.continuations])
            for (number, _), answer in zip(each.continuations, answers, strict=True):
                self.found[number] = answer

    def of_all_ranks(self) -> list[Answer]:
        """The answers to all requests, in their order."""
        told = {number: answer for each in here().all_gather([*self.found.items()]) for number, answer in each}
        return [(float(value), bool(greedy)) for value, greedy in (told[number] for number in range(self.count))]


def _scored(values: Tensor, batch: Sequence[Input]) -> Tensor:
    """[B, S, ...] -> [N, ...]: each row's scored positions, which are the last of its own tokens."""
    spans = [(row, len(each.tokens) - each.scored, len(each.tokens)) for row, each in enumerate(batch)]
    return torch.cat([values[row, begin:end] for row, begin, end in spans])


def stream_answers(
    model: OpenModel, requests: Sequence[Request], most: int, rows: int, progress: Progress, phase: str
) -> list[Answer]:
    """The answer to each request, all batches of `rows` inputs in lockstep through one layer after the other.

    Several ranks share the batches, and each gets all answers.

    An input has at most `most` tokens, and no continuation has more. `progress` is told of each layer.
    """
    inputs = inputs_of(requests, most)
    batches = batches_of(inputs, rows, LOGIT_BYTES // (4 * model.vocabulary))
    answers = _Answers(batches, len(requests))
    room = available()
    budget = DEFAULT_ACTIVATION_BUDGET if room is None else min(DEFAULT_ACTIVATION_BUDGET, room // WAITING_SHARE)
    tokens = [padded(batch) for batch in batches]
    one = Pass(model, tokens, progress, phase, to_end=True, shared=True, activation_budget=budget)
    head = head_of(model.partial.model)
    handle = head.register_forward_pre_hook(answers.before_head) if head is not None else None
    try:
        one.run(answers)
    finally:
        if handle is not None:
            handle.remove()
    return answers.of_all_ranks()
