"""How far variants of a model are from their base on held-out text: KL, loss and flipped greedy tokens per sequence.

KL(base || variant) is that of next-token distributions over the full vocabulary. Kept of the base is what enters its
head (small), not its logits (large): beside a variant's head, the base's computes both sets of logits, and whatever
the model does after its head is done to both. Where only some tokens count, such as those of an answer, the heads see
the positions before these alone.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from compressor.data.batches import EvaluationSet
from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.model.architecture import head_of
from compressor.model.inputs import Inputs, forward_inputs
from compressor.model.opened import OpenModel
from compressor.model.streaming import BUDGET, LayerVisitor, Pass, allocate
from compressor.progress import Progress, Silent

LOGITS = 2**25  # logits computed at once: 128 MiB in float32
TOGETHER = 2**20, 2**24  # of them compared at once: few enough for a processor's cache, many enough for a device
FEWEST = 8  # held-out sequences that can tell whether a change is a gain
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Difference:
    """KL from the base before and after a change, in nats per token: means over held-out sequences."""

    before: float
    after: float
    standard_error: float  # of the gain, paired by sequence
    sequences: int

    @classmethod
    def of(cls, before: Sequence[float] | Tensor, after: Sequence[float] | Tensor) -> Self:
        one, other = (torch.as_tensor(values, dtype=torch.float64) for values in (before, after))
        error = float((one - other).std()) / math.sqrt(len(one)) if len(one) > 1 else math.inf
        return cls(float(one.mean()), float(other.mean()), error, len(one))

    @property
    def gain(self) -> float:
        """By how much the change brings the model nearer to its base."""
        return self.before - self.after

    @property
    def accepted(self) -> bool:
        """Return True if the gain is above its standard error; a KL that is no number is as far away as can be.

        Fewer than eight sequences accept nothing.
        """
        if self.sequences < FEWEST or not math.isfinite(self.after):
            return False
        return not math.isfinite(self.before) or self.gain > self.standard_error


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """Figures of a variant for each held-out sequence, [n] unless stated; KL and loss in nats per predicted token."""

    kl: Tensor
    loss: Tensor  # of the next token
    flips: Tensor  # share of the positions at which the greedy token is not the base's
    tokens: Tensor  # that are predicted
    domain: Tensor  # number of the evaluation set
    base_loss: Tensor = field(default_factory=lambda: torch.empty(0))
    # [n, M, 5] for each of the evaluator's marks: how often it is the next token; the sums of its probability there by
    # the base and by the variant; and the same two at all other positions
    marks: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def sequences(self) -> int:
        return len(self.kl)

    def of(self, domains: Collection[int]) -> "Figures":
        rows = torch.isin(self.domain, torch.tensor([*domains]))
        values = (getattr(self, each.name) for each in fields(self))
        return Figures(*(value[rows] if len(value) else value for value in values))

    @property
    def means(self) -> dict[str, float]:
        """Means of `kl`, `loss` and `flips`; each predicted token counts alike."""
        weights = self.tokens.double() / self.tokens.sum()
        return {name: float((getattr(self, name) * weights).sum()) for name in ("kl", "loss", "flips")}


def accepts(before: Figures, after: Figures) -> bool:
    """The one rule for a change: its mean gain in KL over eight or more sequences is above its standard error."""
    return Difference.of(before.kl, after.kl).accepted


def require_enough(sequences: int, step: str, remedy: str = "give more text, or shorter sequences") -> None:
    """Refuse held-out text on which no change could ever be accepted."""
    if sequences < FEWEST:
        raise CompressionError(
            f"{step} takes no change that {FEWEST} held-out sequences do not confirm, and the text leaves {sequences}; "
            f"{remedy}"
        )


@torch.no_grad()
def compare_sequence(ours: Tensor, theirs: Tensor, targets: Tensor, marks: Sequence[Sequence[int]] = ()) -> list[float]:
    """One sequence's KL, loss, flips and the base's loss, means over positions; then five figures for each mark.

    Logits of variant and base, [N, V] each, and the next tokens [N]. A mark's figures are those of `Figures.marks`.
    """
    rows = max(1, TOGETHER[ours.device.type != "cpu"] // ours.shape[-1])
    found = list[Tensor]()
    for logits, base, following in zip(*(each.split(rows) for each in (ours, theirs, targets)), strict=True):
        logits, base = logits.float(), base.float()
        flips = as_float64(logits.argmax(-1) != base.argmax(-1))
        logs, others = log_softmax(logits, dim=-1), log_softmax(base, dim=-1)
        kl = as_float64((others.exp() * (others - logs)).sum(-1))
        losses = (-as_float64(each.gather(-1, following[:, None])[:, 0]) for each in (logs, others))
        columns = [kl, *losses, flips]
        for tokens in marks:
            ids = torch.tensor(tokens, device=following.device)
            due = as_float64(torch.isin(following, ids))
            columns += [due, *(as_float64(each[:, ids].exp()).sum(-1) for each in (others, logs))]
        found.append(torch.stack(columns))
    kl, loss, base_loss, flips, *more = torch.cat(found, 1)
    figures = [kl.mean(), loss.mean(), flips.mean(), base_loss.mean()]
    for due, of_base, of_variant in zip(*(more[place::3] for place in range(3)), strict=True):
        figures += [due.sum(), *((p * share).sum() for share in (due, 1 - due) for p in (of_base, of_variant))]
    return torch.stack(figures).tolist()


def rows_at_once(tokens: int, vocabulary: int) -> int:
    """Rows of so many tokens whose logits are few enough to be computed at once."""
    return max(1, LOGITS // (tokens * vocabulary))


def require_head(model: Any) -> nn.Module:
    """The language-model head; raises `CompressionError` for a model without one."""
    if (head := head_of(model)) is None:
        raise CompressionError(
            f"{type(model).__name__} has no language-model head, so its next-token distributions cannot be compared"
        )
    return head


class Variants(LayerVisitor):
    """Makes the batches of a pass meet variants of the model: the running one `variant`, nothing where it is None."""

    variant: int | None = 0


class Evaluator:
    """A base model and held-out text, on which any number of variants are compared with it.

    `marks` are sets of tokens, such as those that end a text, whose probabilities are measured, too. Each of several
    ranks keeps and runs its share of the batches; figures are those of all.
    """

    def __init__(self, base: OpenModel, sets: Sequence[EvaluationSet], marks: Sequence[Sequence[int]] = ()) -> None:
        self.marks = tuple(map(tuple, marks))
        self.base, self.names = base, tuple(entry.name for entry in sets)
        self.head = require_head(base.partial.model)
        self._head_name = next(name for name, module in base.partial.model.named_modules() if module is self.head)
        self._same_head = {self.head: True}  # of a variant: whether its weights are the base's
        self.batches: list[Tensor] = []  # so small that their logits are, too
        self.counted: list[Tensor | None] = []  # by batch: [B, L - 1] positions whose next token counts; None: all
        self.domains: list[int] = []  # of each batch
        for number, entry in enumerate(sets):
            for batch, given in zip(entry.batches, entry.counted or (None,) * len(entry.batches), strict=True):
                mask = batch.counted if given is None and isinstance(batch, Inputs) else given
                most = batch.shape[1] if mask is None else int(mask.sum(1).max())
                rows = rows_at_once(most, base.vocabulary)
                parts = batch.split(rows)
                self.batches += parts
                self.counted += [None] * len(parts) if mask is None else [part[:, 1:] for part in mask.split(rows)]
                self.domains += [number] * len(parts)
        self.inputs: dict[int, Tensor] = {}  # of the base's head, by batch
        self._held = 0  # bytes in memory

    @classmethod
    def of(cls, base: OpenModel, batches: Sequence[Tensor]) -> "Evaluator":
        return cls(base, [EvaluationSet("held-out", tuple(batches))])

    @property
    def sequences(self) -> int:
        return sum(map(len, self.batches))

    @property
    def own(self) -> list[int]:
        own = ranks().own(self.batches)
        return list(range(len(self.batches))) if own is None else sorted(own)

    def tokens_of(self, number: int) -> list[int]:
        """How many tokens count in each sequence of a batch."""
        batch, counted = self.batches[number], self.counted[number]
        return [batch.shape[1] - 1] * len(batch) if counted is None else counted.sum(1).tolist()

    def missing(self, wanted: Collection[int] | None = None) -> list[int]:
        """Numbers of this rank's batches of which the base's answers are not kept yet."""
        return [number for number in self.own if number not in self.inputs and (wanted is None or number in wanted)]

    def keep_input(self, number: int, value: Tensor) -> None:
        """Keep what enters the base's head for a batch, on disk past the budget of memory."""
        place = allocate(tuple(value.shape), value.dtype, CPU, max(0, BUDGET - self._held))
        self._held += value.nbytes
        self.inputs[number] = place.copy_(value.detach())

    def keeping(self, first: int = 0) -> AbstractContextManager["Riding"]:
        """Keep the base's answers from a pass over it in which the visitor's batches have numbers from `first` on."""
        return self._riding(self.base.partial.model, [(None, number) for number in self.missing()], first)

    @contextmanager
    def measuring(self, model: nn.Module) -> Iterator["Riding"]:
        """Measure a variant in another pass, or `model` whole in memory; the base is kept already.

        The visitor has the figures when the block has ended.
        """
        with self._riding(model, [(0, number) for number in range(len(self.batches))]) as riding:
            yield riding
        riding.add_up()

    def keep(self, progress: Progress | None = None, phase: str = "ask the base") -> Figures:
        """Keep the base's answers from a streamed pass of its own; returns the base's figures."""
        riding = self._keep(progress or Silent(), phase)
        riding.add_up()
        return riding.figures[0]

    def _keep(self, progress: Progress, phase: str = "ask the base", figures: bool = True) -> "Riding":
        with self.keeping() as riding:
            riding.brief = not figures
            riding.alone_in(self.base, progress, phase).run(riding)
        return riding

    def measure(
        self,
        model: OpenModel,
        visitor: Variants | None = None,
        variants: int = 1,
        progress: Progress | None = None,
        phase: str = "evaluate",
        only: Sequence[int] | None = None,
    ) -> list[Figures]:
        """Figures of variants of a model, all in one streamed pass, on all batches or `only` those of these numbers.

        Where the base's answers are not kept yet, it runs along in this pass if it is the same opened model, and in
        one of its own otherwise.
        """
        numbers = range(len(self.batches)) if only is None else only
        progress = progress or Silent()
        if model.partial is not self.base.partial and self.missing(numbers):
            self._keep(progress, figures=False)
        missing = [(None, number) for number in self.missing(numbers)]
        places = [*missing, *((variant, number) for variant in range(variants) for number in numbers)]
        with self._riding(model.partial.model, places, 0, visitor) as riding:
            riding.brief = True
            riding.alone_in(model, progress, phase).run(riding, *([] if visitor is None else [visitor]))
        riding.add_up()
        return riding.figures

    def measure_loaded(self, model: nn.Module) -> Figures:
        if self.missing():
            self._keep(Silent(), figures=False)
        with self.measuring(model) as riding, torch.no_grad():
            device, dtype = (one := next(model.parameters())).device, one.dtype
            for place in riding.own:
                riding.on_batch_start(place)
                inputs = forward_inputs(riding.batches[place], device, dtype)
                riding.on_batch_end(place, model(**inputs, use_cache=False))
        return riding.figures[0]

    @contextmanager
    def _riding(
        self,
        model: nn.Module,
        places: Sequence[tuple[int | None, int]],
        first: int = 0,
        variants: Variants | None = None,
    ) -> Iterator["Riding"]:
        head = require_head(model)
        riding = Riding(self, tuple(places), first, variants)
        try:
            with head.register_forward_pre_hook(riding.before_head), head.register_forward_hook(riding.after_head):
                yield riding
        finally:
            if not self._same_head.get(head, True):
                self.base.partial.release(self._head_name)

    def base_logits(self, head: nn.Module, number: int, device: torch.device, more: Sequence[Any]) -> Tensor:
        """The base's logits of a batch beside a variant's `head`, which serves for both where its weights are equal."""
        if not self._same_head.get(head):
            self.base.partial.load(self.base.partial.keys_under(self._head_name))
            if head not in self._same_head:
                base, variant = (dict(module.named_parameters()) for module in (self.head, head))
                self._same_head[head] = base.keys() == variant.keys() and all(
                    torch.equal(value, variant[key]) for key, value in base.items()
                )
                if self._same_head[head]:
                    self.base.partial.release(self._head_name)
        used = head if self._same_head[head] else self.head
        logits: Tensor = used.forward(self.inputs[number].to(device), *more)  # past the head's own hooks
        return logits


