"""Statistics of one MoE layer, measured while every calibration batch passes it; frozen afterwards.

A statistic is an entry of `LayerStatistics` with a meter, which sees every batch that passes the layer and in the end
gives its value. Sums run over all tokens that the router sent to an expert and are float64. Samples are of some of the
tokens, S of them, kept as they were seen: float32, or in the computing dtype where experts are to be run on them. The
gate weight is the one that really multiplies an expert's output. One pass over the layers measures what strategies
need, each source's tokens apart. T tokens of a batch, E experts, K top-k, H hidden.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compressor.data.batches import Calibration, sample_rows
from compressor.devices import as_float64
from compressor.distributed import here
from compressor.errors import CompressionError
from compressor.memory import give_back
from compressor.model.architecture import Architecture, MoeLayer, build_meta
from compressor.model.experts import Watch, apply_expert, expert_parameters
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerVisitor, Pass, as_arguments, as_call, hidden_of, stream_weights, token_dim
from compressor.progress import Progress

logger = logging.getLogger(__name__)
T = TypeVar("T")

Part = tuple[int, bool]  # number of the source, whether held out
Routers = Callable[[MoeLayer, int], Any]  # the router module of a layer in a model with so many experts

SAMPLE_TOKENS = 512  # tokens of the dense statistics, per layer


SmallerRouter = Callable[[int], Any]  # (experts) -> the router module, on meta, of a model with that many


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The layer's own modules while it is loaded. Strategies read them; they never write."""

    experts: Any
    router: Any
    block: Any
    smaller_router: SmallerRouter


@dataclass(frozen=True, slots=True)
class RouterArguments:
    """What a router was called with at the sampled tokens."""

    positional: tuple[Any, ...] = ()
    by_keyword: Mapping[str, Any] = field(default_factory=dict)
    dims: Mapping[int | str, int | None] = field(default_factory=dict)  # which dimension counts tokens, if one does

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_keyword", MappingProxyType(dict(self.by_keyword)))


@dataclass(frozen=True, slots=True)
class Observed:
    """The layer that is observed."""

    layer: MoeLayer
    experts: Any
    router: Any
    block: Any
    seed: int


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """A batch's experts call: hidden [T, H], index and weights [T, K], 0 for a skip expert; `rows` [s] are sampled."""

    batch: int
    rows: Tensor
    hidden: Tensor
    index: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class RouterCall:
    """A batch's router call: logits [T, E and maybe more], all its arguments by keyword or None; `rows` are sampled."""

    batch: int
    rows: Tensor
    logits: Tensor
    arguments: tuple[tuple[str | None, Any], ...]


class Meter:
    """Measures one statistic of a layer."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed

    def experts_called(self, call: ExpertsCall) -> None:
        """A batch is about to pass the experts."""

    def router_called(self, call: RouterCall) -> None:
        """A batch has passed the router."""

    def expert_ran(self, expert: int, rows: Tensor, weights: Tensor, norms: Tensor, outputs: Tensor) -> None:
        """For the tokens `rows` [n] an expert returned `outputs` [n, H], in the computing dtype.

        With gate weights [n] and L2 norms [n].
        """

    def came_out(self, hidden: Tensor) -> None:
        """The batch's hidden states [B, L, H] have come out of the decoder layer."""

    def absorb(self, other: Self, scale: float) -> None:
        """Take in what another meter of the same layer has seen, its sums times `scale`."""

    def all_reduce(self) -> None:
        """Add up the sums of all ranks."""

    def finish(self, smaller_router: SmallerRouter) -> Any:
        raise NotImplementedError


class Sum(Meter):
    """A sum for each expert, [E] or [E, width], over all tokens."""

    def __init__(self, observed: Observed, *width: int) -> None:
        super().__init__(observed)
        self.total = torch.zeros(observed.layer.experts, *width, dtype=torch.float64)

    def absorb(self, other: Self, scale: float) -> None:
        self.total += scale * other.total

    def all_reduce(self) -> None:
        self.total = here().all_reduce(self.total)

    def finish(self, smaller_router: SmallerRouter) -> Tensor:
        return self.total


class GateSum(Sum):
    """Gate weights to a power, of which 0 counts the tokens."""

    def __init__(self, observed: Observed, power: int = 1) -> None:
        super().__init__(observed)
        self.power = power

    def experts_called(self, call: ExpertsCall) -> None:
        used = call.weights != 0
        index, weights = call.index[used].cpu(), call.weights[used].cpu().double()
        self.total += torch.zeros_like(self.total).index_add_(0, index, weights**self.power)


