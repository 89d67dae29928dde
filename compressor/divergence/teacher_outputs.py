"""The base's next-token distributions on text that is trained on, and its answers to an evaluator,
from one pass.

Of each position the largest log probabilities are kept on disk, and the mass of all others as one
more outcome, so that base and smaller model are never in memory together. The divergence from what
is kept is a lower bound of that from the whole distribution, and differs little from it: good
enough to train toward; an `Evaluator` has the full vocabulary."""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.divergence.evaluator import Evaluator, rows_at_once
from compressor.divergence.logits import LogitReader, require_head
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.opened import OpenModel
from compressor.model.streaming import TINY, LayerVisitor, Pass, allocate, hidden_of
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Progress
from compressor.tensor_cache import load_tensors, read_metadata, save_tensors

KEPT = 64  # log probabilities of each position
LEAST = -60.0  # the logarithm of a mass of nothing, as far as float32 is concerned
CPU = torch.device("cpu")


@frozen
class Distributions:
    """Ids and log probabilities [B, L, K] of a batch's top tokens, and the log of the other tokens'
    mass [B, L]."""

    tokens: Tensor
    logs: Tensor
    others: Tensor  # [B, L]
    hidden: Tensor | None = None  # [B, L, H] of the last decoder layer, where it was wanted

    def rows(self, chosen: slice) -> "Distributions":
        """Return the distributions of some sequences of the batch."""
        return Distributions(**{name: tensor[chosen] for name, tensor in self.tensors.items()})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by field name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


def check_base(smaller: OpenModel, base: OpenModel) -> None:
    """Refuse a base whose distributions are no target for the smaller model: of another vocabulary
    or tokenizer."""
    if smaller.vocabulary != base.vocabulary:
        raise CompressionError(
            f"{base.source.label} knows {base.vocabulary} tokens, {smaller.source.label} "
            f"{smaller.vocabulary}; name the model that the checkpoint was made of"
        )
    smaller_tokenizer = load_tokenizer(smaller.source.folder)
    if smaller_tokenizer.get_vocab() != load_tokenizer(base.source.folder).get_vocab():
        raise CompressionError(
            f"{base.source.label} and {smaller.source.label} have different tokenizers; name the "
            "model that the checkpoint was made of"
        )


def read_base(
    model: OpenModel,
    texts: Mapping[str, Sequence[Tensor]],
    evaluator: Evaluator | None,
    progress: Progress,
    folder: Path,
    hidden: Collection[str] = (),
) -> dict[str, list[Distributions]]:
    """Return the base's distributions on several texts, and what the evaluator keeps of it, from
    one streamed pass.

    For the texts named in `hidden` the last decoder layer's outputs are kept, too. All of it
    outlasts in `folder` a run that is killed, and only what is missing there, or was made of
    something else, is computed. Ranks share the batches. Raises `CompressionError` for a model
    without a language-model head."""
    require_head(model.partial.model)
    outputs = defaultdict(list)
    for name, batches in texts.items():
        for number, batch in enumerate(batches):
            path = folder / f"{name}-{number:07d}.safetensors"
            outputs[name].append(_StoredOutputs(model, path, batch, name in hidden))
    every = [*chain.from_iterable(outputs.values())]
    share = ranks().share(*texts.values())
    wanted = [every[position] for position in sorted(share) if not every[position].is_kept]
    missing = {}  # by the evaluator's batch: what enters the base's head
    if evaluator is not None:
        for number in evaluator.missing():
            path = folder / f"held-out-{number:07d}.safetensors"
            stored = _StoredOutputs(evaluator.base, path, evaluator.batches[number], True)
            if stored.is_kept:
                evaluator.inputs[number] = load_tensors(path)["input"]
            else:
                missing[number] = stored
    if wanted or missing:
        teacher = _Teacher(model.architecture.decoder_layers[-1], wanted)
        visitors: list[LayerVisitor] = [teacher]
        batches = [stored.batch for stored in wanted]
        with ExitStack() as stack:
            stack.enter_context(teacher.attached(model.partial.model))
            if evaluator is not None and missing:
                probe = stack.enter_context(evaluator.keeping(len(wanted)))
                visitors.append(probe)
                batches += probe.batches
            Pass(model, batches, progress, "ask the base", to_end=True).run(*visitors)
        if evaluator is not None:
            for number, stored in missing.items():
                save_tensors(stored.path, {"input": evaluator.inputs[number]}, stored.facts)
    ranks().barrier()  # until all ranks have written their answers
    distributions = {}
    for name in texts:
        distributions[name] = [
            Distributions(**load_tensors(stored.path)) for stored in outputs[name]
        ]
    return distributions


