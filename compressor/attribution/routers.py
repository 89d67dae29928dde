"""The first pass of routing attribution: how each layer changes the residual stream, and every
router's view of it.

n or T tokens, H hidden, E experts, R routers, r of them at once, K top-k.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from compressor.attribution.blocking import Blocked, Blocking
from compressor.attribution.tracing import (
    STREAM,
    Chain,
    LayerTrace,
    Term,
    TracedPass,
    pull_sum,
    router_width,
)
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.model.router_logits import SCORES, Score, weights_of
from compressor.model.streaming import BUDGET, Pass, allocate
from compressor.progress import Progress

SELECTION_TOKENS = 1024  # of each batch, by which the routers' way to rank experts is found
SCORES_AT_ONCE = 2**22  # sub-scores held at once: 16 MiB in float32
OUTPUT = "output"  # a layer's own, among its components


def ranks_of(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return the number of experts that score above each chosen one: [..., E], [..., K] -> [...,
    K]."""
    picked = scores.gather(-1, chosen)
    above = [(scores > picked[..., k, None]).sum(-1) for k in range(chosen.shape[-1])]
    return torch.stack(above, -1)


@frozen
class Selection:
    """The scores that routers rank experts by: the logits or weights made of them, plus a bias [R,
    E] if any."""

    score: Score | None = None  # None: the logits
    bias: Tensor | None = None
    mask: Tensor | None = None  # [R, E]: minus infinity for blocked experts, else 0

    def scores(self, logits: Tensor, routers: slice = slice(None)) -> Tensor:
        """[n, R, E] logits -> the scores that are ranked."""
        if self.mask is not None:
            logits = logits + self.mask[routers]
        scores = logits if self.score is None else weights_of(logits, self.score)
        if self.bias is not None:
            scores = scores + self.bias[routers]
        return scores if self.mask is None else scores + self.mask[routers]


def find_selection(
    tried: Sequence[Selection],
    observed: Iterable[tuple[Tensor, Tensor]],
    valid: Tensor,
    groups: Sequence[int],
) -> Selection:
    """Return the way to rank experts that explains most of the routers' choices, the first of
    equals; ranks share what they have observed.

    `observed` are logits [n, R, E] and choices [n, R, K] of batches, `valid` [R, K] marks slots
    that a router uses. Routers that choose `groups` first rank the experts of those alone."""
    counts = torch.zeros(len(tried), dtype=torch.int64, device=valid.device)
    used = valid.sum(-1)[:, None]
    for logits, chosen in observed:
        # experts in the same groups of neighbours as the chosen ones
        among = torch.zeros_like(logits)
        among = among.scatter_add_(-1, chosen, valid.float().expand(chosen.shape)) > 0
        for router, count in enumerate(groups):
            within = among[:, router].unflatten(-1, (count, -1))
            among[:, router] = within.any(-1, keepdim=True).expand_as(within).flatten(1)
        for number, selection in enumerate(tried):
            places = ranks_of(selection.scores(logits).masked_fill(~among, -torch.inf), chosen)
            counts[number] += ((places < used) & valid).sum()
    return tried[int(ranks().all_reduce(counts).argmax())]


class LeafMap(NamedTuple):
    """The path of a component into a sum: token factor [T, 1] times a sum of chains."""

    token: Tensor | float
    chains: tuple[Chain, ...]


def leaf_map(terms: Sequence[Term], leaf: str) -> LeafMap | None:
    """Return the path of a component; None if it has none. Terms of one component share their token
    factor."""
    entering = [term for term in terms if term.leaf == leaf]
    if not entering:
        return None
    token = entering[0].token
    for term in entering:
        if term.token is not token and bool(torch.as_tensor(term.token != token).any()):
            raise CompressionError(
                f"{leaf} enters a sum twice with different factors; routing attribution does not "
                "support this model"
            )
    return LeafMap(token, tuple(term.chain for term in entering))


