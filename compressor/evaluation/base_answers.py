"""The base's next-token distributions on text that is trained on, and its answers to an evaluator, from one pass.

Of each position the largest log probabilities are kept on disk, and the mass of all others as one more outcome, so that
base and smaller model are never in memory together. The divergence from what is kept is a lower bound of that from the
whole distribution, and differs little from it: good enough to train toward; an `Evaluator` has the full vocabulary.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.data.batches import load_tokenizer
from compressor.distributed import here
from compressor.errors import CompressionError
from compressor.evaluation.evaluator import Evaluator, require_head, rows_at_once
from compressor.kept import keep_tensors, kept_tensors, told_of
from compressor.model.opened import OpenModel
from compressor.model.streaming import Forward, LayerVisitor, Pass, allocate
from compressor.progress import Progress

KEPT = 64  # log probabilities of each position
LEAST = -60.0  # the logarithm of a mass of nothing, as far as float32 is concerned
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Distributions:
    """Of one batch [B, L]: ids and log probabilities [B, L, K] of the top tokens, and the log of all others' mass."""

    tokens: Tensor
    logs: Tensor
    others: Tensor  # [B, L]
    hidden: Tensor | None = None  # [B, L, H] of the last decoder layer, where it was wanted

    def rows(self, chosen: slice) -> "Distributions":
        """Those of some sequences of the batch."""
        return Distributions(**{name: value[chosen] for name, value in self.tensors.items()})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in named if value is not None}


def check_base(smaller: OpenModel, base: OpenModel) -> None:
    """Refuse a base whose distributions are no target for the smaller model: of another vocabulary or tokenizer."""
    if smaller.vocabulary != base.vocabulary:
        raise CompressionError(
            f"{base.source.label} knows {base.vocabulary} tokens, {smaller.source.label} {smaller.vocabulary}; "
            "name the model that the checkpoint was made of"
        )
    if load_tokenizer(smaller.source.folder).get_vocab() != load_tokenizer(base.source.folder).get_vocab():
        raise CompressionError(
            f"{base.source.label} and {smaller.source.label} have different tokenizers; name the model that the "
            "checkpoint was made of"
        )


def read_base(
    model: OpenModel,
    texts: Mapping[str, Sequence[Tensor]],
    evaluator: Evaluator | None,
    progress: Progress,
    keep: Path | None = None,
    hidden: Collection[str] = (),
) -> dict[str, list[Distributions]]:
    """The base's distributions on several texts, and what the evaluator keeps of it, from one streamed pass.

    Of the texts named in `hidden` the last decoder layer's outputs are kept, too. In the folder `keep` all of it
    outlasts a run that is killed, and only what is missing there, or was made of something else, is computed. Of
    several ranks each names its own batches. Raises `CompressionError` for a model without a language-model head.
    """
    require_head(model.partial.model)
    jobs = [(name, number, batch) for name, batches in texts.items() for number, batch in enumerate(batches)]
    facts = [[] if keep is None else _facts(model, batch, name in hidden) for name, _, batch in jobs]
    files = [None if keep is None else keep / f"{name}-{number:07d}.safetensors" for name, number, _ in jobs]
    found = [_kept(*each) for each in zip(files, facts, strict=True)]
    inputs: dict[int, tuple[Path, list[Any]]] = {}  # by the evaluator's batch: where what enters the head is kept
    if evaluator is not None and keep is not None:
        for number in evaluator.missing():
            told = _facts(evaluator.base, evaluator.batches[number], True)
            inputs[number] = keep / f"held-out-{number:07d}.safetensors", told
            if told_of(inputs[number][0]) == told:
                evaluator.inputs[number] = kept_tensors(inputs[number][0])["input"]
    wanted = [place for place, answers in enumerate(found) if answers is None]
    asked = [] if evaluator is None else evaluator.missing()
    if wanted or asked:
        batches = [jobs[place][2] for place in wanted]
        named = {number for number, place in enumerate(wanted) if jobs[place][0] in hidden}
        asking = _Asking(model.architecture.units[-1], len(batches), named)
        with ExitStack() as stack:
            visitors: list[LayerVisitor] = [asking]
            if evaluator is not None and asked:
                riding = stack.enter_context(evaluator.keeping(len(batches)))
                visitors, batches = [*visitors, riding], [*batches, *riding.batches]
            own = None if here().is_alone else range(len(batches))
            Pass(model, batches, progress, "ask the base", to_end=True, own=own).run(*visitors)
        for number, place in enumerate(wanted):  # each leaves the disk where it lay once it is kept
            made, file = asking.found.pop(number), files[place]
            if file is not None:
                keep_tensors(file, made.tensors, facts[place])
            found[place] = made if file is None else _kept(file, facts[place])
        for number in asked:
            if evaluator is not None and number in inputs:
                keep_tensors(inputs[number][0], {"input": evaluator.inputs[number]}, inputs[number][1])
    answers: dict[str, list[Distributions]] = {name: [] for name in texts}
    for (name, *_), answer in zip(jobs, found, strict=True):
        assert answer is not None
        answers[name].append(answer)
    return answers


