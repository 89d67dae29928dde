"""Statistics of one MoE layer, collected while every calibration batch passes it; frozen afterwards.

A statistic is a meter in `compressor.statistics.meters` and a line of `LayerStatistics`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar, cast

import torch
from torch import Tensor

from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.model.experts import Watch
from compressor.model.streaming import as_arguments
from compressor.statistics.meters import METERS, ExpertsCall, Meter, Observed, RouterCall, Sample
from compressor.statistics.meters import LayerWeights as LayerWeights
from compressor.statistics.meters import RouterArguments as RouterArguments

logger = logging.getLogger(__name__)
T = TypeVar("T")

SAMPLE_TOKENS = 512  # tokens of the dense statistics, per layer


def _of(kind: str) -> frozenset[str]:
    return frozenset(name for name, meter in METERS.items() if meter.kind == kind)


ROUTED, SAMPLED, DENSE, WEIGHTS, HELDOUT, ATTRIBUTED = map(
    _of, ("routed", "sampled", "dense", "weights", "heldout", "attributed")
)
ROUTED_OUTPUTS = _of("routed outputs")  # need every output: a slower forward
ALL = frozenset(METERS)
RECONSTRUCTION = frozenset(
    {"inputs", "router_arguments", "top_k_index", "top_k_weights", "expert_outputs", "weights"}
)  # what the output of a planned layer can be computed from


class _Collected(Generic[T]):
    """A statistic of a layer; one that was not declared as a need is an error, not a guess."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, stats: "LayerStatistics | None", owner: type) -> T:
        if stats is None:
            return cast(T, self)
        if self.name not in stats.values:
            raise CompressionError(
                f"statistic {self.name!r} was not collected for {stats.layer.name}; the strategy must declare it in "
                "its NEEDS"
            )
        return cast(T, stats.values[self.name])


@dataclass(frozen=True)
class LayerStatistics:
    """What was measured of one layer, only to be read; shapes and meanings stand with the meters.

    A statistic that was not declared as a need is a `CompressionError`. `values` holds those that were, by name.
    """

    layer: MoeLayer
    tokens: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    by_source: tuple["LayerStatistics", ...] = ()  # the same of each calibration source, where that was asked for

    routed_count = _Collected[Tensor]()
    gate_weight_sum = _Collected[Tensor]()
    probability_sum = _Collected[Tensor]()
    norm_sum = _Collected[Tensor]()
    squared_norm_sum = _Collected[Tensor]()
    gated_norm_sum = _Collected[Tensor]()
    squared_gate_sum = _Collected[Tensor]()
    squared_gate_output_sum = _Collected[Tensor]()
    squared_gated_norm_sum = _Collected[Tensor]()
    inputs = _Collected[Tensor]()
    router_logits = _Collected[Tensor]()
    top_k_index = _Collected[Tensor]()
    top_k_weights = _Collected[Tensor]()
    router_arguments = _Collected[RouterArguments]()
    expert_outputs = _Collected[Tensor]()
    mixed_outputs = _Collected[Tensor]()
    weights = _Collected[LayerWeights]()
    heldout = _Collected["LayerStatistics"]()
    rank_change = _Collected[Tensor]()

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))

    def adding(self, **values: Any) -> "LayerStatistics":
        """The same with these statistics too, by name."""
        return replace(self, values={**self.values, **values})


def check_needs(needs: frozenset[str], strategy: str) -> None:
    """Refuse a need that nobody can measure, before anything is read."""
    if unknown := sorted(needs - ALL):
        raise CompressionError(
            f"strategy {strategy!r} needs the statistic {unknown[0]!r}, which does not exist; known are "
            f"{', '.join(sorted(ALL))}"
        )


def needs_data(needs: frozenset[str]) -> bool:
    """Whether calibration data must run through the model for these needs."""
    return bool(needs - WEIGHTS)


def needs_heldout(needs: frozenset[str]) -> bool:
    """Whether a part of the calibration data must be held out for these needs."""
    return bool(needs & HELDOUT)


def needs_attribution(needs: frozenset[str]) -> bool:
    """Whether the routers' logits must be attributed for these needs."""
    return bool(needs & ATTRIBUTED)


