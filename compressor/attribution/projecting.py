"""The second pass of routing attribution: each component's sub-scores for all later routers, as the component appears.

What they do to a router is their variance over the experts, which measures influence (Proposition 1 of "Understanding
Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs", ICLR 2026), their signs (APS and ANS), and the ranks
that change without them (AARV); beside them the covariance with the logits, which adds up.
T tokens of a batch, n of them, H hidden, E experts, R routers, r of them at once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from compressor.attribution.figures import UNRANKED, Output, ScoreEdge, Sender, adds_up
from compressor.attribution.routers import ObservedRouters, Selection, View, ranks_of
from compressor.attribution.tracing import STREAM, TracedPass, UnitTrace, parts_of
from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.model.moe_layer import layer_number, layers_by_unit

FIGURES = ("influence", "positive", "negative", "covariance", "rank_change")  # of a sender, in the order of its sums


def spread(scores: Tensor) -> Tensor:
    """Variance over the experts, summed over the tokens: [n, R, E] -> [R], float64."""
    centred = scores - scores.mean(-1, keepdim=True)
    norms: Tensor = torch.linalg.vector_norm(centred, dim=(0, 2))
    return as_float64(norms).square() / scores.shape[-1]


def spread_by_expert(scores: Tensor) -> Tensor:
    """The same by expert, [n, R, E] -> [R, E]: mean of squared centred scores, whose sum over the experts it is."""
    return as_float64((scores - scores.mean(-1, keepdim=True)).square()).sum(0) / scores.shape[-1]


def covariance(scores: Tensor, logits: Tensor) -> Tensor:
    """Covariance of sub-scores and logits over the experts, summed over tokens: [n, R, E] twice -> [R], float64.

    Logits are sums of sub-scores, so the covariances of all components add up to the logits' variance.
    """
    centred = logits - logits.mean(-1, keepdim=True)
    return as_float64((scores * centred).sum(-1)).sum(0) / scores.shape[-1]


def signs(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the experts of the positive and of the negative sub-scores, summed over tokens: [n, R, E] -> 2 [R]."""
    positive = as_float64(scores.clamp(min=0).mean(-1)).sum(0)
    return positive, as_float64(scores.mean(-1)).sum(0) - positive


def rank_change(
    logits: Tensor, removed: Tensor, chosen: Tensor, before: Tensor, share: Tensor, selection: Selection, routers: slice
) -> Tensor:
    """Mean absolute change of the chosen experts' ranks without the sub-scores, summed over tokens: -> [R].

    `logits` and `removed` are [n, R, E], `chosen` and their ranks `before` [n, R, K]; `share` [R, K] is 1 / K of each
    router, 0 in slots that it does not use.
    """
    after = ranks_of(selection.scores(logits - removed, routers), chosen)
    return as_float64((after - before).abs() * share).sum((0, 2))


@dataclass(slots=True)
class Tally:
    """One sender's sums so far; those of `FIGURES` for each router."""

    name: str
    kind: str
    unit: str
    module: str
    number: int | None
    sums: Tensor  # [5, R]
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

    def sender(self, tokens: int) -> Sender:
        """The figures, averaged over so many tokens."""
        reached = self.reaches.tolist()
        figures = {
            name: tuple(
                value if reaches and not (name == "rank_change" and self.kind in UNRANKED) else None
                for value, reaches in zip(row, reached, strict=True)
            )
            for name, row in zip(FIGURES, (self.sums / tokens).tolist(), strict=True)
        }
        layer = None if self.kind == "token" else layer_number(self.unit)
        share = self.tokens / tokens if self.kind == "expert" else 1.0
        return Sender(self.name, self.kind, layer, self.module, self.number, share, **figures)

    def output(self) -> Output:
        sizes = self.tokens, self.norm / max(1, self.tokens), self.max_norm, self.max_entry
        return Output(self.module, layer_number(self.unit), self.number or 0, *sizes)


@dataclass(slots=True)
class Tallies:
    """The sums of all senders by name; every rank has those of all batches for the layers that have passed."""

    receivers: int  # R
    totals: dict[str, Tally] = field(default_factory=dict)

    def of(self, name: str, kind: str, unit: str, module: str, number: int | None = None) -> Tally:
        """The sums of the sender of this name; begun where there are none."""
        if name not in self.totals:
            sums = torch.zeros(len(FIGURES), self.receivers, dtype=torch.float64)
            reaches = torch.zeros(self.receivers, dtype=torch.bool)
            self.totals[name] = Tally(name, kind, unit, module, number, sums, reaches)
        return self.totals[name]

    def on_layer_end(self, unit: str) -> None:
        """Add up the layer's sums of all ranks."""
        if ranks().is_alone:
            return
        own = [tally for tally in self.totals.values() if tally.unit == unit]
        for tally in own:  # begun anew
            del self.totals[tally.name]
        for part in (tally for each in ranks().all_gather(own) for tally in each):
            tally = self.of(part.name, part.kind, unit, part.module, part.number)
            tally.sums += part.sums
            tally.reaches |= part.reaches
            tally.add_sizes(part.tokens, part.norm, part.max_norm, part.max_entry)
            if part.by_expert is not None:
                tally.add_by_expert(part.by_expert)