class _Asking(LayerVisitor):
    """Keeps distributions on disk, and of some batches what the last decoder layer outputs."""

    def __init__(self, last: str, count: int, hidden: Collection[int]) -> None:
        self.last, self.count, self.hidden = last, count, hidden
        self.states: dict[int, Tensor] = {}
        self.found: dict[int, Distributions] = {}

    def replaced(self, unit: str, own: Forward) -> Forward:
        if unit != self.last or self.at.batch not in self.hidden:
            return own

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = own(*args, **kwargs)
            hidden = output if isinstance(output, Tensor) else output[0]
            self.states[self.at.batch] = allocate(tuple(hidden.shape), hidden.dtype, CPU, 0).copy_(hidden.detach())
            return output

        return forward

    @torch.no_grad()
    def finished(self, batch: int, output: Any) -> None:
        if batch >= self.count:
            return
        logits: Tensor = output.logits
        shape, kept = tuple(logits.shape[:2]), min(KEPT, logits.shape[-1])
        made = Distributions(
            allocate((*shape, kept), torch.int32, CPU, budget=0),
            allocate((*shape, kept), torch.float32, CPU, budget=0),
            allocate(shape, torch.float32, CPU, budget=0),
            self.states.pop(batch, None),
        )
        rows = rows_at_once(1, logits.shape[-1])
        for number, sequence in enumerate(logits):
            for begin in range(0, len(sequence), rows):
                part = slice(begin, begin + rows)
                logs, tokens = sequence[part].float().log_softmax(-1).topk(kept)
                made.tokens[number, part], made.logs[number, part] = tokens.int(), logs
                made.others[number, part] = _log_rest(logs.double()).float()
        self.found[batch] = made


def _facts(model: OpenModel, batch: Tensor, hidden: bool) -> list[Any]:
    digest = hashlib.sha256(batch.contiguous().numpy().tobytes()).hexdigest()
    return [digest, list(batch.shape), model.fingerprint, str(model.partial.dtype), KEPT, hidden]


def _kept(path: Path | None, facts: list[Any]) -> Distributions | None:
    """What an earlier run has kept; None if it is missing, cut short or of another question."""
    return Distributions(**kept_tensors(path)) if path is not None and told_of(path) == facts else None


def top_divergence(base: Distributions, logits: Tensor) -> Tensor:
    """KL(base || other) of what is kept, in nats at every position [B, L], from the other's `logits` [B, L, V]."""
    tokens, logs, others = (value.to(logits.device) for value in (base.tokens, base.logs, base.others))
    scores = logits.float()
    ours = scores.gather(-1, tokens.long()) - scores.logsumexp(-1, keepdim=True)
    return (logs.exp() * (logs - ours)).sum(-1) + others.exp() * (others - _log_rest(ours))


def _log_rest(logs: Tensor) -> Tensor:
    """The log of what these log probabilities [..., K] leave of 1."""
    return (1 - logs.exp().sum(-1)).clamp_min(torch.finfo(torch.float32).tiny).log().clamp_min(LEAST)
