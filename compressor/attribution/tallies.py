"""What senders' sub-scores add up to: each batch's sums, added up in the order of the batches, whoever ran them.

R routers, E experts.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import safetensors.torch
import torch
from torch import Tensor

from compressor.distributed.present import here

_SAID = "said"  # of the senders, as JSON


@dataclass(slots=True)
class Tally:
    """One sender's sums so far."""

    kind: str
    unit: str
    module: str
    number: int | None
    sums: Tensor  # [5, R]: variance, positive and negative scores, covariance, change of rank
    reaches: Tensor  # [R]: whether the sender comes before the router
    tokens: int = 0
    norm: float = 0.0
    max_norm: float = 0.0
    max_entry: float = 0.0
    by_expert: Tensor | None = None  # [R, E] variance by expert, while its layer passes and where that is asked for

    def absorb(self, other: "Tally") -> None:
        """Add the sums of tokens that come after those seen so far."""
        self.sums += other.sums
        self.reaches |= other.reaches
        self.tokens += other.tokens
        self.norm += other.norm
        self.max_norm = max(self.max_norm, other.max_norm)
        self.max_entry = max(self.max_entry, other.max_entry)
        if other.by_expert is not None:
            self.by_expert = other.by_expert if self.by_expert is None else self.by_expert.add_(other.by_expert)


@dataclass(slots=True)
class Tallies:
    """The sums of all senders by name, `totals`, and those of the batches that are not yet added to them.

    Every rank has the totals of the layers that all batches have passed. Of the layer that they are passing a rank
    holds the sums of `at_once` batches of its own at most, and the first rank those of so many of each.
    """

    receivers: int  # R
    batches: int  # of all ranks
    at_once: int
    totals: dict[str, Tally] = field(default_factory=dict)
    _seen: dict[int, dict[str, Tally]] = field(default_factory=dict)  # by batch
    _turns: int = 0  # that this layer's batches were handed over

    def begun(self, name: str, kind: str, unit: str, module: str, number: int | None, batch: int | None) -> Tally:
        """The sums of the sender of this name on a batch, or all of them (None); begun where there are none."""
        found = self.totals if batch is None else self._seen.setdefault(batch, {})
        if name not in found:
            sums = torch.zeros(5, self.receivers, dtype=torch.float64)
            found[name] = Tally(kind, unit, module, number, sums, torch.zeros(self.receivers, dtype=torch.bool))
        return found[name]

    def seen(self, batch: int) -> None:
        """A batch has passed the layer: hand its sums over if it is time; all ranks do that equally often."""
        self._seen.setdefault(batch, {})
        if len(self._seen) == self.at_once:
            self._hand_over()

    def passed(self) -> None:
        """All batches have passed the layer: the first rank has its totals now."""
        rounds = -(-self.batches // here().size)  # each rank has a batch in each, but maybe in the last
        while self._turns < -(-rounds // self.at_once):
            self._hand_over()
        self._turns = 0

    def show(self, unit: str) -> None:
        """Have all ranks see the layer's totals that the first one has."""
        if here().is_alone:
            return
        own = {name: tally for name, tally in self.totals.items() if tally.unit == unit}
        shown = here().shown(lambda: _tensors({0: own}))
        if not here().is_first:
            self.totals.update(_tallies(shown).get(0, {}))

    def _hand_over(self) -> None:
        """Add what batches have shown, in their order, to the first rank's totals."""
        self._turns += 1
        found, self._seen = self._seen, {}
        if not here().is_alone:
            contents = here().gathered(safetensors.torch.save(_tensors(found)))
            found = found if here().is_first else {}
            for content in contents[1:]:
                found.update(_tallies(safetensors.torch.load(content)))
        for _, tallies in sorted(found.items()):
            for name, tally in tallies.items():
                if name in self.totals:
                    self.totals[name].absorb(tally)
                else:
                    self.totals[name] = tally


def _tensors(found: Mapping[int, Mapping[str, Tally]]) -> dict[str, Tensor]:
    """Tallies by batch and name, as what ranks can hand each other."""
    said, tensors = list[tuple[int, str, str, str, str, int | None]](), dict[str, Tensor]()
    for batch, tallies in found.items():
        for name, tally in tallies.items():
            sizes = torch.tensor([tally.tokens, tally.norm, tally.max_norm, tally.max_entry], dtype=torch.float64)
            own = {"sums": tally.sums, "reaches": tally.reaches, "sizes": sizes, "by_expert": tally.by_expert}
            tensors |= {f"{len(said)} {key}": value for key, value in own.items() if value is not None}
            said.append((batch, name, tally.kind, tally.unit, tally.module, tally.number))
    return tensors | {_SAID: torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)}


def _tallies(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tally]]:
    """The tallies that `_tensors` has made tensors of."""
    found: dict[int, dict[str, Tally]] = {}
    for place, (batch, name, kind, unit, module, number) in enumerate(json.loads(tensors[_SAID].numpy().tobytes())):
        made = Tally(kind, unit, module, number, tensors[f"{place} sums"], tensors[f"{place} reaches"])
        tokens, made.norm, made.max_norm, made.max_entry = tensors[f"{place} sizes"].tolist()
        made.tokens, made.by_expert = int(tokens), tensors.get(f"{place} by_expert")
        found.setdefault(batch, {})[name] = made
    return found
