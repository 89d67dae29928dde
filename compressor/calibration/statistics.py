"""Statistics of one MoE layer, collected while every calibration batch passes it; frozen afterwards.

Routed statistics run over all tokens that the router sent to an expert, dense ones over a sample of tokens for every
expert. The gate weight is the one that really multiplies an expert's output. Sums are float64, samples float32.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.model.buffers import token_dim
from compressor.model.experts import apply_expert, expert_parameters, observed_forward

logger = logging.getLogger(__name__)

_Argument = tuple[str | None, int | None, Any]  # keyword, dimension that counts tokens, value

SAMPLE_TOKENS = 512  # tokens of the dense statistics, per layer

ROUTED = frozenset({"routed_count", "gate_weight_sum", "probability_sum"})
ROUTED_OUTPUTS = frozenset({"norm_sum", "squared_norm_sum", "gated_norm_sum"})  # need every output: a slower forward
SAMPLED = frozenset({"inputs", "router_logits", "top_k_index", "top_k_weights", "router_arguments"})
DENSE = frozenset({"expert_outputs", "mixed_outputs"})
WEIGHTS = frozenset({"weights"})
HELDOUT = frozenset({"heldout"})
ALL = ROUTED | ROUTED_OUTPUTS | SAMPLED | DENSE | WEIGHTS | HELDOUT
RECONSTRUCTION = frozenset(
    {"inputs", "router_arguments", "top_k_index", "top_k_weights", "expert_outputs", "weights"}
)  # what the output of a planned layer can be computed from

MEANINGS: Mapping[str, str] = {
    "routed_count": "[E] tokens sent to each expert",
    "gate_weight_sum": "[E] sum of gate weights over those tokens",
    "probability_sum": "[E] softmax of the router logits (over a skip expert too), summed over all tokens",
    "norm_sum": "[E] L2 norm of the expert's output, summed over its tokens",
    "squared_norm_sum": "[E] square of that norm, summed over its tokens",
    "gated_norm_sum": "[E] gate weight times the norm, summed over its tokens",
    "inputs": "[S, H] inputs of the experts at the sampled tokens",
    "router_logits": "[S, E] router logits there",
    "top_k_index": "[S, K] experts chosen there",
    "top_k_weights": "[S, K] their gate weights",
    "router_arguments": "positional and by keyword, what the router was called with there",
    "expert_outputs": "[E, S, H] every expert's output there",
    "mixed_outputs": "[E, S, H] every expert's output on random mixtures of those inputs",
    "weights": "the layer's live experts and router modules, to be read only",
    "heldout": "statistics of calibration tokens that no other statistic saw, enough to reconstruct the layer's output",
}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The layer's own modules while it is loaded. Strategies read them; they never write."""

    experts: Any
    router: Any
    block: Any
    smaller_router: Callable[[int], Any]  # (experts) -> the router module, on meta, of a model with that many


@dataclass(frozen=True, slots=True)
class RouterArguments:
    """What a router was called with at the sampled tokens; unpacks into (positional, by keyword)."""

    positional: tuple[Any, ...] = ()
    by_keyword: Mapping[str, Any] = field(default_factory=dict)
    dims: Mapping[int | str, int | None] = field(default_factory=dict)  # which dimension counts tokens, if one does

    def __iter__(self) -> Iterator[Any]:
        yield self.positional
        yield self.by_keyword


@dataclass(frozen=True)
class LayerStatistics:
    """What was measured of one layer; a statistic that was not declared as a need is an error, not a guess."""

    layer: MoeLayer
    tokens: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    by_source: tuple["LayerStatistics", ...] = ()  # the same of each calibration source, where that was asked for

    def __getattr__(self, name: str) -> Any:
        if name in ALL:
            values = object.__getattribute__(self, "values")
            if name in values:
                return values[name]
            raise CompressionError(
                f"statistic {name!r} was not collected for {self.layer.name}; the strategy must declare it in its NEEDS"
            )
        raise AttributeError(name)


def check_needs(needs: frozenset[str], strategy: str) -> None:
    """Refuse a need that nobody can measure, before anything is read."""
    unknown = sorted(needs - ALL)
    if unknown:
        raise CompressionError(
            f"strategy {strategy!r} needs the statistic {unknown[0]!r}, which does not exist; known are {sorted(ALL)}"
        )


def needs_data(needs: frozenset[str]) -> bool:
    """Whether calibration data must run through the model for these needs."""
    return bool(needs - WEIGHTS)


def needs_heldout(needs: frozenset[str]) -> bool:
    """Whether a part of the calibration data must be held out for these needs."""
    return bool(needs & HELDOUT)


