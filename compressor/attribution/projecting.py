"""The second pass of routing attribution: each component's sub-scores for all later routers, as the
component appears.

Figures of a sender for a router: the variance of its sub-scores over the experts measures influence
(Proposition 1 of "Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs",
ICLR 2026), their signs promote and inhibit (APS and ANS), the ranks change without them (AARV), and
their covariance with the logits adds up. T tokens of a batch, n of them, H hidden, E experts, R
routers, r of them at once, K top-k."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from compressor.attribution.figures import UNRANKED, Output, ScoreEdge, Sender, adds_up
from compressor.attribution.routers import ObservedRouters, View, ranks_of
from compressor.attribution.tracing import STREAM, LayerTrace, TracedPass
from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.model.moe_layer import layer_number

# of a sender, in the order of its sums
FIGURES = (
    "influence",
    "positive",
    "negative",
    "covariance",
    "rank_change",
)


class Component(NamedTuple):
    """One sender by its place in the model."""

    name: str
    kind: str
    decoder_layer: str
    module: str
    number: int | None = None  # of the expert or the head


@dataclass
class Tally:
    """One sender's sums so far; those of `FIGURES` for each router."""

    sums: Tensor  # [5, R]
    reaches: Tensor  # [R]: True for routers after the sender
    # of an expert's outputs
    tokens: int = 0
    norms: float = 0.0  # L2, summed
    max_norm: float = 0.0
    max_entry: float = 0.0
    # [R, E] variance by expert, while its layer passes and if edges are kept
    by_expert: Tensor | float = 0.0

    def sender(self, component: Component, tokens: int) -> Sender:
        """Return the figures, averaged over a number of tokens."""
        means = (self.sums / tokens).masked_fill(~self.reaches, math.nan)
        if component.kind in UNRANKED:
            means[-1] = math.nan
        figures = {}
        for name, row in zip(FIGURES, means.tolist(), strict=True):
            figures[name] = tuple(None if math.isnan(value) else value for value in row)
        return Sender(
            name=component.name,
            kind=component.kind,
            layer=None if component.kind == "token" else layer_number(component.decoder_layer),
            module=component.module,
            number=component.number,
            share=self.tokens / tokens if component.kind == "expert" else 1.0,
            **figures,
        )

    def output(self, component: Component) -> Output:
        """The size of an expert's outputs."""
        expert = component.module, layer_number(component.decoder_layer), component.number or 0
        mean_norm = self.norms / max(1, self.tokens)
        return Output(*expert, self.tokens, mean_norm, self.max_norm, self.max_entry)