class ProbabilitySum(Sum):
    """Softmax of the router's logits."""

    def router_called(self, call: RouterCall) -> None:
        if len(call.logits):
            shares = as_float64(call.logits.softmax(-1)).sum(0)
            self.total += shares[: len(self.total)].cpu()


class NormSum(Sum):
    """L2 norms of the outputs, times the gate weights if `gated`, to a power."""

    def __init__(self, observed: Observed, gated: bool = False, power: int = 1) -> None:
        super().__init__(observed)
        self.gated, self.power = gated, power

    def expert_ran(self, expert: int, rows: Tensor, weights: Tensor, norms: Tensor, outputs: Tensor) -> None:
        values = as_float64(weights) * norms if self.gated else norms[as_float64(weights) != 0]
        self.total[expert] += (values**self.power).sum().cpu()


class StreamEnergySum(Sum):
    """Squared norms of the gated outputs, each over that of its token's hidden state behind the decoder layer."""

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        self.tokens, self.waiting = 0, list[tuple[int, Tensor, Tensor]]()  # an expert, its tokens, their energies

    def experts_called(self, call: ExpertsCall) -> None:
        self.tokens = len(call.hidden)

    def expert_ran(self, expert: int, rows: Tensor, weights: Tensor, norms: Tensor, outputs: Tensor) -> None:
        self.waiting.append((expert, rows, (as_float64(weights) * norms).square()))

    def came_out(self, hidden: Tensor) -> None:
        weights = stream_weights(hidden, self.tokens)
        for expert, rows, energies in self.waiting:
            self.total[expert] += (energies * weights[rows]).sum().cpu()
        self.waiting = []


class SquaredGateOutputSum(Sum):
    """Outputs times the square of their gate weights."""

    def __init__(self, observed: Observed) -> None:
        down, turned = observed.experts.down_proj, observed.experts.is_transposed
        super().__init__(observed, down.shape[2 if turned else 1])

    def expert_ran(self, expert: int, rows: Tensor, weights: Tensor, norms: Tensor, outputs: Tensor) -> None:
        self.total[expert] += (as_float64(weights).square() @ as_float64(outputs)).cpu()