class Collector:
    """Observes one layer while batches pass it. `starts` are the batches' first positions among all tokens."""

    def __init__(
        self, layer: MoeLayer, model: Any, needs: frozenset[str], positions: torch.Tensor, sizes: list[int], seed: int
    ) -> None:
        self.layer, self.model, self.needs, self.seed = layer, model, needs - HELDOUT, seed
        self.experts, self.router = model.get_submodule(layer.name), model.get_submodule(layer.router)
        self.block = model.get_submodule(layer.block)
        self.positions, self.sizes = positions, sizes
        self.starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self.batch, self.tokens = 0, 0
        sums = (ROUTED | ROUTED_OUTPUTS) & needs
        self.sums = {name: torch.zeros(layer.experts, dtype=torch.float64) for name in sums}
        self.samples: dict[str, list[torch.Tensor]] = {}
        self.arguments: list[list[_Argument]] = []
        self.own = {
            id(tensor) for tensor in (*self.block.parameters(), *self.block.buffers())
        }  # no reference: it must be freed
        self.handles: list[Any] = []

    def enter(self, batch: int) -> None:
        """Observe this batch, numbered among the collector's own; the stock computation is not changed."""
        self.batch = batch
        self.attach()

    def attach(self) -> None:
        """Start observing; the stock computation is not changed."""
        self.handles = [
            self.experts.register_forward_pre_hook(self._before_experts),
            self.router.register_forward_hook(self._after_router, with_kwargs=True),
        ]
        if self.needs & ROUTED_OUTPUTS:
            self.experts.forward = self._observed_forward

    def _observed_forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return observed_forward(self.experts, hidden, index, weights, self._observe_outputs)

    def detach(self) -> None:
        """Stop observing; the module is as it was."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.experts.__dict__.pop("forward", None)

    def _rows(self, tokens: int) -> torch.Tensor:
        """Rows of the current batch that belong to the sample."""
        if tokens != self.sizes[self.batch]:
            return torch.arange(0)
        start = self.starts[self.batch]
        inside = (self.positions >= start) & (self.positions < start + tokens)
        return self.positions[inside] - start

    def _sample(self, name: str, value: torch.Tensor, rows: torch.Tensor) -> None:
        if name in self.needs and rows.numel():
            taken = value[rows.to(value.device)].detach()
            self.samples.setdefault(name, []).append(taken if name == "top_k_index" else taken.float())

    def _before_experts(self, module: Any, args: tuple[torch.Tensor, ...]) -> None:
        hidden, index, weights = args
        if hidden.numel() == 0:
            return
        if not bool(torch.isfinite(hidden.sum(dtype=torch.float32))) and not bool(torch.isfinite(hidden).all()):
            raise CompressionError(
                f"{self.layer.name}: its inputs are not finite on the calibration data; try --dtype float32"
            )
        self.tokens += len(hidden)
        used = weights != 0  # a skip expert is handed on as index 0 with weight 0
        if "routed_count" in self.sums:
            self.sums["routed_count"] += torch.bincount(index[used], minlength=self.layer.experts).cpu()
        if "gate_weight_sum" in self.sums:
            flat = torch.zeros(self.layer.experts, dtype=torch.float64, device=hidden.device)
            self.sums["gate_weight_sum"] += flat.index_add_(0, index[used], weights[used].double()).cpu()
        rows = self._rows(len(hidden))
        for name in ("expert_outputs", "mixed_outputs"):
            if name in self.needs and rows.numel():
                self.samples.setdefault("dense_inputs", []).append(hidden[rows.to(hidden.device)].detach().clone())
                break
        self._sample("inputs", hidden, rows)
        self._sample("top_k_index", index, rows)
        self._sample("top_k_weights", weights, rows)

    def _after_router(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[torch.Tensor, ...]
    ) -> None:
        logits = _as_logits(output[0].reshape(-1, output[0].shape[-1]))
        experts = slice(0, self.layer.experts)
        if "probability_sum" in self.sums and len(logits):
            self.sums["probability_sum"] += logits.softmax(-1).sum(0, dtype=torch.float64)[experts].cpu()
        rows = self._rows(len(logits))
        self._sample("router_logits", logits[:, experts], rows)
        if "router_arguments" in self.needs and rows.numel():
            named = [*((None, value) for value in args), *kwargs.items()]
            self.arguments.append([(name, *self._token_rows(value, len(logits), rows)) for name, value in named])

    def _token_rows(self, value: Any, tokens: int, rows: torch.Tensor) -> tuple[int | None, Any]:
        """(dimension of tokens, sampled rows) of a router's argument: [T, ...] -> [S, ...], [B, L, ...] -> [1, S, ...].

        An argument that does not go by tokens, such as a bias held by the parent block, comes back as it is with None.
        """
        dim = None if id(value) in self.own else token_dim(value, tokens)
        if dim is None:
            return None, value
        by_token = value if dim == 0 else value.flatten(0, 1)
        taken = by_token[rows.to(value.device)].detach().clone()
        return dim, taken if dim == 0 else taken[None]

    def _observe_outputs(self, expert: int, rows: torch.Tensor, weights: torch.Tensor, outputs: torch.Tensor) -> None:
        norms = outputs.double().norm(dim=-1)
        if "norm_sum" in self.sums:
            self.sums["norm_sum"][expert] += norms[weights != 0].sum().cpu()
        if "squared_norm_sum" in self.sums:
            self.sums["squared_norm_sum"][expert] += norms[weights != 0].square().sum().cpu()
        if "gated_norm_sum" in self.sums:
            self.sums["gated_norm_sum"][expert] += (weights.double() * norms).sum().cpu()

    def finish(
        self,
        smaller_router: Any,
        heldout: LayerStatistics | None = None,
        by_source: tuple[LayerStatistics, ...] = (),
    ) -> LayerStatistics:
        """Stop observing, compute the dense statistics, and freeze."""
        self.detach()
        if self.needs & (SAMPLED | DENSE) and self.tokens and not (self.samples or self.arguments):
            logger.warning(
                "%s: its experts see other tokens than the calibration's, so samples of them are empty", self.layer.name
            )
        values: dict[str, Any] = dict(self.sums)
        if heldout is not None:
            values["heldout"] = heldout
        dense = self.samples.pop("dense_inputs", None)
        values.update({name: torch.cat(parts) for name, parts in self.samples.items()})
        for name in (SAMPLED - {"router_arguments"}) & self.needs:
            dtype = torch.long if name == "top_k_index" else torch.float32
            values.setdefault(name, torch.zeros(0, self._width(name), dtype=dtype))
        if "router_arguments" in self.needs:
            values["router_arguments"] = self._joined_arguments()
        hidden = torch.cat(dense) if dense else None
        if "expert_outputs" in self.needs:
            values["expert_outputs"] = self._dense(hidden)
        if "mixed_outputs" in self.needs:
            values["mixed_outputs"] = self._dense(None if hidden is None else mix_tokens(hidden, self.seed))
        if "weights" in self.needs:
            values["weights"] = LayerWeights(self.experts, self.router, self.block, smaller_router)
        return LayerStatistics(self.layer, self.tokens, values, self.seed, by_source)

    def _width(self, name: str) -> int:
        return {"inputs": 1, "router_logits": self.layer.experts}.get(name, self.layer.top_k)

    def _joined_arguments(self) -> RouterArguments:
        positional: list[Any] = []
        by_keyword: dict[str, Any] = {}
        dims: dict[int | str, int | None] = {}
        for column in zip(*self.arguments, strict=True):
            (name, dim, first), values = column[0], [value for _, _, value in column]
            joined = first if dim is None else torch.cat(values, dim)
            dims[len(positional) if name is None else name] = dim
            if name is None:
                positional.append(joined)
            else:
                by_keyword[name] = joined
        return RouterArguments(tuple(positional), by_keyword, dims)

    @torch.no_grad()
    def _dense(self, hidden: torch.Tensor | None) -> torch.Tensor:
        if hidden is None:
            return torch.zeros(self.layer.experts, 0, 1)
        outputs = torch.empty(self.layer.experts, *hidden.shape, dtype=torch.float32, device=hidden.device)
        for expert in range(self.layer.experts):
            outputs[expert] = apply_expert(self.experts, expert_parameters(self.experts, expert), hidden)
        return outputs


def combined(collectors: Sequence[Collector], shares: Sequence[float]) -> Collector:
    """One collector that has seen what all have, each source's sums weighted to its share of all tokens."""
    first, tokens = collectors[0], sum(collector.tokens for collector in collectors)
    if len(collectors) == 1:
        return first
    whole = Collector(first.layer, first.model, first.needs, first.positions, [], first.seed)
    whole.tokens = tokens
    for collector, share in zip(collectors, shares, strict=True):
        scale = share / sum(shares) * tokens / max(collector.tokens, 1)
        for name, value in collector.sums.items():
            whole.sums[name] += scale * value
        for name, parts in collector.samples.items():
            whole.samples.setdefault(name, []).extend(parts)
        whole.arguments.extend(collector.arguments)
    return whole


def _as_logits(scores: torch.Tensor) -> torch.Tensor:
    """A router's logits in float32, [T, E]; of one that hands on probabilities, the logarithms: same softmax."""
    scores = scores.detach().float()
    if len(scores) and bool((scores >= 0).all()) and bool(((scores.sum(-1) - 1).abs() < 1e-2).all()):
        return scores.clamp(min=torch.finfo(torch.float32).tiny).log()
    return scores


def mix_tokens(hidden: torch.Tensor, seed: int) -> torch.Tensor:
    """Random mixtures of tokens [S, H] -> [S, H]: each with another, in proportions drawn uniformly.

    Section 3.4 of Zhang et al. 2024, arXiv:2407.09590.
    """
    generator = torch.Generator().manual_seed(seed)
    partner = torch.randperm(len(hidden), generator=generator).to(hidden.device)
    share = torch.rand(len(hidden), 1, generator=generator).to(hidden.device)
    mixed = share * hidden.float() + (1 - share) * hidden[partner].float()
    return mixed.to(hidden.dtype)
