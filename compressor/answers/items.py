"""Questions with a right answer: as JSON lines, as tokens, and their likelihoods.

An answer is what is written after the prompt. B rows, S tokens, V words of the vocabulary.
"""

import json
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.data.rows import source_rows
from compressor.data.sources import WeightedSource
from compressor.errors import CompressionError, ItemError, LeftOut, wrap_faults
from compressor.frozen import frozen
from compressor.model.tokenizer import check_vocabulary
from compressor.records import plain_json, read_as

REMEDIES = ("shorten the text", "restore the tokenizer from its source or mend the text")


@frozen
class Item:
    """A prompt, its right answer, and of multiple choice all `choices`, of which the answer is one.

    Where choices differ in what precedes a common ending, as WinoGrande's do, each has a context of
    its own. The prompt is the right one's context."""

    prompt: str
    answer: str
    choices: tuple[str, ...] = ()
    task: str = ""  # that the item is of
    where: str = field(default="", compare=False)  # it was read: file and line, or task and number
    contexts: tuple[str, ...] = ()  # one for each choice; none if all follow the prompt

    def __post_init__(self) -> None:
        for text in (self.prompt, self.answer, *self.choices, self.task, *self.contexts):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ItemError(
                    f"{text[error.start]!r} is half a character; mend or remove it"
                ) from error
        if not all(self.continuations):
            raise ItemError("an answer is empty; give every answer some text")
        if self.choices and self.answer not in self.choices:
            raise ItemError("the answer is none of the choices; write it as its choice is written")
        if self.contexts and (
            self.prompt not in self.contexts or len(self.contexts) != len(self.choices)
        ):
            raise ItemError(
                "the contexts do not fit; give each choice one, and the right one's as the prompt"
            )

    @property
    def continuations(self) -> tuple[str, ...]:
        """Texts that may follow the prompt: the choices, or the answer alone."""
        return self.choices or (self.answer,)

    @property
    def right(self) -> int:
        if self.contexts:
            return self.contexts.index(self.prompt)
        return self.continuations.index(self.answer)

    @property
    def alone(self) -> "Item":
        return Item(self.prompt, self.answer, where=self.where)


def read_items(path: Path, strict: bool = False) -> list[Item]:
    """Read the items of a JSONL file: objects with `prompt`, `answer` and, of multiple choice,
    `choices`.

    Lines that are none are left out with one warning, or refused if `strict`.
    """
    if not path.is_file():
        raise CompressionError(
            f"{path} cannot be read (it is no file); name a JSONL file with items"
        )
    items = []
    left_out = LeftOut(f"items of {path}", strict)
    for where, row in source_rows(WeightedSource(str(path), 1.0), 0, "items").rows:
        with left_out.each():
            if isinstance(row, ItemError):
                raise row
            try:
                items.append(replace(read_as(Item, row), where=where))
            except CompressionError as error:
                raise ItemError(f"{where}: {error}") from error
    left_out.report()
    if not items:
        raise CompressionError(f"{path} has no items; give it lines with 'prompt' and 'answer'")
    return items


def item_lines(items: Sequence[Item]) -> str:
    lines = []
    for item in items:
        content = plain_json(item)
        del content["where"]
        if not item.contexts:
            del content["contexts"]
        lines.append(json.dumps(content, ensure_ascii=False) + "\n")
    return "".join(lines)


@frozen
class TokenRow:
    """Tokens of a prompt and, from `start` on, of its answer."""

    tokens: tuple[int, ...]
    start: int

    @property
    def answer(self) -> tuple[int, ...]:
        return self.tokens[self.start :]


def rows_of(
    item: Item, tokenizer: Any, vocabulary: int, most: int | None = None
) -> tuple[TokenRow, ...]:
    """Return a row for each continuation, with the tokens that lm-eval makes, cut on the left as
    lm-eval cuts them.

    A model that takes `most` tokens is given that many, and the one after them is the last that it
    can be asked for. Rows are cut one by one, so where one is and answers differ in length, they
    differ in `start`.

    Raises `ItemError` where prompt or answer have no token, and `CompressionError` for one that the
    model doesn't know."""
    opens = str(tokenizer.bos_token or "")
    rows = []
    with wrap_faults("the tokenizer cannot take an item", *REMEDIES):
        contexts = item.contexts or [item.prompt] * len(item.continuations)
        for prompt, answer in zip(contexts, item.continuations, strict=True):
            context = prompt.rstrip()
            if context:
                special = not (opens and context.startswith(opens))
                before = list(tokenizer.encode(context, add_special_tokens=special))
                whole = list(tokenizer.encode(prompt + answer, add_special_tokens=special))
            else:  # the token that opens a text stands for the prompt, as with lm-eval
                opening = tokenizer.bos_token_id
                opening = tokenizer.eos_token_id if opening is None else opening
                before = [] if opening is None else [int(opening)]
                whole = before + list(tokenizer.encode(prompt + answer, add_special_tokens=False))
            cut = 0 if most is None else max(0, len(whole) - most - 1)
            start = len(before) - cut
            whole = whole[cut:]
            if not 0 < start < len(whole):
                shown = answer if len(answer) < 40 else f"{answer[:40]} ..."
                raise ItemError(
                    f"prompt or answer have no token of their own (answer {shown!r}), or are "
                    "longer than the model takes"
                )
            rows.append(TokenRow(tuple(map(int, whole)), start))
    check_vocabulary(max(max(row.tokens) for row in rows), vocabulary)
    return tuple(rows)


def tokenised(
    items: Sequence[Item], tokenizer: Any, vocabulary: int, most: int | None, strict: bool = False
) -> list[tuple[Item, tuple[TokenRow, ...]]]:
    """Return each item with its rows; those without tokens are left out with one warning, or
    refused if `strict`."""
    questions = []
    left_out = LeftOut("items", strict)
    for item in items:
        with left_out.each():
            try:
                questions.append((item, rows_of(item, tokenizer, vocabulary, most)))
            except ItemError as error:
                raise ItemError(f"{item.where or 'an item'}: {error}") from error
    left_out.report()
    return questions


def likelihoods(logits: Tensor, rows: Sequence[TokenRow]) -> Tensor:
    """Return the log likelihood [B] of each row's answer given its prompt, from logits [B, S,
    V]."""
    likelihoods = []
    for row, of_row in zip(rows, logits, strict=False):
        # These logits predict the answer.
        logs = of_row[row.start - 1 : len(row.tokens) - 1].float().log_softmax(-1)
        answer = torch.tensor(row.answer, device=logits.device)
        likelihoods.append(logs.gather(1, answer[:, None]).sum())
    return torch.stack(likelihoods)


def is_greedy(logits: Tensor, row: TokenRow) -> bool:
    """Return True if each token of the first row's answer is the argmax, from logits [B, S, V]."""
    predicting = logits[0, row.start - 1 : len(row.tokens) - 1]
    return tuple(predicting.argmax(-1).tolist()) == row.answer


def positions(config: Any) -> int | None:
    """Return the largest number of tokens that the model was made for; None if the config does not
    name it."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 1 else None
