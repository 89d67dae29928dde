"""The first pass of routing attribution: what each layer does to the residual stream, and every router's view of it.

T tokens, H hidden, E experts, R routers, K top-k.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from compressor.attribution.influence import Selection, best_selection, ranks, selections
from compressor.attribution.tracing import Chain, Term, pull_sum, same_chains
from compressor.attribution.unit_trace import STREAM, UnitTrace, router_width, trace_unit
from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer, layers_by_unit
from compressor.model.opened import OpenModel
from compressor.model.streaming import BUDGET, Forward, LayerVisitor, Pass, allocate
from compressor.progress import Progress

SELECTION_TOKENS = 1024  # tokens on which it is settled what routers rank by
Visit = Callable[[str, int, UnitTrace], None]  # of a decoder layer, for each batch


@dataclass(frozen=True, slots=True)
class LeafMap:
    """How a component enters a sum: token factor [T] (None: 1) times a sum of chains."""

    token: Tensor | None
    chains: tuple[Chain, ...]

    @property
    def is_identity(self) -> bool:
        """Whether the component enters as it is, but for the token factor."""
        return self.chains == ((),)


def leaf_map(terms: Sequence[Term], leaf: str) -> LeafMap | None:
    """How the component of this name enters; None if it does not. Terms of one component share their token factor."""
    own = [term for term in terms if term.leaf.name == leaf]
    if not own:
        return None
    first = own[0].token
    for term in own[1:]:
        both = term.token is not None and first is not None
        if term.token is not first and not (both and torch.equal(term.token, first)):  # type: ignore[arg-type]
            raise CompressionError(
                f"{leaf} enters a sum twice with different factors; routing attribution does not support this model"
            )
    return LeafMap(first, tuple(term.chain for term in own))


@dataclass(slots=True)
class _Tracing(LayerVisitor):
    """Has every batch pass every layer traced, and shows `visit` what that showed; then the layer has `passed`.

    What `visit` refuses is raised once all batches have passed the layer, by all ranks alike.
    """

    visit: Visit
    done: Callable[[str], None]
    fault: tuple[int, str] | None = None  # of the first batch that was refused

    def replaced(self, unit: str, own: Forward) -> Forward:
        def traced(*args: Any, **kwargs: Any) -> Any:
            output, trace = trace_unit(self.at.model, unit, self.at.moe_layers, own, args, kwargs)
            try:
                self.visit(unit, self.at.batch, trace)
            except CompressionError as error:
                self.fault = self.fault or (self.at.batch, str(error))
            return output

        return traced

    def passed(self, unit: str) -> None:
        self.done(unit)
        if faults := [fault for fault in here().all_gather(self.fault) if fault is not None]:
            raise CompressionError(min(faults)[1])


def run_traced(
    model: OpenModel,
    batches: Sequence[Tensor],
    visit: Visit,
    progress: Progress,
    phase: str,
    seed: int = 0,
    done: Callable[[str], None] = lambda unit: None,
) -> None:
    """Stream the batches through all layers up to the last router's, traced; `visit` sees every layer and batch.

    Of several ranks each runs its share of the batches. When all have passed a layer, all ranks are `done` with it.
    """
    Pass(model, batches, progress, phase, seed, shared=True).run(_Tracing(visit, done))


@dataclass(slots=True)
class ObservedRouters:
    """What the first pass keeps: of every router its logits, choices and view of the stream; of every layer its map.

    A rank keeps them of its own batches; all have the same routers, slots and way to rank experts.
    """

    layers: tuple[MoeLayer, ...]
    order: Mapping[str, int]  # of the decoder layers
    logits: dict[int, Tensor] = field(default_factory=dict)  # by batch, [T, R, E]
    chosen: dict[int, Tensor] = field(default_factory=dict)  # by batch, [T, R, K]
    before: dict[int, Tensor] = field(default_factory=dict)  # by batch, [T, R, K] ranks of the chosen
    valid: Tensor = field(default_factory=lambda: torch.zeros(0))  # [R, K] slots that the router uses
    rows: dict[str, Tensor] = field(default_factory=dict)  # by experts module, [E, H] on the layer's input
    scales: dict[tuple[str, int], Tensor | None] = field(default_factory=dict)  # [T] by experts module and batch
    streams: dict[str, LeafMap] = field(default_factory=dict)  # by decoder layer
    passing: dict[tuple[str, int], Tensor | None] = field(default_factory=dict)  # [T] by decoder layer and batch
    biases: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # [E] by name, then experts module
    selection: Selection = field(default_factory=Selection)

    def later(self, unit: str) -> list[int]:
        """Numbers of the routers in layers after this one."""
        return [number for number, layer in enumerate(self.layers) if self.order[layer.unit] > self.order[unit]]

    def rows_after(self, unit: str, number: int) -> Tensor:
        """[E, H]: a later router's rows on the output of a layer."""
        rows = self.rows[self.layers[number].name]
        for between in self._between(unit, self.layers[number]):
            if not (stream := self.streams[between]).is_identity:
                rows = pull_sum(rows, stream.chains)
        return rows

    def scale_after(self, unit: str, number: int, batch: int) -> Tensor:
        """[T]: the factor of each token that goes with those rows."""
        layer = self.layers[number]
        factors = [self.scales[layer.name, batch], *(self.passing[name, batch] for name in self._between(unit, layer))]
        known = [factor for factor in factors if factor is not None]
        logits = self.logits[batch]
        return torch.stack(known).prod(0) if known else torch.ones(len(logits), device=logits.device)

    def _between(self, unit: str, layer: MoeLayer) -> list[str]:
        """Layers after `unit` and before the router's own, the last one first."""
        first, last = self.order[unit], self.order[layer.unit]
        return [name for name, place in reversed(list(self.order.items())) if first < place < last]