class _StoredOutputs:
    """A model's stored outputs on one batch, with all that decides them."""

    def __init__(self, model: OpenModel, path: Path, batch: Tensor, hidden: bool) -> None:
        self.path = path
        self.batch = batch
        self.hidden = hidden
        self.facts = [
            hashlib.sha256(batch.contiguous().numpy().tobytes()).hexdigest(),
            list(batch.shape),
            model.fingerprint,
            str(model.partial.dtype),
            KEPT,
            hidden,
        ]

    @property
    def is_kept(self) -> bool:
        """False if the file is missing, cut short or of another batch or model."""
        return bool(read_metadata(self.path) == self.facts)


class _Teacher(LogitReader):
    """Store the distributions of a pass's first batches, and of some what the last decoder layer
    outputs."""

    def __init__(self, last: str, wanted: Sequence[_StoredOutputs]) -> None:
        positions = [torch.ones(stored.batch.shape, dtype=torch.bool) for stored in wanted]
        super().__init__(positions, self._keep)
        self.last = last
        self.wanted = wanted
        self.states = dict[int, Tensor]()

    def on_layer_output(self, output: Any) -> None:
        number = self.running
        if self.at.layer == self.last and number is not None and self.wanted[number].hidden:
            hidden = hidden_of(output)
            storage = allocate(tuple(hidden.shape), hidden.dtype, CPU, 0)
            self.states[number] = storage.copy_(hidden.detach())

    @torch.no_grad()
    def _keep(self, number: int, logits: Tensor) -> None:
        shape = self.positions[number].shape
        vocabulary = logits.shape[-1]
        parts = []
        for part in logits.split(rows_at_once(1, vocabulary)):
            best, ids = part.log_softmax(-1, dtype=torch.float32).topk(min(KEPT, vocabulary))
            rest = _log_rest(as_float64(best)).float()
            parts.append((ids.int().cpu(), best.cpu(), rest.cpu()))
        tokens, logs, others = map(torch.cat, zip(*parts, strict=True))
        distributions = Distributions(
            tokens.view(*shape, -1),
            logs.view(*shape, -1),
            others.view(shape),
            self.states.pop(number, None),
        )
        stored = self.wanted[number]
        save_tensors(stored.path, distributions.tensors, stored.facts)


def top_divergence(base: Distributions, logits: Tensor) -> Tensor:
    """KL(base || other) of what is kept, in nats at every position [B, L], from the other's
    `logits` [B, L, V]."""
    tokens = base.tokens.to(logits.device)
    base_logs = base.logs.to(logits.device)
    base_rest = base.others.to(logits.device)
    scores = logits.float()
    logs = scores.gather(-1, tokens.long()) - scores.logsumexp(-1, keepdim=True)
    of_top = (base_logs.exp() * (base_logs - logs)).sum(-1)
    return of_top + base_rest.exp() * (base_rest - _log_rest(logs))


def _log_rest(logs: Tensor) -> Tensor:
    """Return the log of what these log probabilities [..., K] leave of 1."""
    rest = 1 - logs.exp().sum(-1)
    return rest.clamp_min(TINY).log().clamp_min(LEAST)