class Sample(Meter):
    """A statistic of the sampled tokens."""

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        self.parts: list[tuple[int, Any]] = []  # with the number of the batch that each is of

    def absorb(self, other: Self, scale: float) -> None:
        self.parts.extend(other.parts)

    def take(self, call: ExpertsCall | RouterCall, value: Tensor) -> None:
        """Keep the sampled rows of a tensor [T, ...]."""
        if call.rows.numel():
            taken = value[call.rows.to(value.device)].detach()
            self.parts.append((call.batch, taken.float() if taken.is_floating_point() else taken))

    def joined(self, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """All rows; of a layer that no sampled token reached, none, and so wide."""
        return torch.cat([part for _, part in self.parts]) if self.parts else torch.zeros(0, width, dtype=dtype)


class CallSample(Sample):
    """What the experts are called with: a `part` of an `ExpertsCall`."""

    def __init__(self, observed: Observed, part: str) -> None:
        super().__init__(observed)
        self.part = part

    def experts_called(self, call: ExpertsCall) -> None:
        self.take(call, getattr(call, self.part))

    def finish(self, smaller_router: SmallerRouter) -> Tensor:
        dtype = torch.long if self.part == "index" else torch.float32
        return self.joined(1 if self.part == "hidden" else self.observed.layer.top_k, dtype)


class RouterLogits(Sample):
    """The router's logits."""

    def router_called(self, call: RouterCall) -> None:
        self.take(call, call.logits[:, : self.observed.layer.experts])

    def finish(self, smaller_router: SmallerRouter) -> Tensor:
        return self.joined(self.observed.layer.experts)


class RouterArgumentsSample(Sample):
    """What the router was called with."""

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        block = observed.block
        self.own = {id(value) for value in (*block.parameters(), *block.buffers())}  # no reference: it must be freed

    def router_called(self, call: RouterCall) -> None:
        if call.rows.numel():
            arguments = [(name, *self._rows(value, len(call.logits), call.rows)) for name, value in call.arguments]
            self.parts.append((call.batch, arguments))

    def _rows(self, value: Any, tokens: int, rows: Tensor) -> tuple[int | None, Any]:
        """(dimension of tokens, sampled rows) of a router's argument: [T, ...] -> [S, ...], [B, L, ...] -> [1, S, ...].

        An argument that does not go by tokens, such as a bias held by the parent block, comes back as it is with None.
        """
        dim = None if id(value) in self.own else token_dim(value, tokens)
        if dim is None:
            return None, value
        by_token = value if dim == 0 else value.flatten(0, 1)
        taken = by_token[rows.to(value.device)].detach().clone()
        return dim, taken if dim == 0 else taken[None]

    def finish(self, smaller_router: SmallerRouter) -> RouterArguments:
        joined, dims = list[tuple[str | None, Any]](), dict[int | str, int | None]()
        for place, column in enumerate(zip(*(part for _, part in self.parts), strict=True)):
            (name, dim, first), values = column[0], [value for _, _, value in column]
            joined.append((name, first if dim is None else torch.cat(values, dim)))
            dims[place if name is None else name] = dim
        return RouterArguments(*as_call(joined), dims)


class ExpertOutputs(Sample):
    """The outputs of all experts, on the sampled inputs or on random mixtures of them."""

    def __init__(self, observed: Observed, mixed: bool = False) -> None:
        super().__init__(observed)
        self.mixed = mixed

    def experts_called(self, call: ExpertsCall) -> None:
        if call.rows.numel():
            self.parts.append((call.batch, call.hidden[call.rows.to(call.hidden.device)].detach()))

    @torch.no_grad()
    def finish(self, smaller_router: SmallerRouter) -> Tensor:
        experts, count = self.observed.experts, self.observed.layer.experts
        if not self.parts:
            return torch.zeros(count, 0, 1)
        hidden = torch.cat([part for _, part in self.parts])
        if self.mixed:
            hidden = mix_tokens(hidden, self.observed.seed)
        outputs = torch.empty(count, *hidden.shape, dtype=torch.float32, device=hidden.device)
        for expert in range(count):
            outputs[expert] = apply_expert(experts, expert_parameters(experts, expert), hidden)
        return outputs


def mix_tokens(hidden: Tensor, seed: int) -> Tensor:
    """Tokens [S, H] -> [S, H], each mixed with another in random proportion: section 3.4 of arXiv:2407.09590."""
    generator = torch.Generator().manual_seed(seed)
    partner = torch.randperm(len(hidden), generator=generator).to(hidden.device)
    share = torch.rand(len(hidden), 1, generator=generator).to(hidden.device)
    mixed = share * hidden.float() + (1 - share) * hidden[partner].float()
    return mixed.to(hidden.dtype)


class Weights(Meter):
    """The live modules, for which nothing need be seen."""

    def finish(self, smaller_router: SmallerRouter) -> LayerWeights:
        return LayerWeights(self.observed.experts, self.observed.router, self.observed.block, smaller_router)


class Statistic(Generic[T]):
    """The shape and meaning of a statistic, and its meter with options; as an attribute of statistics, its value.

    One that was not declared as a need is an error, not a guess. Without a meter it is measured elsewhere.
    """

    def __init__(self, shape: str, meaning: str, meter: type[Meter] | None = None, **options: Any) -> None:
        self.shape, self.meaning, self.meter, self.options = shape, meaning, meter, options

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
    """What was measured of one layer, only to be read. `values` holds what was collected, by name.

    S sampled tokens, E experts, K top-k, H hidden.
    """

    layer: MoeLayer
    tokens: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    by_source: tuple["LayerStatistics", ...] = ()  # the same of each calibration source, where that was asked for

    routed_count = Statistic[Tensor]("[E]", "tokens sent to each expert", GateSum, power=0)
    gate_weight_sum = Statistic[Tensor]("[E]", "sum of gate weights over those tokens", GateSum)
    probability_sum = Statistic[Tensor](
        "[E]", "softmax of the router logits (over a skip expert too), summed over all tokens", ProbabilitySum
    )
    norm_sum = Statistic[Tensor]("[E]", "L2 norm of the expert's output, summed over its tokens", NormSum)
    squared_norm_sum = Statistic[Tensor]("[E]", "square of that norm, summed over its tokens", NormSum, power=2)
    gated_norm_sum = Statistic[Tensor]("[E]", "gate weight times the norm, summed over its tokens", NormSum, gated=True)
    squared_gate_sum = Statistic[Tensor]("[E]", "square of the gate weight, summed over its tokens", GateSum, power=2)
    squared_gate_output_sum = Statistic[Tensor](
        "[E, H]", "square of the gate weight times the expert's output, summed over its tokens", SquaredGateOutputSum
    )
    squared_gated_norm_sum = Statistic[Tensor](
        "[E]", "square of gate weight times the norm, summed over its tokens", NormSum, gated=True, power=2
    )
    stream_energy_sum = Statistic[Tensor](
        "[E]",
        "that square over the squared norm of the token's hidden state behind the decoder layer, summed alike",
        StreamEnergySum,
    )
    inputs = Statistic[Tensor]("[S, H]", "inputs of the experts at the sampled tokens", CallSample, part="hidden")
    router_logits = Statistic[Tensor]("[S, E]", "router logits there", RouterLogits)
    top_k_index = Statistic[Tensor]("[S, K]", "experts chosen there", CallSample, part="index")
    top_k_weights = Statistic[Tensor]("[S, K]", "their gate weights", CallSample, part="weights")
    router_arguments = Statistic[RouterArguments](
        "", "positional and by keyword, what the router was called with there", RouterArgumentsSample
    )
    expert_outputs = Statistic[Tensor]("[E, S, H]", "every expert's output there", ExpertOutputs)
    mixed_outputs = Statistic[Tensor](
        "[E, S, H]", "every expert's output on random mixtures of those inputs", ExpertOutputs, mixed=True
    )
    weights = Statistic[LayerWeights]("", "the layer's live experts and router modules, to be read only", Weights)
    heldout = Statistic["LayerStatistics"](
        "", "statistics of calibration tokens that no other statistic saw, enough to reconstruct the layer's output"
    )
    rank_change = Statistic[Tensor](
        "[E]",
        "AARV: places by which the ranks of later routers' chosen experts change without the expert, on average over "
        "all tokens, summed over those routers; 0 where there are none",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))

    def adding(self, **values: Any) -> "LayerStatistics":
        return replace(self, values={**self.values, **values})


