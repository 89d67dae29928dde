"""Divergence of a model's variants from their base on held-out text: KL, loss and flipped tokens
per sequence.

KL(base || variant) is that of next-token distributions over the full vocabulary. Kept of the base
is what enters its head (small), not its logits (large): beside a variant's head, the base's
computes both sets of logits, and whatever the model does after its head is done to both. Where only
some tokens count, such as those of an answer, the heads see the positions before these alone."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from torch.nn.utils.rnn import pad_sequence

from compressor.data.batches import EvaluationSet
from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.divergence.logits import LogitReader, require_head
from compressor.errors import CompressionError
from compressor.model.inputs import Inputs, forward_inputs
from compressor.model.opened import OpenModel
from compressor.model.streaming import BUDGET, Pass, allocate
from compressor.model.substitution import AS_IT_IS, SideBySide, Substitution
from compressor.progress import SILENT, Progress

LOGITS = 2**25  # logits computed at once: 128 MiB in float32
COMPARED = 2**22  # logits compared at once
FEWEST = 8  # held-out sequences that can tell whether a change is a gain
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Difference:
    """KL from the base before and after a change, in nats per token: means over held-out
    sequences."""

    before: float
    after: float
    standard_error: float  # of the gain, paired by sequence
    sequences: int

    @classmethod
    def of(cls, before: Sequence[float] | Tensor, after: Sequence[float] | Tensor) -> Self:
        first = torch.as_tensor(before, dtype=torch.float64)
        second = torch.as_tensor(after, dtype=torch.float64)
        count = len(first)
        error = float((first - second).std()) / math.sqrt(count) if count > 1 else math.inf
        return cls(float(first.mean()), float(second.mean()), error, count)

    @property
    def gain(self) -> float:
        """By how much the change brings the model nearer to its base."""
        return self.before - self.after

    @property
    def accepted(self) -> bool:
        """Return True if the gain is above its standard error; a KL that is no number is as far
        away as can be.

        Fewer than eight sequences accept nothing.
        """
        if self.sequences < FEWEST or not math.isfinite(self.after):
            return False
        return not math.isfinite(self.before) or self.gain > self.standard_error


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """Figures of a variant for each held-out sequence, [n] unless stated; KL and loss in nats per
    predicted token."""

    kl: Tensor
    loss: Tensor  # of the next token
    flips: Tensor  # share of the positions at which the greedy token is not the base's
    tokens: Tensor  # that are predicted
    domain: Tensor  # number of the evaluation set
    base_loss: Tensor = field(default_factory=lambda: torch.empty(0))
    # [n, M, 5] for each of the evaluator's sets of stop tokens: how often it is the next token; the
    # sums of its probability there by the base and by the variant; and the same two at all other
    # positions
    stop_tokens: Tensor = field(default_factory=lambda: torch.empty(0))
    # [n, N, 4], float32: KL, loss, flip and base's loss of each predicted token, then zeros; only
    # of an evaluator that keeps them
    by_token: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def sequences(self) -> int:
        return len(self.kl)

    @property
    def kl_error(self) -> float:
        """Standard error of the mean KL over sequences; infinite of a single one."""
        count = self.sequences
        return float(self.kl.std()) / math.sqrt(count) if count > 1 else math.inf

    def of(self, domains: Collection[int]) -> "Figures":
        """Return the figures of the sequences of these evaluation sets."""
        rows = torch.isin(self.domain, torch.tensor([*domains]))
        columns = [getattr(self, column.name) for column in fields(self)]
        return Figures(*(column[rows] if len(column) else column for column in columns))

    @property
    def means(self) -> dict[str, float]:
        """Means of `kl`, `loss` and `flips`; each predicted token counts alike."""
        weights = self.tokens.double() / self.tokens.sum()
        columns = {"kl": self.kl, "loss": self.loss, "flips": self.flips}
        return {name: float((column * weights).sum()) for name, column in columns.items()}


def accepts(before: Figures, after: Figures) -> bool:
    """Return True if a whole model's mean gain in KL, over eight or more sequences, is above its
    standard error."""
    return Difference.of(before.kl, after.kl).accepted


def require_enough(
    sequences: int, step: str, hint: str = "give more text, or shorter sequences"
) -> None:
    """Refuse held-out text on which no change could ever be accepted."""
    if sequences < FEWEST:
        raise CompressionError(
            f"{step} takes no change that {FEWEST} held-out sequences do not confirm, and the "
            f"text leaves {sequences}; "
            f"{hint}"
        )


@torch.no_grad()
def compare_sequence(
    ours: Tensor, theirs: Tensor, targets: Tensor, stop_tokens: Sequence[Sequence[int]] = ()
) -> tuple[list[float], Tensor]:
    """Return a sequence's KL, loss, flips and base's loss, means over positions; then five for each
    set of stop tokens. Also return the first four by position, [N, 4].

    Logits of variant and base, [N, V] each, and the next tokens [N]. The last five are those of
    `Figures.stop_tokens`."""
    rows = max(1, COMPARED // ours.shape[-1])
    parts = []
    for logits, base, following in zip(
        ours.split(rows), theirs.split(rows), targets.split(rows), strict=True
    ):
        logs = log_softmax(logits, dim=-1, dtype=torch.float32)
        base_logs = log_softmax(base, dim=-1, dtype=torch.float32)
        at_target = following[:, None]
        columns = [
            (base_logs.exp() * (base_logs - logs)).sum(-1),
            -logs.gather(-1, at_target)[:, 0],
            # the first of equal ones, as argmax, which is slower in bfloat16
            logits.max(-1).indices != base.max(-1).indices,
            -base_logs.gather(-1, at_target)[:, 0],
        ]
        columns = [as_float64(column) for column in columns]
        for tokens in stop_tokens:
            ids = torch.tensor(tokens, device=targets.device)
            due = as_float64(torch.isin(following, ids))
            columns.append(due)
            # the probability of these tokens where one is next, and at all other positions
            for share in (due, 1 - due):
                for known in (base_logs, logs):
                    columns.append(as_float64(known[:, ids].exp()).sum(-1) * share)
        parts.append(torch.stack(columns))
    by_position = torch.cat(parts, 1)
    means = [values.mean() for values in by_position[:4]]
    figures = torch.stack([*means, *(values.sum() for values in by_position[4:])]).tolist()
    return figures, by_position[:4].T


def rows_at_once(tokens: int, vocabulary: int) -> int:
    """Return the rows of so many tokens whose logits are few enough to be computed at once."""
    return max(1, LOGITS // (tokens * vocabulary))


class Evaluator:
    """A base model and held-out text, on which any number of variants are compared with it.

    `stop_tokens` are sets of tokens, such as those that end a text, whose probabilities are
    measured, too. If it `waits` for its variants, what it keeps of the base is on disk. Figures of
    each token are kept if `by_token`. Each of several ranks keeps and runs its share of the
    batches; figures are those of all."""

    def __init__(
        self,
        base: OpenModel,
        sets: Sequence[EvaluationSet],
        stop_tokens: Sequence[Sequence[int]] = (),
        waits: bool = False,
        by_token: bool = False,
    ) -> None:
        model = base.partial.model
        self.by_token = by_token
        self.stop_tokens = tuple(map(tuple, stop_tokens))
        self.base = base
        self.names = tuple(entry.name for entry in sets)
        self.head = require_head(model)
        self.head_name = next(name for name, module in model.named_modules() if module is self.head)
        self.batches: list[Tensor] = []  # so small that their logits are, too
        self.counted: list[Tensor] = []  # by batch: [B, L] positions whose next token counts
        self.domains: list[int] = []  # of each batch
        for domain, entry in enumerate(sets):
            masks = entry.counted or [
                batch.counted if isinstance(batch, Inputs) else torch.ones(batch.shape).bool()
                for batch in entry.batches
            ]
            for batch, mask in zip(entry.batches, masks, strict=True):
                rows = rows_at_once(int(mask.sum(1).max()), base.vocabulary)
                self.batches += batch.split(rows)
                before = mask.roll(-1, 1)
                before[:, -1] = False
                self.counted += before.split(rows)
                self.domains += [domain] * (len(self.batches) - len(self.domains))
        self.inputs: dict[int, Tensor] = {}  # of the base's head, by batch
        self.held = BUDGET if waits else 0  # bytes of these, on disk past the budget of memory

    @classmethod
    def of(cls, base: OpenModel, batches: Sequence[Tensor]) -> "Evaluator":
        return cls(base, [EvaluationSet("held-out", tuple(batches))])

    @property
    def sequences(self) -> int:
        return sum(map(len, self.batches))

    def missing(self, wanted: Collection[int] | None = None) -> list[int]:
        """Return the numbers of this rank's batches of which the base's answers are not kept
        yet."""
        numbers = ranks().share(self.batches) - self.inputs.keys()
        return sorted(numbers if wanted is None else numbers.intersection(wanted))

    def _probe(
        self,
        variants: int = 0,
        only: Sequence[Collection[int]] | None = None,
        first: int = 0,
    ) -> "HeldoutProbe":
        """Return a probe of variants, after those of the base's batches that are missing."""
        wanted = None if only is None else set().union(*only)
        entries: list[_Entry] = [(None, number) for number in self.missing(wanted)]
        for variant in range(variants):
            numbers = range(len(self.batches)) if only is None else only[variant]
            entries += [(variant, number) for number in numbers]
        return HeldoutProbe(self, entries, first)

    def keeping(self, first: int = 0) -> AbstractContextManager["HeldoutProbe"]:
        """Keep the base's answers from a pass over it in which the probe's batches have numbers
        from `first` on."""
        return self._probe(first=first).attached(self.base.partial.model)

    @contextmanager
    def measuring(self, model: nn.Module, variants: int = 1) -> Iterator["HeldoutProbe"]:
        """Measure variants in another pass, or `model` whole in memory; the probe has the figures
        in the end.

        The base's own batches come first, if its answers are not kept yet.
        """
        with self._probe(variants).attached(model) as probe:
            yield probe
        probe.add_up()

    def measure(
        self,
        model: OpenModel,
        variants: Sequence[Substitution] = (AS_IT_IS,),
        *,
        progress: Progress = SILENT,
        phase: str = "evaluate",
        only: Sequence[Collection[int]] | None = None,
    ) -> list[Figures]:
        """Return figures of variants of a model, from one streamed pass of all batches, or for each
        variant `only` of those numbers, at least one.

        Where the base's answers are not kept yet, it runs along in this pass if it is the same
        opened model, and in one of its own otherwise."""
        if model.partial is not self.base.partial and self.missing():
            self._keep(progress)
        with self._probe(len(variants), only).attached(model.partial.model) as probe:
            probe.run(model, progress, phase, variants)
        probe.add_up()
        return probe.figures

    def _keep(self, progress: Progress) -> None:
        with self.keeping() as probe:
            probe.run(self.base, progress, "ask the base")

    @torch.no_grad()
    def measure_loaded(self, model: nn.Module) -> Figures:
        """Return the figures of a variant that is whole in memory."""
        if self.missing():
            self._keep(SILENT)
        parameter = next(model.parameters())
        with self.measuring(model) as probe:
            for number in sorted(ranks().share(self.batches)):
                probe.on_batch_start(number)
                inputs = forward_inputs(self.batches[number], parameter.device, parameter.dtype)
                probe.on_batch_end(number, model(**inputs, use_cache=False))
        return probe.figures[0]


