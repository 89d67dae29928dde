"""Questions with a right answer: as JSON lines, as tokens, and their likelihoods.

An answer is what is written after the prompt. B rows, S tokens, V words of the vocabulary.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError, wrap_faults
from compressor.records import MOST_BYTES_OF_PARTS, bounded, plain_json, read_as

REMEDIES = ("shorten the text", "restore the tokenizer from its source or mend the text")


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt, its right answer, and of multiple choice all `choices`, of which the answer is one."""

    prompt: str
    answer: str
    choices: tuple[str, ...] = ()
    task: str = ""  # that the item is of

    def __post_init__(self) -> None:
        for text in (self.prompt, self.answer, *self.choices, self.task):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise CompressionError(f"{text[error.start]!r} is half a character; mend or remove it") from error
        if not all(self.continuations):
            raise CompressionError("an answer is empty; give every answer some text")
        if self.choices and self.answer not in self.choices:
            raise CompressionError("the answer is none of the choices; write it as its choice is written")

    @property
    def continuations(self) -> tuple[str, ...]:
        """What may follow the prompt: the choices, or the answer alone."""
        return self.choices or (self.answer,)

    @property
    def right(self) -> int:
        return self.continuations.index(self.answer)

    @property
    def alone(self) -> "Item":
        return Item(self.prompt, self.answer)


def read_items(path: Path) -> list[Item]:
    """The items of a JSONL file: objects with `prompt`, `answer` and, of multiple choice, `choices`.

    Raises `CompressionError` naming the line that is none.
    """
    try:
        if (size := path.stat().st_size) > MOST_BYTES_OF_PARTS:
            raise CompressionError(f"{path} has {size:,} bytes, more than {MOST_BYTES_OF_PARTS:,}; split it up")
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise CompressionError(f"{path} cannot be read ({error.strerror}); name a JSONL file with items") from error
    except UnicodeDecodeError as error:
        raise CompressionError(f"{path} is not UTF-8 text ({error.reason}); convert it first") from error
    items = []
    for where, line in ((f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()):
        try:
            items.append(read_as(Item, bounded(json.loads(line))))
        except CompressionError as error:
            raise CompressionError(f"{where}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise CompressionError(f"{where} is not valid JSON ({error}); mend or remove it") from error
    if not items:
        raise CompressionError(f"{path} has no items; give it lines with 'prompt' and 'answer'")
    return items


def item_lines(items: Sequence[Item]) -> str:
    return "".join(json.dumps(plain_json(item), ensure_ascii=False) + "\n" for item in items)


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of which those from `start` on are the answer; the token before is the prompt's last one."""

    tokens: tuple[int, ...]
    start: int


def rows_of(item: Item, tokenizer: Any, vocabulary: int, most: int | None = None) -> tuple[Row, ...]:
    """A row for each continuation, with the tokens that lm-eval makes, cut on the left as lm-eval cuts them.

    A model that takes `most` tokens is given that many, and the one after them is the last that it can be asked for.
    Rows are cut one by one, so where one is and answers differ in length, they differ in `start`.

    Raises `CompressionError` where prompt or answer have no token, or one that the model does not know.
    """
    with wrap_faults("the tokenizer cannot take an item", *REMEDIES):
        rows = tuple(_row(item.prompt, continuation, tokenizer, most) for continuation in item.continuations)
    if (largest := max(token for row in rows for token in row.tokens)) >= vocabulary:
        raise CompressionError(
            f"the tokenizer makes token {largest}, the model knows {vocabulary}; they do not belong together"
        )
    return rows


def _row(prompt: str, answer: str, tokenizer: Any, most: int | None) -> Row:
    context, opens = prompt.rstrip(), str(tokenizer.bos_token or "")
    if context:
        special = not (opens and context.startswith(opens))
        before, whole = (
            list(tokenizer.encode(text, add_special_tokens=special)) for text in (context, prompt + answer)
        )
    else:  # the token that opens a text stands for the prompt, as with lm-eval
        opening = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        before = [] if opening is None else [int(opening)]
        whole = before + list(tokenizer.encode(prompt + answer, add_special_tokens=False))
    start = len(before)
    if most is not None and len(whole) > most + 1:
        start, whole = start - (len(whole) - most - 1), whole[-most - 1 :]
    if not 0 < start < len(whole):
        shown = answer if len(answer) < 40 else f"{answer[:40]} ..."
        raise CompressionError(
            f"prompt or answer of an item have no token of their own (answer {shown!r}), or are longer than the model "
            "takes; leave the item out"
        )
    return Row(tuple(map(int, whole)), start)


def likelihoods(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The log likelihood [B] of each row's answer given its prompt, from logits [B, S, V]."""
    likelihoods = []
    for place, row in enumerate(rows):
        logs = logits[place, row.start - 1 : len(row.tokens) - 1].float().log_softmax(-1)
        answer = torch.tensor(row.tokens[row.start :], device=logits.device)
        likelihoods.append(logs.gather(1, answer[:, None]).sum())
    return torch.stack(likelihoods)


def is_greedy(logits: Tensor, row: Row) -> bool:
    """Whether each token of the answer of the first row is the argmax, from logits [B, S, V]."""
    return logits[0, row.start - 1 : len(row.tokens) - 1].argmax(-1).tolist() == list(row.tokens[row.start :])


def positions(config: Any) -> int | None:
    """Tokens that the model was made for at most; None where the config says nothing."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 1 else None