@frozen
class View:
    """The view of neighbouring routers on values: their numbers, rows [r * E, H'] and factors [T,
    r]."""

    terms: Sequence[Term]  # of the sum that they see
    span: slice
    rows: Tensor
    scales: Tensor
    # by component, rows that all batches share
    shared: dict[str, Tensor] = field(default_factory=dict)

    def component(self, leaf: str) -> "View | None":
        """Return the view of one component of the layer; None if the routers do not see it."""
        entering = leaf_map(self.terms, leaf)
        if entering is None:
            return None
        if leaf not in self.shared:
            self.shared[leaf] = pull_sum(self.rows, entering.chains)
        return View((), self.span, self.shared[leaf], self.scales * entering.token)

    def scores(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Sub-scores [n, r, E] of values [n, H'] at these tokens [n]."""
        scores: Tensor = (values.float() @ self.rows.T).unflatten(-1, (self.scales.shape[1], -1))
        return scores * self.scales[tokens, :, None]


def refuse(model: OpenModel, decoder_layer: str, why: str) -> CompressionError:
    """The error for an architecture whose routers' logits cannot be taken apart."""
    return CompressionError(
        f"{model.architecture.model_class} cannot be attributed: {decoder_layer}: {why}; compress "
        "it without attribution (--protect takes a list written by hand)"
    )


@dataclass
class ObservedRouters(TracedPass):
    """Every router's logits, choices and view of the stream, and every layer's map of the stream.

    A rank keeps them of its own batches; all have the same routers, slots and way to rank experts.
    """

    model: OpenModel
    batches: Sequence[Tensor]
    blocked: Blocked
    layers: tuple[MoeLayer, ...] = field(init=False)
    logits: dict[int, Tensor] = field(default_factory=dict)  # by batch, [T, R, E]
    chosen: dict[int, Tensor] = field(default_factory=dict)  # by batch, [T, R, K]
    chosen_ranks: dict[int, Tensor] = field(default_factory=dict)  # by batch, [T, R, K]
    valid: Tensor = field(init=False)  # [R, K] slots that the router uses
    share: Tensor = field(init=False)  # [R, K] 1 / K of each router in slots that it uses, else 0
    selection: Selection = field(default_factory=Selection)
    # by experts module, [E, H] on the layer's input
    _rows: dict[str, Tensor] = field(default_factory=dict)
    _streams: dict[str, tuple[Chain, ...]] = field(default_factory=dict)  # by decoder layer
    # of the stream's tokens, [T, 1] by experts module or decoder layer, and batch
    _factors: dict[tuple[str, int], Tensor | float] = field(default_factory=dict)
    # [E] by name, then experts module
    _biases: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    _cached_layer: str = ""  # the decoder layer of these rows
    # by routers, then component
    _shared_rows: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layers = self.model.architecture.layers
        device = self.model.partial.device
        top_k = max(layer.top_k for layer in self.layers)
        for batch in sorted(ranks().share(self.batches)):
            shape = self.batches[batch].numel(), len(self.layers)
            logits = (*shape, self.model.architecture.experts)
            self.logits[batch] = allocate(
                logits, torch.float32, device, BUDGET // len(self.batches)
            )
            self.chosen[batch] = torch.zeros((*shape, top_k), dtype=torch.int64, device=device)
        self.valid = torch.zeros((len(self.layers), top_k), dtype=torch.bool, device=device)

    def run_pass(self, visitor: TracedPass, progress: Progress, phase: str, seed: int = 0) -> None:
        """Run the batches through all layers, without the blocked experts."""
        run = Pass(self.model, self.batches, progress, phase, seed, shared=True)
        run.run(Blocking(self.blocked), visitor)

    def visit(self, decoder_layer: str, batch: int, trace: LayerTrace) -> None:
        """Keep what a layer does to the stream of one batch, and what its routers make of it."""
        stream = leaf_map(trace.terms, STREAM)
        if stream is None:
            raise refuse(self.model, decoder_layer, "its layers do not add to one residual stream")
        self._streams[decoder_layer] = stream.chains
        self._factors[decoder_layer, batch] = stream.token
        for number, layer in enumerate(self.layers):
            if layer.name not in trace.logits:
                continue
            logits = trace.logits[layer.name]
            view = leaf_map(logits.terms, STREAM)
            if view is None:
                why = "its router's logits are not linear in the normalised residual stream"
                raise refuse(self.model, decoder_layer, why)
            if not bool(torch.isfinite(logits.value).all()):
                raise CompressionError(
                    f"{layer.router}: its logits are not finite on the calibration data; try "
                    "--dtype float32"
                )
            blocked = torch.tensor(
                self.blocked.get(layer.name, ()), dtype=torch.int64, device=logits.chosen.device
            )
            if bool(torch.isin(logits.chosen, blocked).any()):
                raise CompressionError(
                    f"{layer.router} chooses experts by more than their scores, so none can be "
                    "blocked"
                )
            slots = logits.chosen.shape[-1]
            self.logits[batch][:, number] = logits.value
            self.chosen[batch][:, number, :slots] = logits.chosen
            self.valid[number, :slots] = True
            self._factors[layer.name, batch] = view.token
            # These [E, E'] pick the experts' logits from the E' entries of a router's product.
            picking = torch.eye(router_width(layer), device=self.valid.device)[: layer.experts]
            self._rows[layer.name] = pull_sum(picking, view.chains)
            if leaf_map(trace.terms, layer.name) is None:
                why = "its experts' outputs do not reach the residual stream token by token"
                raise refuse(self.model, decoder_layer, why)

    def on_layer_end(self, decoder_layer: str) -> None:
        """Keep vectors with an entry for each expert, by which a router may correct its ranking."""
        for layer in self.at.moe_layers:
            block = self.at.model.get_submodule(layer.block)
            tensors = dict((*block.named_parameters(), *block.named_buffers()))
            for tensor in layer.tensors:
                name = tensor.key.removeprefix(f"{layer.block}.")
                value = tensors.get(name, torch.empty(0))
                if value.numel() == layer.experts and value.is_floating_point():
                    bias = value.detach().float().reshape(-1).clone()
                    self._biases.setdefault(name, {})[layer.name] = bias

    def rank(self) -> None:
        """Find how routers rank experts, and the ranks of the chosen ones; routers without tokens
        are left out."""
        self.valid = ranks().all_reduce(self.valid.int()) > 0
        reached = self.valid.any(1).nonzero().flatten().tolist()
        if len(reached) < len(self.layers):
            self.layers = tuple(self.layers[number] for number in reached)
            self.valid = self.valid[reached]
            for batch in self.logits:
                self.logits[batch] = self.logits[batch][:, reached]
                self.chosen[batch] = self.chosen[batch][:, reached]
        self.share = self.valid / self.valid.sum(-1, keepdim=True)
        mask = None
        if self.blocked:
            mask = torch.zeros(
                len(self.layers), self.model.architecture.experts, device=self.valid.device
            )
            for number, layer in enumerate(self.layers):
                mask[number, self.blocked.get(layer.name, ())] = -torch.inf
        tried = [Selection(mask=mask)]  # the plainest first
        for by_layer in self._biases.values():
            present = [by_layer[layer.name] for layer in self.layers if layer.name in by_layer]
            if len(present) == len(self.layers):
                bias = torch.stack(present)
                tried += [Selection(score, bias, mask) for score in (None, *SCORES)]
        observed = [
            (logits[:SELECTION_TOKENS], self.chosen[batch][:SELECTION_TOKENS])
            for batch, logits in self.logits.items()
        ]
        groups = [layer.routing_groups for layer in self.layers]
        self.selection = find_selection(tried, observed, self.valid, groups)
        for batch, logits in self.logits.items():
            self.chosen_ranks[batch] = ranks_of(self.selection.scores(logits), self.chosen[batch])

    def views(self, decoder_layer: str, batch: int, trace: LayerTrace) -> Iterator[View]:
        """The layer's own routers on what comes before them in it, then all later ones on its
        output, some at once."""
        if decoder_layer != self._cached_layer:
            self._cached_layer = decoder_layer
            self._shared_rows.clear()
        tokens = trace.context.tokens
        layer_names = self.model.architecture.decoder_layers
        here = layer_names.index(decoder_layer)
        first = 0  # router in the layers after this one
        for number, layer in enumerate(self.layers):
            first += layer_names.index(layer.decoder_layer) <= here
            if layer.name in trace.logits:
                rows = torch.eye(router_width(layer), device=self.valid.device)[: layer.experts]
                scales = torch.ones(tokens, 1, device=rows.device)
                shared = self._shared_rows.setdefault((number, number + 1), {})
                terms = trace.logits[layer.name].terms
                yield View(terms, slice(number, number + 1), rows, scales, shared)
        at_once = max(1, SCORES_AT_ONCE // (tokens * self.model.architecture.experts))
        for start in range(first, len(self.layers), at_once):
            span = slice(start, start + at_once)  # batches of other sizes have other spans
            shared = self._shared_rows.setdefault((span.start, span.stop), {})
            # later routers' rows [r * E, H] on the output of this layer, and each token's factors
            after = []
            logits = self.logits[batch][:, span]
            scales = torch.ones(logits.shape[:2], device=logits.device)
            for column, layer in enumerate(self.layers[span]):
                end = layer_names.index(layer.decoder_layer)
                between = layer_names[here + 1 : end][::-1]
                for name in (layer.name, *between):
                    scales[:, column, None] *= self._factors[name, batch]
                if OUTPUT not in shared:
                    rows = self._rows[layer.name]
                    for name in between:
                        rows = pull_sum(rows, self._streams[name])
                    after.append(rows)
            if after:
                shared[OUTPUT] = torch.cat(after)
            yield View(trace.terms, span, shared[OUTPUT], scales, shared)


def observe_routers(
    model: OpenModel,
    batches: Sequence[Tensor],
    progress: Progress,
    seed: int,
    blocked: Blocked,
) -> ObservedRouters:
    """Run the first pass; raises `CompressionError` naming what in the architecture cannot be
    decomposed."""
    routers = ObservedRouters(model, batches, blocked)
    routers.run_pass(routers, progress, "routers", seed)
    routers.rank()
    return routers
