"""Items asked of a model of transformers that is in memory, a batch at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compressor.answers.items import Item, TokenRow, is_greedy, likelihoods, positions, tokenised
from compressor.frozen import frozen
from compressor.progress import Progress, Silent

Question = tuple[Item, tuple[TokenRow, ...]]  # with a row for each answer
# a task, tokens, mask and mask of right answers -> logits
Run = Callable[[str, Tensor, Tensor, Tensor], Tensor]


@frozen
class TaskScore:
    """The score of one task."""

    task: str
    items: int
    right: int
    loss: float  # nats per token of the right answers

    @property
    def accuracy(self) -> float:
        """Share of the items that are answered right."""
        return self.right / self.items


def with_rows(
    items: Sequence[Item],
    model: Any,
    tokenizer: Any,
    strict: bool = False,
    cutoff: int | None = None,
) -> list[Question]:
    """Return items with their rows for a model, of `cutoff` tokens at the most.

    Those without tokens are left out, or refused if `strict`.
    """
    most = min((limit for limit in (positions(model.config), cutoff) if limit), default=None)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # the last token of a row is an input, too, though no logits after it are needed
    return tokenised(items, tokenizer, vocabulary, most and most - 1, strict)


def pad_token(tokenizer: Any) -> int:
    """Return a token to pad with; it is masked, so any will do."""
    return int(
        tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None
        else tokenizer.eos_token_id or 0
    )


def padded(rows: Sequence[Sequence[int]], pad: int, side: str = "right") -> tuple[Tensor, Tensor]:
    """Return rows of tokens padded on a side, and their mask: [B, S] each."""
    tokens = [torch.tensor(row) for row in rows]
    mask = pad_sequence(
        [torch.ones_like(row) for row in tokens], batch_first=True, padding_side=side
    )
    return pad_sequence(tokens, batch_first=True, padding_value=pad, padding_side=side), mask


def forward(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the logits [B, S, V] of tokens and their mask, [B, S] each."""
    logits: Tensor = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    return logits


def ask(
    model: Any,
    tokenizer: Any,
    items: Sequence[Item],
    *,
    batch_size: int = 16,
    strict: bool = False,
    progress: Progress | None = None,
    run: Run | None = None,
) -> tuple[TaskScore, ...]:
    """Return a score for each task, in the order of the items; those without tokens are left out,
    or refused.

    The right choice must be the most likely one; without choices, greedy decoding must give the
    answer. `run` runs the model in place of its plain forward."""
    listener = progress or Silent()
    questions = with_rows(items, model, tokenizer, strict)
    by_task: dict[str, list[Question]] = {}
    for item, rows in questions:
        by_task.setdefault(item.task, []).append((item, rows))
    listener.start("Asking", len(questions))
    model.eval()
    pad = pad_token(tokenizer)
    run = run or (lambda task, tokens, mask, answered: forward(model, tokens, mask))
    results = []
    for task, asked in by_task.items():
        right = 0
        nats = 0.0
        tokens = 0
        for start in range(0, len(asked), batch_size):
            part = asked[start : start + batch_size]
            batch_rows = list[TokenRow]()
            right_rows = []
            for item, answers in part:
                right_rows.append(len(batch_rows) + item.right)
                batch_rows += answers
            token_ids, mask = padded([row.tokens for row in batch_rows], pad)
            answered = torch.zeros_like(mask)
            answered[right_rows] = mask[right_rows]
            with torch.no_grad():
                logits = run(task, token_ids.to(model.device), mask.to(model.device), answered)
            by_item = likelihoods(logits, batch_rows).split([len(answers) for _, answers in part])
            for (item, answers), row, scores in zip(part, right_rows, by_item, strict=True):
                if item.choices:
                    right += int(scores.argmax()) == item.right
                else:
                    right += is_greedy(logits[row : row + 1], answers[0])
                nats -= float(scores[item.right])
                tokens += len(answers[item.right].tokens) - answers[item.right].start
                listener.advance(task)
        results.append(TaskScore(task, len(asked), right, nats / tokens))
    return tuple(results)
