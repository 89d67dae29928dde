"""The first pass of routing attribution: how each layer changes the residual stream, and every router's view of it.

n or T tokens, H hidden, E experts, R routers, K top-k.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import softplus

from compressor.attribution.tracing import (
    STREAM,
    Chain,
    Term,
    TracedPass,
    UnitTrace,
    pull_sum,
    router_width,
    same_chains,
)
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.model.streaming import BUDGET, Pass, allocate
from compressor.progress import Progress

SELECTION_TOKENS = 1024  # tokens on which it is settled what routers rank by
SCORES_AT_ONCE = 2**22  # sub-scores held at once: 16 MiB in float32
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda logits: logits,
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
    "root of softplus": lambda logits: softplus(logits).sqrt(),
}


def ranks_of(scores: Tensor, chosen: Tensor) -> Tensor:
    """How many experts score above each chosen one: [..., E], [..., K] -> [..., K]."""
    picked = scores.gather(-1, chosen)
    return torch.stack([(scores > picked[..., k, None]).sum(-1) for k in range(chosen.shape[-1])], -1)


@dataclass(frozen=True, slots=True)
class Selection:
    """What routers rank experts by: an activation of the logits, plus a bias [R, E] where they have one."""

    activation: str = "identity"
    bias: Tensor | None = None

    def scores(self, logits: Tensor, routers: slice = slice(None)) -> Tensor:
        """[n, R, E] logits -> what is ranked."""
        scores = ACTIVATIONS[self.activation](logits)
        return scores if self.bias is None else scores + self.bias[routers]


def competing(chosen: Tensor, valid: Tensor, experts: int, groups: Sequence[int]) -> Tensor:
    """[n, R, K] -> [n, R, E]: experts in the same groups of neighbours as the chosen ones, of so many per router."""
    counts = torch.zeros(*chosen.shape[:2], experts, device=chosen.device)
    found = counts.scatter_add_(-1, chosen, valid.float().expand(chosen.shape)) > 0
    for router, count in enumerate(groups):
        within = found[:, router].unflatten(-1, (count, -1))
        found[:, router] = within.any(-1, keepdim=True).expand_as(within).flatten(1)
    return found


def selections(biases: Sequence[Tensor]) -> list[Selection]:
    """The known ways to rank experts where routers have these biases, [R, E] each; the plainest first."""
    return [Selection(), *(Selection(activation, bias) for bias in biases for activation in ACTIVATIONS)]


def best_selection(
    tried: Sequence[Selection], logits: Tensor, chosen: Tensor, valid: Tensor, groups: Sequence[int] = ()
) -> int:
    """The number of the way to rank experts that agrees best with what the routers chose; the first of equals.

    `logits` [n, R, E], `chosen` [n, R, K], `valid` [R, K] marks slots that a router uses. Routers that choose `groups`
    first rank the experts of those alone.
    """
    used = valid.sum(-1)
    within = competing(chosen, valid, logits.shape[-1], groups or [1] * len(valid))

    def agreement(selection: Selection) -> float:
        scores = selection.scores(logits).masked_fill(~within, -torch.inf)
        return float(((ranks_of(scores, chosen) < used[:, None]) & valid).sum() / (valid.sum() * len(logits)))

    return max(range(len(tried)), key=lambda number: agreement(tried[number]))


@dataclass(frozen=True, slots=True)
class LeafMap:
    """How a component enters a sum: token factor [T] (None: 1) times a sum of chains."""

    token: Tensor | None
    chains: tuple[Chain, ...]


def leaf_map(terms: Sequence[Term], leaf: str) -> LeafMap | None:
    """How the component of this name enters; None if it does not. Terms of one component share their token factor."""
    own = [term for term in terms if term.leaf.name == leaf]
    if not own:
        return None
    first = own[0].token
    for other in (term.token for term in own[1:]):
        if other is not first and (other is None or first is None or not torch.equal(other, first)):
            raise CompressionError(
                f"{leaf} enters a sum twice with different factors; routing attribution does not support this model"
            )
    return LeafMap(first, tuple(term.chain for term in own))


@dataclass(frozen=True, slots=True)
class View:
    """How what was written looks to neighbouring routers: their numbers, rows [r * E, H'] and factors [T, r]."""

    terms: Sequence[Term]  # of what they see
    span: slice
    rows: Tensor
    scales: Tensor

    def scores(self, values: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Sub-scores [n, r, E] of values [n, H'] at these tokens (None: all)."""
        scales = self.scales if tokens is None else self.scales[tokens]
        scores: Tensor = (values.float() @ self.rows.T).unflatten(-1, (scales.shape[1], -1)) * scales[..., None]
        return scores


_Key = tuple[str, int, int]  # what is looked at, and by which routers


def refuse(model: OpenModel, unit: str, why: str) -> CompressionError:
    """The error for an architecture whose routers' logits cannot be taken apart."""
    return CompressionError(
        f"{model.architecture.model_class} cannot be attributed: {unit}: {why}; compress it without attribution "
        "(--protect takes a list written by hand)"
    )


def router_rows(layer: MoeLayer, chains: Sequence[Chain], device: torch.device) -> Tensor:
    """[E, H]: the rows of a router on a component that reaches its logits by these chains."""
    return pull_sum(torch.eye(router_width(layer), device=device)[: layer.experts], chains)


@dataclass(slots=True)
class ObservedRouters(TracedPass):
    """Keeps of every router its logits, choices and view of the stream, and of every layer how it maps the stream.

    A rank keeps them of its own batches; all have the same routers, slots and way to rank experts.
    """

    model: OpenModel
    batches: Sequence[Tensor]
    layers: tuple[MoeLayer, ...] = field(init=False)
    logits: dict[int, Tensor] = field(default_factory=dict)  # by batch, [T, R, E]
    chosen: dict[int, Tensor] = field(default_factory=dict)  # by batch, [T, R, K]
    chosen_ranks: dict[int, Tensor] = field(default_factory=dict)  # by batch, [T, R, K]
    valid: Tensor = field(init=False)  # [R, K] slots that the router uses
    selection: Selection = field(default_factory=Selection)
    _rows: dict[str, Tensor] = field(default_factory=dict)  # by experts module, [E, H] on the layer's input
    _scales: dict[tuple[str, int], Tensor | None] = field(default_factory=dict)  # [T] by experts module and batch
    _streams: dict[str, tuple[Chain, ...]] = field(default_factory=dict)  # by decoder layer
    _passing: dict[tuple[str, int], Tensor | None] = field(default_factory=dict)  # [T] by decoder layer and batch
    _biases: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # [E] by name, then experts module
    _unit: str = ""  # the layer that is looked at, of which all batches share:
    _chains: dict[_Key, tuple[Chain, ...]] = field(default_factory=dict)
    _made: dict[_Key, Tensor] = field(default_factory=dict)  # rows

    def __post_init__(self) -> None:
        self.layers = self.model.architecture.layers
        device, top_k = self.model.partial.device, max(layer.top_k for layer in self.layers)
        for batch in sorted(ranks().share(self.batches)):
            shape = self.batches[batch].numel(), len(self.layers)
            logits = (*shape, self.model.architecture.experts)
            self.logits[batch] = allocate(logits, torch.float32, device, BUDGET // len(self.batches))
            self.chosen[batch] = torch.zeros((*shape, top_k), dtype=torch.int64, device=device)
        self.valid = torch.zeros((len(self.layers), top_k), dtype=torch.bool, device=device)

    def visit(self, unit: str, batch: int, trace: UnitTrace) -> None:
        """Keep what a layer does to the stream of one batch, and what its routers make of it."""
        if (stream := leaf_map(trace.terms, STREAM)) is None:
            raise refuse(self.model, unit, "its layers do not add to one residual stream")
        self._passing[unit, batch] = stream.token
        if not same_chains(self._streams.setdefault(unit, stream.chains), stream.chains):
            raise refuse(self.model, unit, "what it does to the residual stream differs between batches")
        for number, layer in enumerate(self.layers):
            if layer.name not in trace.logits:
                continue
            logits = trace.logits[layer.name]
            if logits is None or (view := leaf_map(logits.terms, STREAM)) is None:
                raise refuse(self.model, unit, "its router's logits are not linear in the normalised residual stream")
            if leaf_map(trace.terms, layer.name) is None:
                raise refuse(self.model, unit, "its experts' outputs do not reach the residual stream token by token")
            if not bool(torch.isfinite(logits.value).all()):
                raise CompressionError(
                    f"{layer.router}: its logits are not finite on the calibration data; try --dtype float32"
                )
            slots = logits.chosen.shape[-1]
            self.logits[batch][:, number] = logits.value
            self.chosen[batch][:, number, :slots] = logits.chosen
            self.valid[number, :slots] = True
            self._scales[layer.name, batch] = view.token
            if layer.name not in self._rows:
                self._rows[layer.name] = router_rows(layer, view.chains, self.valid.device)
                self._keep_biases(layer)

    def _keep_biases(self, layer: MoeLayer) -> None:
        """Vectors with an entry for each expert, by which the router may correct its ranking."""
        block = self.at.model.get_submodule(layer.block)
        own = dict((*block.named_parameters(), *block.named_buffers()))
        for tensor in layer.tensors:
            name = tensor.key.removeprefix(f"{layer.block}.")
            if name in own and own[name].numel() == layer.experts and own[name].is_floating_point():
                bias = own[name].detach().float().reshape(-1).clone()
                self._biases.setdefault(name, {})[layer.name] = bias

    def rank(self) -> None:
        """Leave out routers that no token came to; learn what the others rank by, and the ranks of what they chose."""
        reached = torch.tensor([layer.name in self._rows for layer in self.layers])
        marks = ranks().all_reduce(torch.cat([reached[:, None], self.valid.cpu()], 1).int()) > 0
        seen, self.valid = marks[:, 0].nonzero().flatten().tolist(), marks[:, 1:].to(self.valid.device)
        if len(seen) < len(self.layers):
            self.layers, self.valid = tuple(self.layers[number] for number in seen), self.valid[seen]
            for kept in (self.logits, self.chosen):
                kept.update({batch: values[:, seen] for batch, values in kept.items()})
        names = [layer.name for layer in self.layers]
        common = [own for own in self._biases.values() if all(name in own for name in names)]
        tried = selections([torch.stack([own[name] for name in names]) for own in common])
        groups = [layer.routing_groups for layer in self.layers]
        shape = len(names), self.model.architecture.experts
        logits = self._first_tokens(self.logits, torch.zeros(shape, device=self.valid.device))
        chosen = self._first_tokens(self.chosen, self.valid.long())
        best = ranks().broadcast(lambda: best_selection(tried, logits, chosen, self.valid, groups))
        if self.logits:  # a rank without a batch has seen no biases
            self.selection = tried[best]
        for batch, own_logits in self.logits.items():
            self.chosen_ranks[batch] = ranks_of(self.selection.scores(own_logits), self.chosen[batch])

    def _first_tokens(self, parts: dict[int, Tensor], like: Tensor) -> Tensor:
        """The first tokens of all batches together, however they are cut and whoever has them: [n, *like]."""
        starts = [0, *accumulate(batch.numel() for batch in self.batches)]
        first = like.new_zeros(min(SELECTION_TOKENS, starts[-1]), *like.shape)
        for batch, part in parts.items():
            first[starts[batch] : starts[batch + 1]] = part[: max(0, len(first) - starts[batch])]
        return ranks().all_reduce(first)

    def later(self, unit: str) -> list[int]:
        """Numbers of the routers in layers after this one."""
        place = self.model.architecture.units.index
        return [number for number, layer in enumerate(self.layers) if place(layer.unit) > place(unit)]

    def views(self, unit: str, batch: int, trace: UnitTrace) -> Iterator[View]:
        """The layer's own routers on what comes before them in it, then all later ones on its output, some at once."""
        if unit != self._unit:
            self._unit = unit
            self._chains.clear()
            self._made.clear()
        for number, layer in enumerate(self.layers):
            if (logits := trace.logits.get(layer.name)) is not None:
                rows = router_rows(layer, [()], self.valid.device)
                scales = torch.ones(trace.context.tokens, 1, device=rows.device)
                yield View(logits.terms, slice(number, number + 1), rows, scales)
        later = self.later(unit)
        at_once = max(1, SCORES_AT_ONCE // (trace.context.tokens * self.model.architecture.experts))
        for numbers in (later[start : start + at_once] for start in range(0, len(later), at_once)):
            span = slice(numbers[0], numbers[-1] + 1)  # batches of other sizes have other spans
            rows = self.once("", span, partial(self._rows_after, unit, numbers))
            factors = [self._factors_after(unit, number, batch) for number in numbers]
            yield View(trace.terms, span, rows, torch.stack(factors, -1))

    def look(self, view: View, leaf: str) -> View | None:
        """The view of one component of the layer; None if the routers do not see it."""
        if (found := leaf_map(view.terms, leaf)) is None:
            return None
        known = self._chains.setdefault((leaf, view.span.start, view.span.stop), found.chains)
        if not same_chains(known, found.chains):
            raise refuse(self.model, self._unit, f"what it does to {leaf} differs between batches")
        rows = self.once(leaf, view.span, lambda: view.rows if known == ((),) else pull_sum(view.rows, known))
        return View((), view.span, rows, view.scales if found.token is None else view.scales * found.token[:, None])

    def once(self, what: str, span: slice, make: Callable[[], Tensor]) -> Tensor:
        """Rows of these routers that all batches of the layer share, made with the first."""
        key = what, span.start, span.stop
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _between(self, unit: str, number: int) -> Sequence[str]:
        """Layers after `unit` and before the router's own, the last one first."""
        units = self.model.architecture.units
        return units[units.index(unit) + 1 : units.index(self.layers[number].unit)][::-1]

    def _rows_after(self, unit: str, numbers: Sequence[int]) -> Tensor:
        """[r * E, H]: later routers' rows on the output of a layer."""
        found = []
        for number in numbers:
            rows = self._rows[self.layers[number].name]
            for between in self._between(unit, number):
                if self._streams[between] != ((),):
                    rows = pull_sum(rows, self._streams[between])
            found.append(rows)
        return torch.cat(found)

    def _factors_after(self, unit: str, number: int, batch: int) -> Tensor:
        """[T]: the factor of each token that goes with those rows."""
        passing = [self._passing[between, batch] for between in self._between(unit, number)]
        factors = [each for each in (self._scales[self.layers[number].name, batch], *passing) if each is not None]
        logits = self.logits[batch]
        return torch.stack(factors).prod(0) if factors else torch.ones(len(logits), device=logits.device)


def observe_routers(model: OpenModel, batches: Sequence[Tensor], progress: Progress, seed: int = 0) -> ObservedRouters:
    """Run the first pass; raises `CompressionError` naming what in the architecture cannot be decomposed."""
    routers = ObservedRouters(model, batches)
    Pass(model, batches, progress, "routers", seed, shared=True).run(routers)
    routers.rank()
    return routers
