"""The second pass of routing attribution: each component's sub-scores for all later routers, as the component appears.

T tokens of a batch, n of them, H hidden, E experts, R routers, r of them at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

import torch
from torch import Tensor

from compressor.attribution.figures import UNRANKED, ScoreEdge, adds_up
from compressor.attribution.influence import covariance, rank_change, signs, spread, spread_by_expert
from compressor.attribution.linear_maps import Chain, kept, pull_sum, same_chains
from compressor.attribution.stream_maps import (
    LeafMap,
    ObservedRouters,
    agree_on_chains,
    leaf_map,
    refuse,
    router_rows,
)
from compressor.attribution.tracing import Term
from compressor.attribution.unit_trace import STREAM, Component, Heads, UnitTrace
from compressor.distributed.ranks import here
from compressor.model.opened import OpenModel


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


@dataclass(slots=True)
class Tallies:
    """The sums of all senders by name; every rank has those of all batches for the layers that have passed."""

    receivers: int  # R
    totals: dict[str, Tally] = field(default_factory=dict)

    def of(self, name: str, kind: str, unit: str, module: str, number: int | None = None) -> Tally:
        """The sums of the sender of this name; begun where there are none."""
        if name not in self.totals:
            sums = torch.zeros(5, self.receivers, dtype=torch.float64)
            reaches = torch.zeros(self.receivers, dtype=torch.bool)
            self.totals[name] = Tally(kind, unit, module, number, sums, reaches)
        return self.totals[name]

    def passed(self, unit: str) -> None:
        """Add up what all ranks have measured of a layer."""
        if here().is_alone:
            return
        own = {name: tally for name, tally in self.totals.items() if tally.unit == unit}
        said = [
            (name, tally.kind, tally.module, tally.number, tally.max_norm, tally.max_entry)
            + (() if tally.by_expert is None else tuple(tally.by_expert.shape))
            for name, tally in own.items()
        ]
        tallies: dict[str, Tally] = {}
        for name, kind, module, number, max_norm, max_entry, *shape in (
            row for rank in here().all_gather(said) for row in rank
        ):
            tally = tallies[name] = self.of(name, kind, unit, module, number)
            tally.max_norm, tally.max_entry = max(tally.max_norm, max_norm), max(tally.max_entry, max_entry)
            if shape and tally.by_expert is None:
                tally.by_expert = torch.zeros(shape, dtype=torch.float64)
        parts = [
            part.double().flatten()
            for tally in tallies.values()
            for part in (
                tally.sums,
                tally.reaches,
                torch.tensor([tally.tokens, tally.norm], dtype=torch.float64),
                torch.zeros(0) if tally.by_expert is None else tally.by_expert,
            )
        ]
        added = iter(here().all_reduce(torch.cat(parts)).split([len(part) for part in parts]) if parts else ())
        for tally, sums, reaches, sizes, by_expert in zip(tallies.values(), *[added] * 4, strict=True):
            tally.sums, tally.reaches = sums.view_as(tally.sums), reaches > 0
            tally.tokens, tally.norm = round(float(sizes[0])), float(sizes[1])
            tally.by_expert = None if tally.by_expert is None else by_expert.view_as(tally.by_expert)


OUTPUT = "output"  # of the layer, where later routers' rows are kept
SCORES_AT_ONCE = 2**22  # sub-scores held at once: 16 MiB in float32


@dataclass(frozen=True, slots=True)
class View:
    """How a component of width H' looks to neighbouring routers: their numbers, rows [r * E, H'], factors [T, r]."""

    span: slice
    rows: Tensor
    scales: Tensor

    def scores(self, values: Tensor, tokens: Tensor | None, experts: int) -> Tensor:
        """Sub-scores [n, r, E] of values [n, H'] at these tokens (None: all)."""
        scales = self.scales if tokens is None else self.scales[tokens]
        return (values.float() @ self.rows.T).view(len(values), -1, experts) * scales[..., None]


@dataclass(slots=True)
class Projection:
    """Projects what a layer's trace shows onto the routers, and adds up what that does to them."""

    model: OpenModel
    routers: ObservedRouters
    parts: Mapping[str, tuple[Component, ...]]  # by decoder layer
    edges_kept: int = 0  # of those to single experts' scores, which are measured if it is not 0
    tallies: Tallies = field(init=False)
    remainder: Tensor | None = field(init=False)  # [T, R, E] of the first batch: logits less the sub-scores so far
    _strongest: list[ScoreEdge] = field(default_factory=list)  # of the layers so far, summed
    _unit: str = ""
    _chains: dict[tuple[str, int, int], tuple[Chain, ...]] = field(default_factory=dict)  # of this layer's components
    _rows: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)  # as they look from them

    def __post_init__(self) -> None:
        self.tallies = Tallies(len(self.routers.layers))
        first = self.routers.logits.get(0)
        self.remainder = None if first is None else first.clone()
        for unit, parts in self.parts.items():
            for part in parts:
                for expert in range(self.experts if part.kind == "expert" else 0):
                    self._expert(unit, part.name, expert).reaches[self.routers.later(unit)] = True

    @property
    def experts(self) -> int:
        """E."""
        return self.model.architecture.experts

    def _expert(self, unit: str, module: str, expert: int) -> Tally:
        return self.tallies.of(f"{module} expert {expert}", "expert", unit, module, expert)

    def visit(self, unit: str, batch: int, trace: UnitTrace) -> None:
        """Measure everything that a layer wrote on one batch."""
        self._unit = unit
        self._measure(unit, batch, trace)

    def passed(self, unit: str) -> None:
        """Every batch has passed the layer: add up what all ranks have measured."""
        self.tallies.passed(unit)
        self._keep_strongest()
        seen = {name if start >= 0 else f"{name} {end}": found for (name, start, end), found in self._chains.items()}
        agree_on_chains(self.model, unit, seen)
        self._chains.clear()
        self._rows.clear()

    def _measure(self, unit: str, batch: int, trace: UnitTrace) -> None:
        for expert_module, found in trace.routed.items():
            for routed in found:
                self._note_size(self._expert(unit, expert_module, routed.expert), routed.outputs)
        for span in self._spans(self.routers.later(unit), trace.context.tokens):
            self._measure_later(unit, batch, trace, span)
        for number, layer in enumerate(self.routers.layers):
            if layer.unit == unit and layer.name in trace.logits:
                self._measure_own(unit, batch, trace, number)

    def score_edges(self, tokens: int) -> tuple[ScoreEdge, ...]:
        """The strongest edges to single experts' scores, averaged over so many tokens."""
        mean = [replace(edge, influence=edge.influence / tokens) for edge in self._strongest]
        return tuple(ScoreEdge(*edge) for edge in here().broadcast(lambda: [astuple(edge) for edge in mean]))

    def _keep_strongest(self) -> None:
        """Of the edges so far and those of the layer that is done, keep as many as shall stay, the strongest first."""
        split = {tally.module for tally in self.tallies.totals.values() if tally.kind == "head"}
        for name, tally in self.tallies.totals.items():
            if tally.by_expert is not None and adds_up(tally.kind, tally.module, split):
                values, places = tally.by_expert.flatten().sort(descending=True, stable=True)
                kept = values > 0
                kept[self.edges_kept :] = False
                for value, place in zip(values[kept].tolist(), places[kept].tolist(), strict=True):
                    receiver, expert = divmod(place, self.experts)
                    self._strongest.append(ScoreEdge(name, receiver, expert, value))
            tally.by_expert = None
        self._strongest = sorted(self._strongest, key=lambda edge: -edge.influence)[: self.edges_kept]

    def _note_size(self, tally: Tally, outputs: Tensor) -> None:
        norms = outputs.float().norm(dim=-1)
        tally.tokens += len(norms)
        tally.norm += float(norms.sum(dtype=torch.float64))
        tally.max_norm = max(tally.max_norm, float(norms.max()))
        tally.max_entry = max(tally.max_entry, float(outputs.abs().max()))

    def _spans(self, numbers: list[int], tokens: int) -> Iterator[slice]:
        size = max(1, SCORES_AT_ONCE // (tokens * self.experts))
        for start in range(0, len(numbers), size):
            chosen = numbers[start : start + size]
            yield slice(chosen[0], chosen[-1] + 1)

    def _senders(self, unit: str, trace: UnitTrace) -> Iterator[tuple[str, Component]]:
        """Leaf names of this layer that are components, with what they are."""
        known = {part.name: part for part in self.parts[unit]}
        for name in trace.context.leaves:
            if name == STREAM:
                if unit == self.model.architecture.units[0]:
                    yield name, Component("token", "token")
            else:
                yield name, known.get(name, Component(f"{unit} {name}", "other"))

    def _measure_later(self, unit: str, batch: int, trace: UnitTrace, span: slice) -> None:
        """Sub-scores for routers of later layers, through what lies between."""
        routers, numbers = self.routers, range(span.start, span.stop)
        place = span.start, span.stop  # batches of other sizes have other spans
        if (OUTPUT, *place) not in self._rows:
            self._rows[OUTPUT, *place] = torch.cat([routers.rows_after(unit, number) for number in numbers])
        passing = torch.stack([routers.scale_after(unit, number, batch) for number in numbers], -1)
        end = View(span, self._rows[OUTPUT, *place], passing)
        together: Tensor | None = None
        for part, rows, scores in self._measured(unit, batch, trace, trace.terms, end, place):
            if part.kind in ("expert", "shared"):
                if together is None:
                    together = torch.zeros(trace.context.tokens, *scores.shape[1:], device=scores.device)
                _add_rows(together, rows, scores)
        if together is not None:
            self._add(self.tallies.of(f"{unit} MoE", "moe", unit, unit), together, None, batch, span)

    def _measure_own(self, unit: str, batch: int, trace: UnitTrace, number: int) -> None:
        """Sub-scores for a router of the same layer, of the components that come before it."""
        layer = self.routers.layers[number]
        rows = router_rows(layer, [()], self.routers.logits[batch].device)
        end = View(slice(number, number + 1), rows, torch.ones(trace.context.tokens, 1, device=rows.device))
        for _ in self._measured(unit, batch, trace, trace.logits[layer.name].terms, end, (-1, number)):
            pass

    def _seen(self, name: str, place: tuple[int, int], found: LeafMap, base: Tensor) -> Tensor:
        """The routers' rows `base` pulled back to the component; the same for all batches of the layer."""
        key = name, *place
        if key not in self._chains:
            self._chains[key] = tuple(map(kept, found.chains))
            self._rows[key] = base if found.is_identity else pull_sum(base, found.chains)
        elif not same_chains(self._chains[key], found.chains):
            raise refuse(self.model, self._unit, f"what it does to {name} differs between batches")
        return self._rows[key]

    def _measured(
        self, unit: str, batch: int, trace: UnitTrace, terms: Sequence[Term], end: View, place: tuple[int, int]
    ) -> Iterator[tuple[Component, Tensor | None, Tensor]]:
        """Add up the sub-scores of all components of a sum that looks like `end` to the routers.

        Yields the component, its tokens (None for all) and the scores, an expert's or all at once.
        """
        for name, part in self._senders(unit, trace):
            found = leaf_map(terms, name)
            if found is None:
                continue
            scales = end.scales if found.token is None else end.scales * found.token[:, None]
            view = View(end.span, self._seen(name, place, found, end.rows), scales)
            for tally, values, tokens in self._values(unit, trace, name, part):
                scores = view.scores(values, tokens, self.experts)
                self._add(tally, scores, tokens, batch, view.span)
                if batch == 0 and self.remainder is not None:
                    _add_rows(self.remainder[:, view.span], tokens, -scores)
                yield part, tokens, scores
            if name in trace.heads:
                self._measure_heads(unit, part, trace.heads[name], view, batch)

    def _values(
        self, unit: str, trace: UnitTrace, name: str, part: Component
    ) -> Iterator[tuple[Tally, Tensor, Tensor | None]]:
        """What a component wrote, an expert's [n, H'] with its tokens [n], or [T, H'] of all of them (None)."""
        if part.kind == "expert":
            for routed in trace.routed[name]:
                values = routed.outputs.float() * routed.weights.float()[:, None]
                yield self._expert(unit, name, routed.expert), values, routed.rows
        else:
            values = trace.context.leaves[name].value.expand(trace.context.tokens, -1)
            yield self.tallies.of(part.name, part.kind, unit, part.name), values, None

    def _measure_heads(self, unit: str, part: Component, heads: Heads, view: View, batch: int) -> None:
        """All but the ranks, for each head through its slice of the output projection, and for that one's bias."""
        size, key = heads.inputs.shape[-1] // heads.heads, (f"{part.name} heads", view.span.start, view.span.stop)
        if key not in self._rows:
            self._rows[key] = view.rows @ heads.weight.float()
        for head in range(heads.heads):
            own = slice(head * size, (head + 1) * size)
            seen = View(view.span, self._rows[key][:, own], view.scales)
            tally = self.tallies.of(f"{part.name} head {head}", "head", unit, part.name, head)
            self._add(tally, seen.scores(heads.inputs[:, own], None, self.experts), None, batch, view.span)
        if heads.bias is not None:
            tally = self.tallies.of(f"{part.name} bias", "bias", unit, part.name)
            added = heads.bias.expand(len(heads.inputs), -1)
            self._add(tally, view.scores(added, None, self.experts), None, batch, view.span)

    def _add(self, tally: Tally, scores: Tensor, tokens: Tensor | None, batch: int, span: slice) -> None:
        """Add the effect of sub-scores [n, r, E]; ranks are left out for heads and their bias."""
        rows, routers = slice(None) if tokens is None else tokens, self.routers
        logits = routers.logits[batch][rows, span]
        found = [spread(scores), *signs(scores), covariance(scores, logits)]
        if tally.kind not in UNRANKED:
            share = routers.valid[span] / routers.valid[span].sum(-1, keepdim=True)
            found.append(
                rank_change(
                    logits,
                    scores,
                    routers.chosen[batch][rows, span],
                    routers.before[batch][rows, span],
                    share,
                    routers.selection,
                    span,
                )
            )
        tally.sums[: len(found), span] += torch.stack(found).cpu()
        tally.reaches[span] = True
        if self.edges_kept:
            if tally.by_expert is None:
                tally.by_expert = torch.zeros(len(routers.layers), self.experts, dtype=torch.float64)
            tally.by_expert[span] += spread_by_expert(scores).cpu()


def _add_rows(total: Tensor, tokens: Tensor | None, scores: Tensor) -> None:
    """Add scores [n, r, E] to those of these tokens, in place; of all tokens for None."""
    total.index_add_(0, tokens, scores) if tokens is not None else total.add_(scores)