STATISTICS = {name: value for name, value in vars(LayerStatistics).items() if isinstance(value, Statistic)}
ALL = frozenset(STATISTICS)


def _measured_by(kind: type[Meter]) -> frozenset[str]:
    return frozenset(name for name, each in STATISTICS.items() if each.meter and issubclass(each.meter, kind))


ROUTED_OUTPUTS = frozenset[str]().union(
    *map(_measured_by, (NormSum, StreamEnergySum, SquaredGateOutputSum))
)  # need every output: a slower forward
ROUTED = _measured_by(Sum) - ROUTED_OUTPUTS
DENSE = _measured_by(ExpertOutputs)
SAMPLED = _measured_by(Sample) - DENSE
WEIGHTS = _measured_by(Weights)
HELDOUT, ATTRIBUTED = frozenset({"heldout"}), frozenset({"rank_change"})  # measured on other tokens, over all layers
RECONSTRUCTION = frozenset(
    {"inputs", "router_arguments", "top_k_index", "top_k_weights", "expert_outputs", "weights"}
)  # what the output of a planned layer can be computed from


def check_needs(needs: frozenset[str], strategy: str) -> None:
    """Refuse a need that nobody can measure, before anything is read."""
    if unknown := sorted(needs - ALL):
        raise CompressionError(
            f"strategy {strategy!r} needs the statistic {unknown[0]!r}, which does not exist; known are "
            f"{', '.join(sorted(ALL))}"
        )


