"""What a head is given: for every position the projected pair of last hidden state and next token's embedding.

With h_i the trunk's last hidden state after its final norm and e the embedding, the head's decoder layer gets
x_i = W [norm_e(e(t_{i+1})); norm_h(h_i)], and predicts t_{i+2} (DeepSeek-V3, arXiv:2412.19437, equation 21, whose h_i
servers and Qwen take after the final norm). A further head gets the normed output of the one before it and e(t_{i+2}).
The x_i of all text are the rows of one table, on disk past a budget; the text that runs through the head is the numbers
of these rows, which its embedding looks up there.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from compressor.errors import CompressionError
from compressor.model.architecture import head_of
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerVisitor, Pass, allocate
from compressor.mtp.head import Head

LOGITS = 2**25  # logits computed at once: 128 MiB in float32


class _Rows(nn.Module):
    """An embedding of row numbers: the rows of a table [T, H]."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = {"rows": table}  # in a dict, so that it is no tensor of the model

    def forward(self, numbers: Tensor) -> Tensor:
        return self.table["rows"][numbers]


@dataclass(slots=True)
class HeadText:
    """The text of a head: row numbers [B, L] in the place of token ids, and the table [T, H] of what they stand for."""

    head: Head
    tokens: tuple[Tensor, ...]  # [B, L + 1] of each batch: position i is paired with the token at i + 1
    batches: tuple[Tensor, ...] = ()
    table: Tensor = field(default_factory=lambda: torch.zeros(0, 1))
    _project: Callable[[Tensor, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if (shortest := min(batch.shape[1] for batch in self.tokens)) < 3:
            raise CompressionError(
                f"a multi-token-prediction head cannot be planned on sequences of {shortest} tokens; give a larger "
                "--sequence-length, or --mtp drop"
            )
        shapes = [(len(batch), batch.shape[1] - 1) for batch in self.tokens]
        total = sum(rows * length for rows, length in shapes)
        numbers = torch.arange(total).split([rows * length for rows, length in shapes])
        self.batches = tuple(own.view(shape) for own, shape in zip(numbers, shapes, strict=True))
        partial = self.head.model.partial
        width = int(partial.model.get_input_embeddings().weight.shape[1])
        self.table = allocate((total, width), partial.dtype, partial.device)

    @torch.no_grad()
    def take(self, batch: int, hidden: Tensor) -> None:
        """Pair a batch's last hidden states [B, L + 1, H] with the next tokens."""
        self._project = self._project or _projection(self.head)
        pairs = self._project(self.tokens[batch][:, 1:], hidden[:, :-1])
        self.table[self.batches[batch].to(self.table.device)] = pairs

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Have the head's model look up row numbers in the table while the block runs."""
        model, self._project = self.head.model.partial.model, None
        own = model.get_input_embeddings()
        name = next(name for name, module in model.named_modules() if module is own)
        model.set_submodule(name, _Rows(self.table))
        try:
            yield
        finally:
            model.set_submodule(name, own)


def _projection(head: Head) -> Callable[[Tensor, Tensor], Tensor]:
    """What stands before a head's decoder layer: tokens [B, L] and hidden states [B, L, H] -> [B, L, H].

    Its norms and its matrix [H, 2H] are loaded; the embedding is read row by row.
    """
    partial, parts, checkpoint = head.model.partial, head.names.parts, head.checkpoint

    def loaded(part: str) -> Tensor:
        return checkpoint.read_checked(parts[part]).to(partial.device, partial.dtype)

    def norm(part: str) -> nn.Module:
        made: nn.Module = copy.deepcopy(partial.model.get_submodule(head.norm))
        made.weight = nn.Parameter(loaded(part), requires_grad=False)
        return made

    table, weight = checkpoint.read_checked(head.embedding), loaded("projection")
    embedding_norm, hidden_norm = norm("embedding_norm"), norm("hidden_norm")

    def project(tokens: Tensor, hidden: Tensor) -> Tensor:
        looked_up = embedding(tokens.to(table.device), table).to(hidden.device, hidden.dtype)
        return linear(torch.cat([embedding_norm(looked_up), hidden_norm(hidden)], dim=-1), weight)

    return project


@dataclass(slots=True)
class LastStates(LayerVisitor):
    """At the end of a model: its last hidden states for the next head, and its argmax tokens of judged batches.

    All batches of the pass must be finished. The language-model head runs for the judged ones alone.
    """

    model: OpenModel
    judged: frozenset[int]
    text: HeadText | None = None
    choices: dict[int, Tensor] = field(default_factory=dict)  # [B, L] by batch
    _own: Any = None
    _vocabulary: int = 0

    @contextmanager
    def attached(self) -> Iterator["LastStates"]:
        """Watch the language-model head while the block runs."""
        head = head_of(self.model.partial.model)
        assert head is not None  # or there were no head to share it with
        self._own, self._vocabulary = head.forward, int(head.weight.shape[0])  # type: ignore[index]
        head.forward = self._instead
        try:
            yield self
        finally:
            head.__dict__.pop("forward", None)

    @torch.no_grad()
    def _instead(self, hidden: Tensor) -> Tensor:
        """The language-model head's forward: what is wanted is kept, and no logits are handed on."""
        if self.text is not None:
            self.text.take(self.at.batch, hidden)
        if self.at.batch in self.judged:
            rows = hidden.flatten(0, 1)
            at_once = max(1, LOGITS // self._vocabulary)
            chosen = torch.cat([self._own(chunk).argmax(-1) for chunk in rows.split(at_once)])
            self.choices[self.at.batch] = chosen.view(hidden.shape[:2]).cpu()
        return hidden[..., :0]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """At how many of so many positions a head's argmax token is the trunk's."""

    agreed: int
    positions: int

    @classmethod
    def of(cls, trunk: Mapping[int, Tensor], head: Mapping[int, Tensor], ahead: int) -> "Acceptance":
        """Of the choices [B, L] of the trunk and [B, L - ahead] of a head, which looks `ahead` tokens past it."""
        agreed = sum(int((trunk[batch][:, ahead:] == chosen).sum()) for batch, chosen in head.items())
        return cls(agreed, sum(chosen.numel() for chosen in head.values()))

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.agreed / self.positions if self.positions else 0.0


class Relay:
    """The way of all batches through a model and then its heads, each of which gets the outputs of the one before it.

    The batches pass `model` while `ends[0]` is attached, and then the texts' heads in turn: `texts[n]` put in, and
    `ends[n + 1]` attached. `judged` batches are those of which acceptance is measured.
    """

    def __init__(
        self, model: OpenModel, heads: Sequence[Head], batches: Sequence[Tensor], judged: frozenset[int]
    ) -> None:
        self.texts = [HeadText(head, tuple(b[:, ahead:] for b in batches)) for ahead, head in enumerate(heads)]
        models = [model, *(head.model for head in heads)]
        following = [*self.texts, None]
        self.ends = [LastStates(own, judged, text) for own, text in zip(models, following, strict=True)]

    def acceptance(self, number: int) -> Acceptance:
        """Of the head of this number, once it has run."""
        return Acceptance.of(self.ends[0].choices, self.ends[number + 1].choices, number + 1)


def acceptances(model: OpenModel, heads: Sequence[Head], batches: Sequence[Tensor]) -> list[Acceptance]:
    """Each head's acceptance on token ids [B, L], from a pass over the model and its heads that looks at no more."""
    relay = Relay(model, heads, batches, frozenset(range(len(batches))))
    models = [(model, tuple(batches)), *((text.head.model, text.batches) for text in relay.texts)]
    for number, ((own, tokens), end) in enumerate(zip(models, relay.ends, strict=True)):
        with relay.texts[number - 1].put_in() if number else nullcontext(), end.attached():
            Pass(own, tokens, to_end=True).run(end)
    return [relay.acceptance(number) for number in range(len(heads))]
