"""The second pass of routing attribution: each component's sub-scores for all later routers, as the component appears.

T tokens of a batch, n of them, H hidden, E experts, R routers, r of them at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from compressor.attribution.figures import UNRANKED, ScoreEdge, adds_up
from compressor.attribution.influence import covariance, rank_change, signs, spread, spread_by_expert
from compressor.attribution.routers import ObservedRouters, leaf_map, refuse, router_rows
from compressor.attribution.tracing import Chain, Term, pull_sum, same_chains
from compressor.attribution.unit_trace import STREAM, TracedPass, UnitTrace, parts_of
from compressor.distributed import here
from compressor.model.architecture import layers_by_unit

OUTPUT = "output"  # of the layer, where later routers' rows are kept
SCORES_AT_ONCE = 2**22  # sub-scores held at once: 16 MiB in float32


@dataclass(slots=True)
class Tally:
    """One sender's sums so far."""

    kind: str
    unit: str
    module: str
    number: int | None
    sums: Tensor  # [5, R]: variance, positive and negative scores, covariance, change of rank
    reaches: Tensor  # [R]: whether the sender comes before the router
    tokens: int = 0  # of an expert; so are the norms and the entry
    norm: float = 0.0  # L2, summed over its tokens
    max_norm: float = 0.0
    max_entry: float = 0.0
    by_expert: Tensor | None = None  # [R, E] variance by expert, while its layer passes and if edges are kept

    def add_sizes(self, tokens: int, norm: float, max_norm: float, max_entry: float) -> None:
        """Add so many outputs of an expert: the sum of their norms, the largest one and the largest entry."""
        self.tokens, self.norm = self.tokens + tokens, self.norm + norm
        self.max_norm, self.max_entry = max(self.max_norm, max_norm), max(self.max_entry, max_entry)

    def add_by_expert(self, variance: Tensor, span: slice = slice(None)) -> None:
        """Add the variance by expert [r, E] for these routers."""
        if self.by_expert is None:
            self.by_expert = torch.zeros(len(self.reaches), variance.shape[1], dtype=torch.float64)
        self.by_expert[span] += variance


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
        """Add up the layer's sums of all ranks."""
        if here().is_alone:
            return
        own = {name: tally for name, tally in self.totals.items() if tally.unit == unit}
        for name in own:  # begun anew
            del self.totals[name]
        for name, part in (entry for each in here().all_gather(own) for entry in each.items()):
            tally = self.of(name, part.kind, unit, part.module, part.number)
            tally.sums += part.sums
            tally.reaches |= part.reaches
            tally.add_sizes(part.tokens, part.norm, part.max_norm, part.max_entry)
            if part.by_expert is not None:
                tally.add_by_expert(part.by_expert)


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


_Key = tuple[str, int, int]  # what is looked at, and by which routers