class Collector:
    """Has the meters of `needs` observe one layer while batches pass it."""

    def __init__(self, layer: MoeLayer, model: Any, needs: frozenset[str], seed: int) -> None:
        self.layer, self.model, self.needs, self.seed = layer, model, needs - HELDOUT - ATTRIBUTED, seed
        self.tokens = 0
        experts, router, block = (model.get_submodule(name) for name in (layer.name, layer.router, layer.block))
        observed = Observed(layer, experts, router, block, seed)
        self.meters = {
            name: each.meter(observed, **each.options)
            for name, each in STATISTICS.items()
            if name in self.needs and each.meter is not None
        }
        self.watch = Watch(
            model,
            layer,
            on_router=self._router_ran,
            on_experts=self._experts_called,
            on_expert_output=self._expert_ran if self.needs & ROUTED_OUTPUTS else None,
        )

    def enter(self, tokens: int, rows: Tensor, batch: int = 0) -> None:
        """Observe the batch of this number, of whose `tokens` those at `rows` [s] are sampled."""
        self.batch = batch, tokens, rows
        self.watch.attach()

    def detach(self) -> None:
        self.watch.detach()

    def _rows(self, tokens: int) -> tuple[int, Tensor]:
        """The current batch and its sampled rows; none where the layer sees other tokens than the calibration's."""
        batch, size, rows = self.batch
        return batch, rows if tokens == size else torch.arange(0)

    def _experts_called(self, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        if hidden.numel() == 0:
            return
        if not bool(torch.isfinite(hidden.sum(dtype=torch.float32))) and not bool(torch.isfinite(hidden).all()):
            raise CompressionError(
                f"{self.layer.name}: its inputs are not finite on the calibration data; try --dtype float32"
            )
        self.tokens += len(hidden)
        call = ExpertsCall(*self._rows(len(hidden)), hidden, index, weights)
        for meter in self.meters.values():
            meter.experts_called(call)

    def _router_ran(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
        logits = output[0].detach().reshape(-1, output[0].shape[-1]).float()
        if len(logits) and bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < 1e-2).all()):
            logits = logits.clamp(min=torch.finfo(torch.float32).tiny).log()  # they are probabilities: same softmax
        call = RouterCall(*self._rows(len(logits)), logits, as_arguments(args, kwargs))
        for meter in self.meters.values():
            meter.router_called(call)

    def _expert_ran(self, expert: int, rows: Tensor, weights: Tensor, outputs: Tensor) -> None:
        norms = as_float64(outputs).norm(dim=-1)
        for meter in self.meters.values():
            meter.expert_ran(expert, rows, weights, norms, outputs)

    def came_out(self, hidden: Tensor) -> None:
        """The decoder layer has put out the batch's hidden states [B, L, H]."""
        for meter in self.meters.values():
            meter.came_out(hidden)

    def absorb(self, other: Self, scale: float = 1.0) -> None:
        """Take in what another collector of the same layer has seen, its sums times `scale`."""
        self.tokens += other.tokens
        for name, meter in self.meters.items():
            meter.absorb(other.meters[name], scale)

    def gather(self) -> None:
        """Add up the sums of all ranks, and bring their samples together in the order of the batches."""
        self.tokens = int(here().all_reduce(torch.tensor(self.tokens)))
        samples = {name: meter for name, meter in self.meters.items() if isinstance(meter, Sample)}
        parts = {name: meter.parts for name, meter in samples.items()}
        device = self.model.get_submodule(self.layer.name).down_proj.device
        ranks = here().all_gather(parts)
        for name, sample in samples.items():
            others = [rank[name] for number, rank in enumerate(ranks) if number != here().rank]
            sample.parts += tree_map_only(Tensor, lambda value: value.to(device), list(chain(*others)))
            sample.parts.sort(key=itemgetter(0))
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


def combined(collectors: Mapping[int, Collector], shares: Sequence[float]) -> Collector:
    """One collector that has seen what those of all sources have, sums weighted to each source's share of tokens."""
    first, *others = collectors.values()
    if not others:
        return first
    whole = Collector(first.layer, first.model, first.needs, first.seed)
    tokens, total = sum(each.tokens for each in collectors.values()), sum(shares[source] for source in collectors)
    for source, collector in collectors.items():
        whole.absorb(collector, shares[source] / total * tokens / max(collector.tokens, 1))
    return whole


def smaller_routers(architecture: Architecture) -> Routers:
    """Router modules of the models with fewer experts, each such model built once, on meta."""
    built = cache(lambda count: build_meta(architecture.with_experts(count), torch.float32))
    return lambda layer, count: built(count).get_submodule(layer.router)