def refuse(model: OpenModel, unit: str, why: str) -> CompressionError:
    """The error for an architecture whose routers' logits cannot be taken apart."""
    return CompressionError(
        f"{model.architecture.model_class} cannot be attributed: {unit}: {why}; compress it without attribution "
        "(--protect takes a list written by hand)"
    )


def observe_routers(model: OpenModel, batches: Sequence[Tensor], progress: Progress, seed: int = 0) -> ObservedRouters:
    """Run the first pass; raises `CompressionError` naming what in the architecture cannot be decomposed."""
    architecture = model.architecture
    by_unit = layers_by_unit(architecture.layers)
    experts, top_k = architecture.experts, max(layer.top_k for layer in architecture.layers)
    found = ObservedRouters(architecture.layers, {unit: number for number, unit in enumerate(architecture.units)})
    numbers = {layer.name: number for number, layer in enumerate(found.layers)}
    device, budget = model.partial.device, BUDGET // len(batches)
    for batch in sorted(here().share(batches)):
        shape = batches[batch].numel(), len(found.layers)
        found.logits[batch] = allocate((*shape, experts), torch.float32, device, budget)
        found.chosen[batch] = torch.zeros((*shape, top_k), dtype=torch.int64, device=device)
    found.valid = torch.zeros((len(found.layers), top_k), dtype=torch.bool, device=device)

    def visit(unit: str, batch: int, trace: UnitTrace) -> None:
        layers = [layer for layer in by_unit.get(unit, ()) if layer.name in trace.called]
        if (stream := leaf_map(trace.terms, STREAM)) is None:
            raise refuse(model, unit, "its layers do not add to one residual stream")
        found.passing[unit, batch] = stream.token
        known = found.streams.setdefault(unit, LeafMap(None, stream.chains))
        if not same_chains(known.chains, stream.chains):
            raise refuse(model, unit, "what it does to the residual stream differs between batches")
        for layer in layers:
            logits = trace.logits.get(layer.name)
            if logits is None or (view := leaf_map(logits.terms, STREAM)) is None:
                raise refuse(model, unit, "its router's logits are not linear in the normalised residual stream")
            if leaf_map(trace.terms, layer.name) is None:
                raise refuse(model, unit, "its experts' outputs do not reach the residual stream token by token")
            number, slots = numbers[layer.name], logits.chosen.shape[-1]
            found.logits[batch][:, number] = logits.value
            found.chosen[batch][:, number, :slots] = logits.chosen
            found.valid[number, :slots] = True
            found.scales[layer.name, batch] = view.token
            if layer.name not in found.rows:
                found.rows[layer.name] = router_rows(layer, view.chains, device)
                _keep_biases(model, layer, found)

    run_traced(model, batches, visit, progress, "routers", seed)
    _settle(found, [batch.numel() for batch in batches], experts)
    return found


def router_rows(layer: MoeLayer, chains: Sequence[Chain], device: torch.device) -> Tensor:
    """[E, H]: the rows of a router on a component that reaches its logits by these chains."""
    return pull_sum(torch.eye(router_width(layer), device=device)[: layer.experts], chains)


def _keep_biases(model: OpenModel, layer: MoeLayer, found: ObservedRouters) -> None:
    """Vectors with an entry for each expert, by which the router may correct its ranking."""
    block = model.partial.model.get_submodule(layer.block)
    own = dict((*block.named_parameters(), *block.named_buffers()))
    for tensor in layer.tensors:
        name = tensor.key.removeprefix(f"{layer.block}.")
        if name in own and own[name].numel() == layer.experts and own[name].is_floating_point():
            found.biases.setdefault(name, {})[layer.name] = own[name].detach().float().reshape(-1).clone()


def _beginning(parts: Mapping[int, Tensor], sizes: Sequence[int], like: Tensor) -> Tensor:
    """The first tokens of all batches together, however they are cut and whoever has them: [n, *like]."""
    found = like.new_zeros(min(SELECTION_TOKENS, sum(sizes)), *like.shape)
    starts = [0, *accumulate(sizes)]
    for batch, part in parts.items():
        found[starts[batch] : starts[batch + 1]] = part[: max(0, len(found) - starts[batch])]
    return here().all_reduce(found)


def _settle(found: ObservedRouters, sizes: Sequence[int], experts: int) -> None:
    """Leave out routers that no token came to; find out what the others rank by, and the ranks of what they chose."""
    reached = torch.tensor([layer.name in found.rows for layer in found.layers])
    marks = here().all_reduce(torch.cat([reached[:, None], found.valid.cpu()], 1).int()) > 0
    seen, found.valid = marks[:, 0].nonzero().flatten().tolist(), marks[:, 1:].to(found.valid.device)
    if len(seen) < len(found.layers):
        found.layers, found.valid = tuple(found.layers[number] for number in seen), found.valid[seen]
        found.logits = {batch: logits[:, seen] for batch, logits in found.logits.items()}
        found.chosen = {batch: chosen[:, seen] for batch, chosen in found.chosen.items()}
    names = [layer.name for layer in found.layers]
    common = [own for own in found.biases.values() if all(name in own for name in names)]
    biases = [torch.stack([own[name] for name in names]) for own in common]
    groups = [layer.routing_groups for layer in found.layers]
    logits = _beginning(found.logits, sizes, torch.zeros(len(names), experts, device=found.valid.device))
    chosen = _beginning(found.chosen, sizes, found.valid.long())
    tried = selections(biases)
    best = here().broadcast(lambda: best_selection(tried, logits, chosen, found.valid, groups))
    if found.logits:  # a rank without a batch has seen no biases
        found.selection = tried[best]
    for batch, own in found.logits.items():
        found.before[batch] = ranks(found.selection.scores(own), found.chosen[batch])