@dataclass(slots=True)
class Riding(LayerVisitor):
    """Held-out batches in a pass, from the number `first` on: (variant, batch) of each, the base's variant being None.

    When the pass has ended, `figures` are those of each variant, or of the base, from all ranks.
    """

    repeatable = True
    evaluator: Evaluator
    places: tuple[tuple[int | None, int], ...]
    first: int = 0
    variants: Variants | None = None
    brief: bool = False  # what enters the base's head is kept, and the head computes next to nothing
    figures: list[Figures] = field(default_factory=list)
    _now: tuple[int | None, int] | None = None
    _chosen: bool = False  # the head sees only positions that count
    _seen: dict[tuple[int | None, int], list[list[float]]] = field(default_factory=dict)  # of each sequence

    @property
    def batches(self) -> list[Tensor]:
        return [self.evaluator.batches[number] for _, number in self.places]

    @property
    def own(self) -> list[int]:
        own = {*self.evaluator.own}
        return [place for place, (_, number) in enumerate(self.places) if number in own]

    def alone_in(self, model: OpenModel, progress: Progress, phase: str) -> Pass:
        own = None if ranks().is_alone else self.own
        return Pass(model, self.batches, progress, phase, to_end=True, own=own)

    def on_batch_start(self, batch: int) -> None:
        place = batch - self.first
        self._now = self.places[place] if 0 <= place < len(self.places) else None
        if self.variants is not None:
            self.variants.variant = self._now[0] if self._now is not None else None

    def before_head(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Hidden states [B, L, H] -> [1, N, H] of the positions that count; those of a head of another form stay."""
        self._chosen = False
        if self._now is None:
            return None
        variant, number = self._now
        hidden, counted = args[0], self.evaluator.counted[number]
        if hidden.shape[:-1] != self.evaluator.batches[number].shape:
            return None
        if counted is not None:
            self._chosen = True
            hidden = hidden[:, :-1][counted.to(hidden.device)][None]
        if variant is None and self.brief:
            self.evaluator.keep_input(number, hidden)
            hidden = hidden[:, :0]
        return (hidden, *args[1:])

    def after_head(self, head: nn.Module, args: tuple[Any, ...], logits: Tensor) -> Tensor | None:
        """Keep what entered the base's head, or put the base's logits below a variant's."""
        if self._now is None:
            return None
        variant, number = self._now
        if variant is None:
            if number not in self.evaluator.inputs:
                self.evaluator.keep_input(number, args[0])
            return None
        return torch.cat([logits, self.evaluator.base_logits(head, number, logits.device, args[1:])])

    def on_batch_end(self, batch: int, output: Any) -> None:
        """Compare a variant's output with the base's, which is below it."""
        if self._now is None or (self.brief and self._now[0] is None):
            return
        variant, number = self._now
        logits, tokens = output.logits, self.evaluator.batches[number].to(output.logits.device)
        counted = self.evaluator.counted[number]
        pair = (logits, logits) if variant is None else logits.chunk(2)
        if counted is None:
            ours, theirs, targets = (list(each) for each in (*(part[:, :-1] for part in pair), tokens[:, 1:]))
        else:
            counted, counts = counted.to(tokens.device), counted.sum(1).tolist()
            flat = [part[0] if self._chosen else part[:, :-1][counted] for part in pair]
            ours, theirs, targets = (each.split(counts) for each in (*flat, tokens[:, 1:][counted]))
        marks = self.evaluator.marks
        self._seen[self._now] = [compare_sequence(*each, marks) for each in zip(ours, theirs, targets, strict=True)]

    def add_up(self) -> None:
        """Put together what every rank's batches have shown, in the order of the batches."""
        seen = {key: values for each in ranks().all_gather(self._seen) for key, values in each.items()}
        batches, domains = self.evaluator.batches, self.evaluator.domains
        self.figures = []
        for variant in sorted({variant for variant, _ in seen if variant is not None}) or [None]:
            numbers = sorted(number for each, number in seen if each == variant)
            found = torch.tensor([row for n in numbers for row in seen[variant, n]], dtype=torch.float64)
            found = found.view(-1, 4 + 5 * len(self.evaluator.marks))
            kl, loss, flips, base_loss = found[:, :4].T
            tokens = torch.cat([torch.tensor(self.evaluator.tokens_of(n)) for n in numbers]) if numbers else kl.long()
            domain = torch.tensor([domains[n] for n in numbers for _ in range(len(batches[n]))], dtype=torch.int64)
            marks = found[:, 4:].view(len(found), -1, 5)
            self.figures.append(Figures(kl, loss, flips, tokens, domain, base_loss, marks))