@dataclass(slots=True)
class Projection(TracedPass):
    """Projects every component onto the routers that it reaches, and adds up what that does to them."""

    routers: ObservedRouters
    edges_kept: int = 0  # edges to single experts' scores, which are measured if it is not 0
    tallies: Tallies = field(init=False)
    remainder: Tensor | None = field(init=False)  # [T, R, E] of the first batch: logits less the sub-scores so far
    _parts: Mapping[str, Mapping[str, str]] = field(init=False)  # kinds of components by decoder layer and name
    _strongest: list[ScoreEdge] = field(default_factory=list)  # of the layers so far, summed
    _chains: dict[_Key, tuple[Chain, ...]] = field(default_factory=dict)  # of this layer's components
    _rows: dict[_Key, Tensor] = field(default_factory=dict)  # of this layer's components and output

    def __post_init__(self) -> None:
        routers, architecture = self.routers, self.routers.model.architecture
        self.tallies = Tallies(len(routers.layers))
        self.remainder = routers.logits[0].clone() if 0 in routers.logits else None
        layers, meta = layers_by_unit(architecture.layers), routers.model.partial.model
        self._parts = {
            unit: parts_of(unit, meta.get_submodule(unit), layers.get(unit, ())) for unit in architecture.units
        }
        for unit, parts in self._parts.items():
            for part, kind in parts.items():
                for expert in range(self.experts if kind == "expert" else 0):
                    self._expert(unit, part, expert).reaches[routers.later(unit)] = True

    @property
    def experts(self) -> int:
        """E."""
        return self.routers.model.architecture.experts

    def _expert(self, unit: str, module: str, expert: int) -> Tally:
        return self.tallies.of(f"{module} expert {expert}", "expert", unit, module, expert)

    def visit(self, unit: str, batch: int, trace: UnitTrace) -> None:
        """Measure everything that a layer wrote on one batch."""
        for module, ran in trace.routed.items():
            for expert in ran:
                norms, entry = expert.outputs.float().norm(dim=-1), float(expert.outputs.abs().max())
                sizes = len(norms), float(norms.sum(dtype=torch.float64)), float(norms.max()), entry
                self._expert(unit, module, expert.expert).add_sizes(*sizes)
        routers, later = self.routers, self.routers.later(unit)
        at_once = max(1, SCORES_AT_ONCE // (trace.context.tokens * self.experts))
        for numbers in (later[start : start + at_once] for start in range(0, len(later), at_once)):
            span = slice(numbers[0], numbers[-1] + 1)
            key = OUTPUT, span.start, span.stop  # batches of other sizes have other spans
            if key not in self._rows:
                self._rows[key] = torch.cat([routers.rows_after(unit, number) for number in numbers])
            scales = torch.stack([routers.scale_after(unit, number, batch) for number in numbers], -1)
            together = self._measure(unit, batch, trace, trace.terms, View(span, self._rows[key], scales), key[1:])
            if together is not None:
                self._add(self.tallies.of(f"{unit} MoE", "moe", unit, unit), together, None, batch, span)
        for number, layer in enumerate(routers.layers):
            if (logits := trace.logits.get(layer.name)) is not None:  # it sees what comes before it in its own layer
                rows = router_rows(layer, [()], routers.valid.device)
                view = View(slice(number, number + 1), rows, torch.ones(trace.context.tokens, 1, device=rows.device))
                self._measure(unit, batch, trace, logits.terms, view, (-1, number))

    def finish(self, unit: str) -> None:
        """Add up the layer's sums of all ranks, and keep the strongest edges."""
        self.tallies.passed(unit)
        self._chains.clear()
        self._rows.clear()
        split = {tally.module for tally in self.tallies.totals.values() if tally.kind == "head"}
        for name, tally in self.tallies.totals.items():
            if tally.by_expert is not None and adds_up(tally.kind, tally.module, split):
                values, places = tally.by_expert.flatten().sort(descending=True, stable=True)
                for value, place in zip(values.tolist()[: self.edges_kept], places.tolist(), strict=False):
                    if value > 0:
                        self._strongest.append(ScoreEdge(name, place // self.experts, place % self.experts, value))
            tally.by_expert = None
        self._strongest = sorted(self._strongest, key=lambda edge: -edge.influence)[: self.edges_kept]

    def score_edges(self, tokens: int) -> tuple[ScoreEdge, ...]:
        """The strongest edges to single experts' scores, averaged over so many tokens."""
        mean = tuple(replace(edge, influence=edge.influence / tokens) for edge in self._strongest)
        edges: tuple[ScoreEdge, ...] = here().broadcast(lambda: mean)
        return edges

    def _measure(
        self, unit: str, batch: int, trace: UnitTrace, terms: Sequence[Term], end: View, place: tuple[int, int]
    ) -> Tensor | None:
        """Add up the sub-scores of all components of a sum that looks like `end` to the routers.

        Returns the sum [T, r, E] of those of routed and shared experts; None without any.
        """
        together: Tensor | None = None
        for name in trace.context.leaves:
            if name == STREAM and unit != self.routers.model.architecture.units[0]:
                continue
            if (leaf := leaf_map(terms, name)) is None:
                continue
            key, chains = (name, *place), leaf.chains
            if not same_chains(self._chains.setdefault(key, chains), chains):
                raise refuse(self.routers.model, unit, f"what it does to {name} differs between batches")
            if key not in self._rows:
                self._rows[key] = end.rows if chains == ((),) else pull_sum(end.rows, chains)
            scales = end.scales if leaf.token is None else end.scales * leaf.token[:, None]
            view = View(end.span, self._rows[key], scales)
            for tally, seen, values, tokens in self._written(unit, trace, name, view):
                scores = seen.scores(values, tokens, self.experts)
                self._add(tally, scores, tokens, batch, view.span)
                if batch == 0 and self.remainder is not None and tally.kind not in UNRANKED:
                    _add_rows(self.remainder[:, view.span], tokens, -scores)
                if tally.kind in ("expert", "shared"):
                    if together is None:
                        together = torch.zeros(trace.context.tokens, *scores.shape[1:], device=scores.device)
                    _add_rows(together, tokens, scores)
        return together

    def _written(
        self, unit: str, trace: UnitTrace, name: str, view: View
    ) -> Iterator[tuple[Tally, View, Tensor, Tensor | None]]:
        """What a component wrote and how the routers see it: an expert [n, H] with its tokens [n], others [T, H'].

        After an attention come its heads, each through its slice of the output projection, and that one's bias.
        """
        kind = "token" if name == STREAM else self._parts[unit].get(name, "other")
        if kind == "expert":
            for ran in trace.routed[name]:
                values = ran.outputs.float() * ran.weights.float()[:, None]
                yield self._expert(unit, name, ran.expert), view, values, ran.rows
            return
        values = trace.context.leaves[name].value.expand(trace.context.tokens, -1)
        sender = {"token": "token", "other": f"{unit} {name}"}.get(kind, name)
        yield self.tallies.of(sender, kind, unit, sender), view, values, None
        if (heads := trace.heads.get(name)) is None:
            return
        key = f"{name} heads", view.span.start, view.span.stop
        if key not in self._rows:
            self._rows[key] = view.rows @ heads.weight.float()
        for head in range(heads.heads):
            span = heads.span(head)
            tally = self.tallies.of(f"{name} head {head}", "head", unit, name, head)
            yield tally, View(view.span, self._rows[key][:, span], view.scales), heads.inputs[:, span], None
        if heads.bias is not None:
            tally = self.tallies.of(f"{name} bias", "bias", unit, name)
            yield tally, view, heads.bias.expand(len(heads.inputs), -1), None

    def _add(self, tally: Tally, scores: Tensor, tokens: Tensor | None, batch: int, span: slice) -> None:
        """Add the effect of sub-scores [n, r, E]; ranks are left out for heads and their bias."""
        rows, routers = slice(None) if tokens is None else tokens, self.routers
        logits = routers.logits[batch][rows, span]
        sums = [spread(scores), *signs(scores), covariance(scores, logits)]
        if tally.kind not in UNRANKED:
            share = routers.valid[span] / routers.valid[span].sum(-1, keepdim=True)
            chosen, before = (of[batch][rows, span] for of in (routers.chosen, routers.chosen_ranks))
            sums.append(rank_change(logits, scores, chosen, before, share, routers.selection, span))
        tally.sums[: len(sums), span] += torch.stack(sums).cpu()
        tally.reaches[span] = True
        if self.edges_kept:
            tally.add_by_expert(spread_by_expert(scores).cpu(), span)


def _add_rows(total: Tensor, tokens: Tensor | None, scores: Tensor) -> None:
    """Add scores [n, r, E] to those of these tokens, in place; of all tokens for None."""
    total.index_add_(0, tokens, scores) if tokens is not None else total.add_(scores)