class Observers:
    """One layer's collectors: one for each source's tokens, and one for those held out of each, where needed."""

    def __init__(
        self,
        model: OpenModel,
        layer: MoeLayer,
        needs: frozenset[str],
        calibration: Calibration,
        routers: Routers,
        seed: int,
        per_source: bool = False,
    ) -> None:
        self.model, self.layer, self.needs, self.routers = model.partial.model, layer, needs, routers
        self.shares, self.seed, self.per_source = calibration.weights, seed, per_source
        self.observing: Collector | None = None
        self.parts = [
            (calibration.source_of(number), number in calibration.heldout) for number in range(len(calibration.batches))
        ]
        self.rows: dict[int, tuple[int, Tensor]] = {}  # of each batch its number of tokens, and which are sampled
        self.collectors = dict[Part, Collector]()
        for part in sorted(set(self.parts)):
            source, heldout = part
            numbers = [number for number, own in enumerate(self.parts) if own == part]
            sizes = [calibration.batches[number].numel() for number in numbers]
            rows = sample_rows(sizes, round(SAMPLE_TOKENS * self.shares[source]), seed)
            self.rows.update(zip(numbers, zip(sizes, rows, strict=True), strict=True))
            self.collectors[part] = Collector(layer, self.model, RECONSTRUCTION if heldout else needs, seed)

    def enter(self, batch: int) -> None:
        """The batch of this number is about to run: observe it."""
        self.detach()
        part = self.parts[batch]
        if not part[1] or self.needs & HELDOUT:
            self.observing = self.collectors[part]
            self.observing.enter(*self.rows[batch], batch)

    def came_out(self, hidden: Tensor) -> None:
        """The decoder layer has put out the batch's hidden states [B, L, H]."""
        if self.observing is not None:
            self.observing.came_out(hidden)

    def detach(self) -> None:
        self.observing = None
        for collector in self.collectors.values():
            collector.detach()

    def finish(self) -> LayerStatistics:
        """The statistics of the layer, with the held-out tokens' among them where they are needed.

        Of several ranks the first has them, of the batches of all; the others get the bare layer.
        """
        self.detach()
        if not here().is_alone:
            for collector in self.collectors.values():
                collector.gather()
            if not here().is_first:
                return LayerStatistics(self.layer, seed=self.seed)
        smaller = partial(self.routers, self.layer)
        fit, held = (
            {source: collector for (source, other), collector in self.collectors.items() if other is heldout}
            for heldout in (False, True)
        )
        measured = self.needs & HELDOUT
        heldout = combined(held, self.shares).finish(smaller) if measured else None
        whole = combined(fit, self.shares)
        several = self.per_source and len(fit) > 1
        own = {n: held[n].finish(smaller) for n in held} if several and measured and len(held) > 1 else {}
        parts = tuple(fit[n].finish(smaller, own.get(n, heldout)) for n in fit) if several else ()
        return whole.finish(smaller, heldout, parts)


def collect(
    model: OpenModel,
    needs: frozenset[str],
    calibration: Calibration | None,
    progress: Progress,
    seed: int = 0,
    per_source: bool = False,
    end: LayerVisitor | None = None,
) -> Iterator[LayerStatistics]:
    """Statistics of every MoE layer in order, each valid until the next is asked for; one layer is in memory at a time.

    Needs that are met by weights alone load the experts and run nothing. `per_source` keeps each calibration source's
    own statistics too. For the sake of a visitor `end` the batches go on to the model's output.
    """
    routers = smaller_routers(model.architecture)
    if calibration is None:
        if needs - WEIGHTS:
            raise CompressionError("this strategy needs calibration data; pass --calibration")
        yield from _from_weights(model, needs, routers, progress, seed)
        return
    if needs & HELDOUT and not calibration.heldout:
        raise CompressionError("this strategy needs held-out calibration tokens, and none were held out")
    watching = _Watching(lambda layer: Observers(model, layer, needs, calibration, routers, seed, per_source))
    to_end, batches = end is not None, calibration.batches
    one = Pass(model, batches, progress, "calibrate and plan", seed, to_end=to_end, shared=True)
    with closing(one.layers(watching, *([end] if end else []))) as passed:
        try:
            for _ in passed:
                for seen in watching.active:
                    yield seen.finish()
                watching.active = []  # before their layer's memory is given back
        finally:
            for seen in watching.active:
                seen.detach()


def _from_weights(
    model: OpenModel, needs: frozenset[str], routers: Routers, progress: Progress, seed: int
) -> Iterator[LayerStatistics]:
    layers = model.architecture.layers
    if not here().is_first:
        yield from (LayerStatistics(layer, seed=seed) for layer in layers)
        return
    progress.start("plan", len(layers))
    for layer in layers:
        model.partial.load(tensor.key for tensor in layer.tensors if tensor.key.startswith(f"{layer.name}."))
        collector = Collector(layer, model.partial.model, needs, seed)
        try:
            yield collector.finish(partial(routers, layer))
        finally:
            model.partial.release(layer.block)
            give_back()
        progress.advance(layer.name)


class _Watching(LayerVisitor):
    def __init__(self, observers: Callable[[MoeLayer], Observers]) -> None:
        self.observers, self.active = observers, list[Observers]()

    def loaded(self, unit: str) -> None:
        self.active = [self.observers(layer) for layer in self.at.moe_layers]

    def entering(self, batch: int) -> None:
        for observers in self.active:
            observers.enter(batch)

    def came_out(self, output: Any) -> None:
        for observers in self.active:
            observers.came_out(hidden_of(output))