class Collector:
    """Has the meters of `needs` observe one layer while batches pass it."""

    def __init__(self, layer: MoeLayer, model: Any, needs: frozenset[str], seed: int) -> None:
        self.layer, self.model, self.needs, self.seed = layer, model, needs - HELDOUT - ATTRIBUTED, seed
        self.tokens = 0
        experts, router, block = (model.get_submodule(name) for name in (layer.name, layer.router, layer.block))
        observed = Observed(layer, experts, router, block, seed)
        self.meters: dict[str, Meter] = {name: meter(observed) for name, meter in METERS.items() if name in self.needs}
        outputs = any(meter.outputs for meter in self.meters.values())
        self.watch = Watch(
            model,
            layer,
            on_router=self._router_ran,
            on_experts=self._experts_called,
            on_expert_output=self._expert_ran if outputs else None,
        )

    def enter(self, tokens: int, rows: Tensor) -> None:
        """Observe the next batch, of whose `tokens` those at `rows` [s] are sampled; it is computed as ever."""
        self.batch = tokens, rows
        self.watch.attach()

    def detach(self) -> None:
        """Stop observing; the module is as it was."""
        self.watch.detach()

    def _rows(self, tokens: int) -> Tensor:
        """Sampled rows of the current batch; none where the layer sees other tokens than the calibration's."""
        size, rows = self.batch
        return rows if tokens == size else torch.arange(0)

    def _experts_called(self, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        if hidden.numel() == 0:
            return
        if not bool(torch.isfinite(hidden.sum(dtype=torch.float32))) and not bool(torch.isfinite(hidden).all()):
            raise CompressionError(
                f"{self.layer.name}: its inputs are not finite on the calibration data; try --dtype float32"
            )
        self.tokens += len(hidden)
        call = ExpertsCall(hidden, index, weights, self._rows(len(hidden)))
        for meter in self.meters.values():
            meter.experts_called(call)

    def _router_ran(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
        logits = _as_logits(output[0].reshape(-1, output[0].shape[-1]))
        call = RouterCall(logits, as_arguments(args, kwargs), self._rows(len(logits)))
        for meter in self.meters.values():
            meter.router_called(call)

    def _expert_ran(self, expert: int, rows: Tensor, weights: Tensor, outputs: Tensor) -> None:
        norms = outputs.double().norm(dim=-1)
        for meter in self.meters.values():
            meter.expert_ran(expert, weights, norms, outputs)

    def absorb(self, other: Self, scale: float = 1.0) -> None:
        """Take in what another collector of the same layer has seen, its sums times `scale`."""
        self.tokens += other.tokens
        for name, meter in self.meters.items():
            meter.absorb(other.meters[name], scale)

    def all_reduce(self) -> None:
        """Add up the sums of all ranks' collectors of the same tokens' kind."""
        self.tokens = int(here().all_reduce(torch.tensor(self.tokens)))
        for meter in self.meters.values():
            meter.all_reduce()

    def finish(
        self, smaller_router: Any, heldout: LayerStatistics | None = None, by_source: tuple[LayerStatistics, ...] = ()
    ) -> LayerStatistics:
        """Stop observing, compute the dense statistics, and freeze."""
        self.detach()
        samples = [meter for meter in self.meters.values() if isinstance(meter, Sample)]
        if samples and self.tokens and not any(meter.parts for meter in samples):
            logger.warning(
                "%s: its experts see other tokens than the calibration's, so samples of them are empty", self.layer.name
            )
        values = {name: meter.finish(smaller_router) for name, meter in self.meters.items()}
        if heldout is not None:
            values["heldout"] = heldout
        return LayerStatistics(self.layer, self.tokens, values, self.seed, by_source)


def combined(collectors: Sequence[Collector], shares: Sequence[float]) -> Collector:
    """One collector that has seen what all have, each source's sums weighted to its share of all tokens."""
    first, tokens = collectors[0], sum(collector.tokens for collector in collectors)
    if len(collectors) == 1:
        return first
    whole = Collector(first.layer, first.model, first.needs, first.seed)
    for collector, share in zip(collectors, shares, strict=True):
        whole.absorb(collector, share / sum(shares) * tokens / max(collector.tokens, 1))
    return whole


def _as_logits(scores: Tensor) -> Tensor:
    """A router's logits in float32, [T, E]; of one that hands on probabilities, the logarithms: same softmax."""
    scores = scores.detach().float()
    if len(scores) and bool((scores >= 0).all()) and bool(((scores.sum(-1) - 1).abs() < 1e-2).all()):
        return scores.clamp(min=torch.finfo(torch.float32).tiny).log()
    return scores