@dataclass(slots=True)
class Projection(TracedPass):
    """Projects every component onto the routers that it reaches, and adds up what that does to them."""

    routers: ObservedRouters
    edges_kept: int = 0  # edges to single experts' scores, which are measured if it is not 0
    tallies: Tallies = field(init=False)
    remainder: Tensor | None = field(init=False)  # [T, R, E] of the first batch: logits less the sub-scores so far
    _parts: Mapping[str, Mapping[str, str]] = field(init=False)  # kinds of components by decoder layer and name
    _strongest: list[ScoreEdge] = field(default_factory=list)  # of the layers so far, summed

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
                for expert in range(architecture.experts if kind == "expert" else 0):
                    self._expert(unit, part, expert).reaches[routers.later(unit)] = True

    def _expert(self, unit: str, module: str, expert: int) -> Tally:
        return self.tallies.of(f"{module} expert {expert}", "expert", unit, module, expert)

    def visit(self, unit: str, batch: int, trace: UnitTrace) -> None:
        """Measure everything that a layer wrote on one batch."""
        for module, ran in trace.routed.items():
            for expert in ran:
                norms, entry = expert.outputs.float().norm(dim=-1), float(expert.outputs.abs().max())
                sizes = len(norms), float(as_float64(norms).sum()), float(norms.max()), entry
                self._expert(unit, module, expert.expert).add_sizes(*sizes)
        for view in self.routers.views(unit, batch, trace):
            together: Tensor | None = None  # [T, r, E] of routed and shared experts
            for tally, seen, values, tokens in self._written(unit, trace, view):
                scores = seen.scores(values, tokens)
                self._add(tally, scores, tokens, batch, view.span)
                if batch == 0 and self.remainder is not None and tally.kind not in UNRANKED:
                    _add_rows(self.remainder[:, view.span], tokens, -scores)
                if tally.kind in ("expert", "shared"):
                    if together is None:
                        together = torch.zeros(trace.context.tokens, *scores.shape[1:], device=scores.device)
                    _add_rows(together, tokens, scores)
            if together is not None and view.terms is trace.terms:  # for later routers, which see all of the layer
                self._add(self.tallies.of(f"{unit} MoE", "moe", unit, unit), together, None, batch, view.span)

    def on_layer_end(self, unit: str) -> None:
        """Add up the layer's sums of all ranks, and keep the strongest edges."""
        TracedPass.on_layer_end(self, unit)
        self.tallies.on_layer_end(unit)
        split = {tally.module for tally in self.tallies.totals.values() if tally.kind == "head"}
        experts = self.routers.model.architecture.experts
        for name, tally in self.tallies.totals.items():
            if tally.by_expert is not None and adds_up(tally.kind, tally.module, split):
                values, places = tally.by_expert.flatten().sort(descending=True, stable=True)
                for value, place in zip(values.tolist()[: self.edges_kept], places.tolist(), strict=False):
                    if value > 0:
                        self._strongest.append(ScoreEdge(name, place // experts, place % experts, value))
            tally.by_expert = None
        self._strongest = sorted(self._strongest, key=lambda edge: -edge.influence)[: self.edges_kept]

    def score_edges(self, tokens: int) -> tuple[ScoreEdge, ...]:
        """The strongest edges to single experts' scores, averaged over so many tokens."""
        mean = tuple(replace(edge, influence=edge.influence / tokens) for edge in self._strongest)
        edges: tuple[ScoreEdge, ...] = ranks().broadcast(lambda: mean)
        return edges

    def _written(self, unit: str, trace: UnitTrace, view: View) -> Iterator[tuple[Tally, View, Tensor, Tensor | None]]:
        """What each component wrote and how the routers see it: experts [n, H] with their tokens [n], others [T, H'].

        After an attention come its heads, each through its slice of the output projection, and that one's bias.
        """
        is_first = unit == self.routers.model.architecture.units[0]
        for name, leaf in trace.context.leaves.items():
            if (name == STREAM and not is_first) or (seen := self.routers.look(view, name)) is None:
                continue
            kind = "token" if name == STREAM else self._parts[unit].get(name, "other")
            if kind == "expert":
                for ran in trace.routed[name]:
                    values = ran.outputs.float() * ran.weights.float()[:, None]
                    yield self._expert(unit, name, ran.expert), seen, values, ran.rows
                continue
            sender = {"token": "token", "other": f"{unit} {name}"}.get(kind, name)
            tally = self.tallies.of(sender, kind, unit, sender)
            yield tally, seen, leaf.value.expand(trace.context.tokens, -1), None
            if (heads := trace.heads.get(name)) is None:
                continue
            rows = self.routers.once(f"{name} heads", view.span, partial(_through, seen.rows, heads.weight))
            for head in range(heads.heads):
                span = heads.span(head)
                tally = self.tallies.of(f"{name} head {head}", "head", unit, name, head)
                yield tally, replace(seen, rows=rows[:, span]), heads.inputs[:, span], None
            if heads.bias is not None:
                tally = self.tallies.of(f"{name} bias", "bias", unit, name)
                yield tally, seen, heads.bias.expand(len(heads.inputs), -1), None

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


def _through(rows: Tensor, weight: Tensor) -> Tensor:
    return rows @ weight.float()