@dataclass
class Projection(TracedPass):
    """Projects every component onto the routers that it reaches, and adds up the effects.

    Every rank has the sums of all batches for the layers that have passed.
    """

    routers: ObservedRouters
    tokens: int  # of all batches
    edges_kept: int = 0  # edges to single experts' scores, which are measured if it is not 0
    tallies: dict[Component, Tally] = field(default_factory=dict)
    # [T, R, E] of the first batch: logits less the sub-scores so far
    remainder: Tensor | None = field(init=False)
    score_edges: list[ScoreEdge] = field(default_factory=list)  # the strongest of the layers so far

    def __post_init__(self) -> None:
        self.remainder = self.routers.logits[0].clone() if 0 in self.routers.logits else None
        architecture = self.routers.model.architecture
        index = architecture.decoder_layers.index
        after = [index(layer.decoder_layer) for layer in self.routers.layers]
        for layer in architecture.layers:
            reaches = torch.tensor(after) > index(layer.decoder_layer)
            for expert in range(layer.experts):
                tally = self._tally(_expert(layer.decoder_layer, layer.name, expert))
                tally.reaches |= reaches

    def _tally(self, component: Component) -> Tally:
        """Return the sums of a sender, zero at first."""
        if component not in self.tallies:
            sums = torch.zeros(len(FIGURES), len(self.routers.layers), dtype=torch.float64)
            self.tallies[component] = Tally(sums, torch.zeros(sums.shape[1], dtype=torch.bool))
        return self.tallies[component]

    def visit(self, decoder_layer: str, batch: int, trace: LayerTrace) -> None:
        """Measure everything that a layer wrote on one batch."""
        for module, ran in trace.routed.items():
            for expert in ran:
                norms = expert.outputs.float().norm(dim=-1)
                tally = self._tally(_expert(decoder_layer, module, expert.expert))
                tally.tokens += len(norms)
                tally.norms += float(as_float64(norms).sum())
                tally.max_norm = max(tally.max_norm, float(norms.max()))
                tally.max_entry = max(tally.max_entry, float(expert.outputs.abs().max()))
        every_token = torch.arange(trace.context.tokens, device=self.routers.valid.device)
        for view in self.routers.views(decoder_layer, batch, trace):
            # of routed and shared experts
            moe = torch.zeros_like(self.routers.logits[batch][:, view.span])
            for component, scores, tokens in self._sub_scores(
                decoder_layer, trace, view, every_token
            ):
                self._add(component, scores, tokens, batch, view.span)
                if batch == 0 and self.remainder is not None and component.kind not in UNRANKED:
                    self.remainder[:, view.span].index_add_(0, tokens, -scores)
                if component.kind in ("expert", "shared"):
                    moe.index_add_(0, tokens, scores)
            # for later routers, which see all of the layer
            if trace.routed and view.terms is trace.terms:
                whole = Component(f"{decoder_layer} MoE", "moe", decoder_layer, decoder_layer)
                self._add(whole, moe, every_token, batch, view.span)

    def on_layer_end(self, decoder_layer: str) -> None:
        """Add up the layer's sums of all ranks, and keep the strongest edges."""
        passed = [name for name in self.tallies if name.decoder_layer == decoder_layer]
        mine = {component: self.tallies.pop(component) for component in passed}
        for tallies in ranks().all_gather(mine):
            for component, tally in tallies.items():
                whole = self._tally(component)
                whole.sums += tally.sums
                whole.reaches |= tally.reaches
                whole.by_expert = whole.by_expert + tally.by_expert
                whole.tokens += tally.tokens
                whole.norms += tally.norms
                whole.max_norm = max(whole.max_norm, tally.max_norm)
                whole.max_entry = max(whole.max_entry, tally.max_entry)
        split = {component.module for component in self.tallies if component.kind == "head"}
        edges = self.score_edges
        for component, tally in self.tallies.items():
            counts = adds_up(component.kind, component.module, split)
            if isinstance(tally.by_expert, Tensor) and counts:
                variances = (tally.by_expert / self.tokens).flatten()
                values, order = variances.sort(descending=True, stable=True)
                strongest = values[: self.edges_kept].tolist()
                for value, index in zip(strongest, order.tolist(), strict=False):
                    if value > 0:
                        receiver, expert = divmod(index, tally.by_expert.shape[1])
                        edges.append(ScoreEdge(component.name, receiver, expert, value))
            tally.by_expert = 0.0
        self.score_edges = sorted(edges, key=lambda edge: -edge.influence)[: self.edges_kept]

    def _sub_scores(
        self, decoder_layer: str, trace: LayerTrace, view: View, every_token: Tensor
    ) -> Iterator[tuple[Component, Tensor, Tensor]]:
        """Sub-scores [n, r, E] of each component at the tokens [n] that it wrote to.

        After an attention come its heads, each through its slice of the output projection, and that
        one's bias."""
        is_first = decoder_layer == self.routers.model.architecture.decoder_layers[0]
        for name, values in trace.context.leaves.items():
            seen = view.component(name) if name != STREAM or is_first else None
            if seen is None:
                continue
            kind = "token" if name == STREAM else trace.kinds.get(name, "other")
            if kind == "expert":
                for ran in trace.routed[name]:
                    weighted = ran.outputs.float() * ran.weights.float()[:, None]
                    scores = seen.scores(weighted, ran.rows)
                    yield _expert(decoder_layer, name, ran.expert), scores, ran.rows
                continue
            sender = {"token": "token", "other": f"{decoder_layer} {name}"}.get(kind, name)
            scores = seen.scores(values.expand(len(every_token), -1), every_token)
            yield Component(sender, kind, decoder_layer, sender), scores, every_token
            if name not in trace.heads:
                continue
            heads = trace.heads[name]
            shared = f"{name} heads"
            if shared not in view.shared:
                view.shared[shared] = torch.tensordot(seen.rows, heads.weight.float(), 1)
            rows = view.shared[shared]
            for head in range(rows.shape[1]):
                scores = replace(seen, rows=rows[:, head]).scores(
                    heads.inputs[:, head], every_token
                )
                component = Component(f"{name} head {head}", "head", decoder_layer, name, head)
                yield component, scores, every_token
            if heads.bias is not None:
                scores = seen.scores(heads.bias.expand(len(every_token), -1), every_token)
                yield Component(f"{name} bias", "bias", decoder_layer, name), scores, every_token

    def _add(
        self, component: Component, scores: Tensor, tokens: Tensor, batch: int, span: slice
    ) -> None:
        """Add the effect of sub-scores [n, r, E] on each router, summed over tokens in float64.

        Ranks are left out for heads and their bias.
        """
        routers = self.routers
        tally = self._tally(component)
        logits = routers.logits[batch][tokens, span]
        size = scores.shape[-1]
        # [r, E] is each expert's part of the variance over the experts.
        norms = torch.linalg.vector_norm(scores - scores.mean(-1, keepdim=True), dim=0)
        variance = as_float64(norms).square() / size
        positive = as_float64(scores.clamp(min=0).mean(-1)).sum(0)
        negative = as_float64(scores.mean(-1)).sum(0) - positive
        # Over the experts, too: those of all components add up to the logits' variance.
        centred = logits - logits.mean(-1, keepdim=True)
        covariance = as_float64((scores * centred).sum(-1)).sum(0) / size
        sums = [variance.sum(-1), positive, negative, covariance]
        if component.kind not in UNRANKED:
            without = routers.selection.scores(logits - scores, span)
            chosen = routers.chosen[batch][tokens, span]
            change = ranks_of(without, chosen) - routers.chosen_ranks[batch][tokens, span]
            sums.append(as_float64(change.abs() * routers.share[span]).sum((0, 2)))
        tally.sums[: len(sums), span] += torch.stack(sums).cpu()
        tally.reaches[span] = True
        if self.edges_kept:
            by_expert = torch.zeros(len(routers.layers), size, dtype=torch.float64)
            by_expert[span] = variance.cpu()
            tally.by_expert = tally.by_expert + by_expert


def _expert(decoder_layer: str, module: str, expert: int) -> Component:
    return Component(f"{module} expert {expert}", "expert", decoder_layer, module, expert)