_Entry = tuple[int | None, int]  # variant, the base's being None, and number of a batch


class HeldoutProbe(LogitReader):
    """Held-out batches in a pass, numbered from `first` on, an entry each.

    Of the base's entries what enters the head is kept, and the head computes next to nothing. When
    the pass has ended, `add_up` puts together the figures of each variant from all ranks."""

    def __init__(self, evaluator: Evaluator, entries: Sequence[_Entry], first: int = 0) -> None:
        super().__init__([evaluator.counted[number] for _, number in entries], self._compare, first)
        self.evaluator = evaluator
        self.entries = entries
        self.figures = list[Figures]()
        self._by_sequence = dict[tuple[int, int], list[tuple[list[float], Tensor]]]()

    @property
    def batches(self) -> list[Tensor]:
        return [self.evaluator.batches[number] for _, number in self.entries]

    def numbers_of(self, wanted: int | None) -> list[int]:
        """Return the numbers in the pass of this rank's batches of a variant, or of the base
        (None)."""
        share = ranks().share(self.evaluator.batches)
        entries = enumerate(self.entries, self.first)
        return [
            number for number, (variant, batch) in entries if variant == wanted and batch in share
        ]

    def run(
        self,
        model: OpenModel,
        progress: Progress,
        phase: str,
        variants: Sequence[Substitution] = (),
    ) -> None:
        """Stream the batches, each of several ranks its own, through a model to its output."""
        numbers = ranks().share(self.evaluator.batches)
        share = [position for position, (_, number) in enumerate(self.entries) if number in numbers]
        by_entry = [AS_IT_IS if entry[0] is None else variants[entry[0]] for entry in self.entries]
        evaluation = Pass(model, self.batches, progress, phase, to_end=True, share=share)
        evaluation.run(self, SideBySide(model, by_entry))

    @contextmanager
    def attached(self, model: Any) -> Iterator[Self]:
        """Choose positions before the head of a live model, and compare after it."""
        head = require_head(model)
        evaluator = self.evaluator
        try:
            with super().attached(model), head.register_forward_hook(self.after_head):
                yield self
        finally:
            if head is not evaluator.head:
                evaluator.base.partial.release(evaluator.head_name)

    def before_head(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Choose positions, and keep the hidden states of the base's, of which the head then sees
        none."""
        chosen = super().before_head(head, args)
        if chosen is None or self.running is None:
            return None
        variant, number = self.entries[self.running]
        if variant is not None:
            return chosen
        hidden = chosen[0]
        evaluator = self.evaluator
        budget = max(0, BUDGET - evaluator.held)
        storage = allocate(tuple(hidden.shape), hidden.dtype, CPU, budget)
        evaluator.held += hidden.nbytes
        evaluator.inputs[number] = storage.copy_(hidden.detach())
        return (hidden[:, :0], *args[1:]) if self.is_selected else chosen

    def after_head(self, head: nn.Module, args: tuple[Any, ...], logits: Tensor) -> Tensor | None:
        """Put the base's logits, by its own head, which is loaded beside a variant's, below those
        of the variant."""
        if self.running is None or self.entries[self.running][0] is None:
            return None
        evaluator = self.evaluator
        if head is not evaluator.head:
            partial = evaluator.base.partial
            partial.load(partial.keys_under(evaluator.head_name))
        hidden = evaluator.inputs[self.entries[self.running][1]].to(logits.device)
        # past the head's own hooks
        return torch.cat([logits, evaluator.head.forward(hidden, *args[1:])])

    def _compare(self, position: int, logits: Tensor) -> None:
        """Compare a variant's logits with the base's, which are below them."""
        variant, number = self.entries[position]
        if variant is None:
            return
        evaluator = self.evaluator
        counted = evaluator.counted[number].to(logits.device)
        targets = evaluator.batches[number].to(logits.device)[:, 1:][counted[:, :-1]]
        counts = counted.sum(1).tolist()
        figures = []
        by_sequence = (values.split(counts) for values in (targets, *logits.chunk(2)))
        for following, ours, base in zip(*by_sequence, strict=True):
            means, by_token = compare_sequence(ours, base, following, evaluator.stop_tokens)
            kept = by_token.float().cpu() if evaluator.by_token else torch.empty(0, 4)
            figures.append((means, kept))
        self._by_sequence[variant, number] = figures

    def add_up(self) -> None:
        """Put together what every rank's batches have shown, in the order of the batches."""
        evaluator = self.evaluator
        by_entry: dict[tuple[int, int], list[tuple[list[float], Tensor]]] = {}
        for entries in ranks().all_gather(self._by_sequence):
            by_entry |= entries
        rows = defaultdict(list)  # by variant: a sequence's figures, tokens and evaluation set
        by_token = defaultdict(list)
        for variant, number in sorted(by_entry):
            counts = evaluator.counted[number].sum(1).tolist()
            for (sequence, kept), tokens in zip(by_entry[variant, number], counts, strict=True):
                rows[variant].append([*sequence, tokens, evaluator.domains[number]])
                by_token[variant].append(kept)
        for variant, of_variant in rows.items():
            columns = torch.tensor(of_variant, dtype=torch.float64)
            kl, loss, flips, base_loss = columns[:, :4].T
            stop_tokens = columns[:, 4:-2].reshape(len(columns), -1, 5)
            counts, domains = columns[:, -2:].long().T
            means = kl, loss, flips, counts, domains, base_loss, stop_tokens
            of_tokens = pad_sequence(by_token[variant], batch_first=True)
            self.figures.append(Figures(*means, of_tokens))
