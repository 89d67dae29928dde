"""The text of a recovery, what the original expects after each token of it, and which sequences a step takes.

B sequences of L tokens, H hidden.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.data.batches import Calibration, calibrate, load_tokenizer, recalibrate
from compressor.data.sources import WeightedSource
from compressor.errors import CompressionError
from compressor.evaluation.heldout import rows_at_once
from compressor.evaluation.teacher import Distributions, distributions
from compressor.model.buffers import allocate
from compressor.model.opened import OpenModel
from compressor.model.streaming import Forward, LayerVisitor
from compressor.progress import Progress
from compressor.recipe.plan_json import refuse_floods
from compressor.steps.distill.options import Recovery
from compressor.surgery.kept import keep_tensors, kept_tensors, told_of

HELDOUT = 48  # sequences that judge and train nothing
MOST_HELDOUT = 0.2  # of a short text
BATCH = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids [B, L], what the original expects after each, and maybe its last layer's output [B, L, H]."""

    tokens: Tensor
    original: Distributions
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """Sequences to train on, each where it lies (batch, row), and batches that judge."""

    batches: tuple[Batch, ...]
    fit: tuple[tuple[int, int], ...]
    heldout: tuple[Batch, ...]
    most: int  # sequences that are computed at once

    def of_step(self, step: int, sequences: int, seed: int) -> list[Batch]:
        """The batches of a step: passes over shuffled sequences, without a remainder's short step."""
        epoch, place = divmod(step, len(self.fit) // sequences)
        generator = torch.Generator().manual_seed((seed + 1000003 * epoch) % 2**63)
        order = torch.randperm(len(self.fit), generator=generator).tolist()
        chosen = [self.fit[number] for number in order[place * sequences : (place + 1) * sequences]]
        return [self._joined(chosen[begin : begin + self.most]) for begin in range(0, sequences, self.most)]

    def _joined(self, places: Sequence[tuple[int, int]]) -> Batch:
        rows = [(self.batches[batch], row) for batch, row in places]

        def stacked(name: str) -> Tensor:
            return torch.stack([getattr(batch.original, name)[row] for batch, row in rows])

        original = Distributions(stacked("tokens"), stacked("logs"), stacked("others"))
        states = [batch.hidden[row] for batch, row in rows if batch.hidden is not None]
        tokens = torch.stack([batch.tokens[row] for batch, row in rows])
        return Batch(tokens, original, torch.stack(states) if states else None)


def recovery_text(
    options: Recovery, sources: Sequence[WeightedSource], model: OpenModel, seed: int, passed: int = 0
) -> Calibration:
    """The text of a recovery; its last sequences, behind `passed` tokens that others have used, are held out.

    Raises `CompressionError` if it is too short for a step, or more is asked for than any model can be run on.
    """
    count = max(options.steps * options.sequences, -(-passed // options.length)) + HELDOUT
    refuse_floods(count, options.length)
    tokenizer = load_tokenizer(model.source.folder)

    def read(samples: int, share: float) -> Calibration:
        return calibrate(
            sources,
            tokenizer,
            samples=samples,
            length=options.length,
            seed=seed,
            vocab=model.vocabulary,
            batch_size=_rows(options, model),
            heldout=share,
        )

    made = read(count, HELDOUT / count)
    if (found := int(made.identity["samples"])) < count:
        made = read(found if len(sources) == 1 else count, min(HELDOUT / found, MOST_HELDOUT))
    _refuse_short(options, made)
    return made


def repeated_text(options: Recovery, identity: Mapping[str, Any], model: OpenModel) -> Calibration:
    """The text that a plan's recovery names; raises `CompressionError` unless the same tokens come out."""
    made = recalibrate(identity, load_tokenizer(model.source.folder), model.vocabulary, _rows(options, model))
    _refuse_short(options, made)
    return made


def _rows(options: Recovery, model: OpenModel) -> int:
    return min(BATCH, options.sequences, rows_at_once(options.length, model.vocabulary))


def _places(text: Calibration) -> Iterator[tuple[int, int]]:
    """(batch, row) of every sequence to train on; those that were cut shorter than others are left out."""
    fit = text.fit
    longest = max((text.batches[number].shape[1] for number in fit), default=0)
    for number in fit:
        if text.batches[number].shape[1] == longest:
            yield from ((number, row) for row in range(len(text.batches[number])))


def _refuse_short(options: Recovery, text: Calibration) -> None:
    found = len(list(_places(text)))
    if found < options.sequences or not text.heldout:
        raise CompressionError(
            f"the text gives {found} sequences of {options.length} tokens to train on, and a step takes "
            f"{options.sequences}; give more text, or lower --tokens-per-step"
        )


class _HiddenStates(LayerVisitor):
    """Keeps what the last decoder layer puts out, on disk."""

    def __init__(self, last: str) -> None:
        self.last, self.batch, self.found = last, 0, dict[int, Tensor]()

    def entering(self, batch: int) -> None:
        self.batch = batch

    def replaced(self, unit: str, own: Forward) -> Forward:
        if unit != self.last:
            return own

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = own(*args, **kwargs)
            hidden = output if isinstance(output, Tensor) else output[0]
            place = allocate(tuple(hidden.shape), hidden.dtype, torch.device("cpu"), budget=0)
            self.found[self.batch] = place.copy_(hidden.detach())
            return output

        return forward


def read_original(
    text: Calibration, original: OpenModel, options: Recovery, progress: Progress, place: Path | None = None
) -> Text:
    """Ask the original once about all of the text; its answers lie on disk, and it need not be read again.

    In the folder `place`, if one is given, they outlast a run that is killed, for the one that goes on.
    """
    found = None if place is None else _kept(text, original, options, place)
    if found is None:
        states = _HiddenStates(original.architecture.units[-1])
        asked = distributions(original, text.batches, progress, *([states] if options.hidden_states else []))
        found = []
        for number, tokens in enumerate(text.batches):  # each leaves the disk where it lay once it is kept
            made = Batch(tokens, asked.pop(0), states.found.pop(number, None))
            found.append(made if place is None else _keep(made, place, number, _facts(text, original, options)))
    heldout = tuple(found[number] for number in sorted(text.heldout))
    return Text(tuple(found), tuple(_places(text)), heldout, _rows(options, original))


def _facts(text: Calibration, original: OpenModel, options: Recovery) -> list[Any]:
    """What decides the original's answers."""
    return [text.identity.get("sha256"), original.fingerprint, str(original.partial.dtype), bool(options.hidden_states)]


def _keep(batch: Batch, place: Path, number: int, facts: list[Any]) -> Batch:
    """Write what the original says of a batch, and have it lie there, mapped."""
    known, path = batch.original, _file(place, number)
    hidden = {} if batch.hidden is None else {"hidden": batch.hidden}
    keep_tensors(path, {"tokens": known.tokens, "logs": known.logs, "others": known.others, **hidden}, facts)
    return _read(path, batch.tokens)


def _kept(text: Calibration, original: OpenModel, options: Recovery, place: Path) -> list[Batch] | None:
    """What an earlier run has kept of all batches; None if anything is missing, cut short or of another question."""
    files = [_file(place, number) for number in range(len(text.batches))]
    if any(told_of(path) != _facts(text, original, options) for path in files):
        return None
    return [_read(path, tokens) for path, tokens in zip(files, text.batches, strict=True)]


def _file(place: Path, number: int) -> Path:
    return place / f"batch-{number:07d}.safetensors"


def _read(path: Path, tokens: Tensor) -> Batch:
    found = kept_tensors(path)
    return Batch(tokens, Distributions(found["tokens"], found["logs"], found["others"]), found.get("hidden"))
