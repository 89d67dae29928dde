"""Meters: how each statistic of an MoE layer is measured, with its shape and meaning; a class is all there is to one.

A meter sees every batch that passes the layer and in the end gives its statistic. Sums run over all tokens that the
router sent to an expert and are float64. Samples are of some of the tokens, S of them, kept as they were seen: float32,
or in the computing dtype where experts are to be run on them. The gate weight is the one that really multiplies an
expert's output. T tokens of a batch, E experts, K top-k, H hidden.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from compressor.distributed.ranks import here
from compressor.model.architecture import MoeLayer
from compressor.model.experts import apply_expert, expert_parameters
from compressor.model.streaming import as_call, token_dim

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
    """What a router was called with at the sampled tokens; unpacks into (positional, by keyword)."""

    positional: tuple[Any, ...] = ()
    by_keyword: Mapping[str, Any] = field(default_factory=dict)
    dims: Mapping[int | str, int | None] = field(default_factory=dict)  # which dimension counts tokens, if one does

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_keyword", MappingProxyType(dict(self.by_keyword)))

    def __iter__(self) -> Iterator[Any]:
        yield self.positional
        yield self.by_keyword


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
    """What a batch handed to the experts: hidden [T, H], index and weights [T, K]; `rows` [s] are sampled."""

    hidden: Tensor
    index: Tensor
    weights: Tensor
    rows: Tensor

    @property
    def used(self) -> Tensor:
        """Which choices [T, K] name an expert: a skip expert is handed on as index 0 with weight 0."""
        return self.weights != 0


@dataclass(frozen=True, slots=True)
class RouterCall:
    """A batch's router call: logits [T, E and maybe more], all its arguments by keyword or None; `rows` are sampled."""

    logits: Tensor
    arguments: tuple[tuple[str | None, Any], ...]
    rows: Tensor


class Meter:
    """Measures one statistic. `outputs` asks for the outputs of the experts, which takes a slower forward."""

    name: ClassVar[str]
    shape: ClassVar[str] = ""
    meaning: ClassVar[str]
    kind: ClassVar[str]
    outputs: ClassVar[bool] = False

    def __init__(self, observed: Observed) -> None:
        self.observed = observed

    def experts_called(self, call: ExpertsCall) -> None:
        """A batch is about to pass the experts."""

    def router_called(self, call: RouterCall) -> None:
        """A batch has passed the router."""

    def expert_ran(self, expert: int, weights: Tensor, norms: Tensor, outputs: Tensor) -> None:
        """An expert returned `outputs` [n, H], in the computing dtype, with gate weights [n] and L2 norms [n]."""

    def absorb(self, other: Self, scale: float) -> None:
        """Take in what another meter of the same layer has seen, its sums times `scale`."""

    def all_reduce(self) -> None:
        """Add up the sums of all ranks."""

    def samples(self) -> list[Tensor]:
        """Return the sampled tokens, for another rank to `restore`."""
        return []

    def restore(self, samples: list[Tensor], like: Self) -> None:
        """Append what another rank has sampled; `like` has watched the same layer here."""

    def finish(self, smaller_router: SmallerRouter) -> Any:
        """The statistic."""
        raise NotImplementedError


class _Sum(Meter):
    kind, shape = "routed", "[E]"

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        self.total = torch.zeros(observed.layer.experts, dtype=torch.float64)

    def absorb(self, other: Self, scale: float) -> None:
        self.total += scale * other.total

    def all_reduce(self) -> None:
        self.total = here().all_reduce(self.total)

    def finish(self, smaller_router: SmallerRouter) -> Tensor:
        return self.total


class RoutedCount(_Sum):
    name, meaning = "routed_count", "tokens sent to each expert"

    def experts_called(self, call: ExpertsCall) -> None:
        self.total += torch.bincount(call.index[call.used], minlength=len(self.total)).cpu()


class GateWeightSum(_Sum):
    name, meaning = "gate_weight_sum", "sum of gate weights over those tokens"
    power: ClassVar[int] = 1

    def experts_called(self, call: ExpertsCall) -> None:
        found = torch.zeros(len(self.total), dtype=torch.float64, device=call.hidden.device)
        weights = call.weights[call.used].double() ** self.power
        self.total += found.index_add_(0, call.index[call.used], weights).cpu()


class ProbabilitySum(_Sum):
    name = "probability_sum"
    meaning = "softmax of the router logits (over a skip expert too), summed over all tokens"

    def router_called(self, call: RouterCall) -> None:
        if len(call.logits):
            shares = call.logits.softmax(-1).sum(0, dtype=torch.float64)
            self.total += shares[: len(self.total)].cpu()


class NormSum(_Sum):
    name, meaning = "norm_sum", "L2 norm of the expert's output, summed over its tokens"
    kind, outputs = "routed outputs", True
    gated: ClassVar[bool] = False
    power: ClassVar[int] = 1

    def expert_ran(self, expert: int, weights: Tensor, norms: Tensor, outputs: Tensor) -> None:
        values = weights.double() * norms if self.gated else norms[weights != 0]
        self.total[expert] += (values**self.power).sum().cpu()


class SquaredNormSum(NormSum):
    name, meaning, power = "squared_norm_sum", "square of that norm, summed over its tokens", 2


class GatedNormSum(NormSum):
    name, meaning, gated = "gated_norm_sum", "gate weight times the norm, summed over its tokens", True


class SquaredGateSum(GateWeightSum):
    name, meaning, power = "squared_gate_sum", "square of the gate weight, summed over its tokens", 2


class SquaredGateOutputSum(_Sum):
    name, shape = "squared_gate_output_sum", "[E, H]"
    meaning = "square of the gate weight times the expert's output, summed over its tokens"
    kind, outputs = "routed outputs", True

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        down, turned = observed.experts.down_proj, observed.experts.is_transposed
        self.total = torch.zeros(observed.layer.experts, down.shape[2 if turned else 1], dtype=torch.float64)

    def expert_ran(self, expert: int, weights: Tensor, norms: Tensor, outputs: Tensor) -> None:
        self.total[expert] += (weights.double().square() @ outputs.double()).cpu()


class SquaredGatedNormSum(GatedNormSum):
    name, power = "squared_gated_norm_sum", 2
    meaning = "square of gate weight times the norm, summed over its tokens"


class Sample(Meter):
    """A statistic of the sampled tokens."""

    kind = "sampled"

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        self.parts: list[Any] = []

    def absorb(self, other: Self, scale: float) -> None:
        self.parts.extend(other.parts)

    def samples(self) -> list[Tensor]:
        return self.parts

    def restore(self, samples: list[Tensor], like: Self) -> None:
        device = self.observed.experts.down_proj.device
        self.parts += [value.to(device) for value in samples]

    def take(self, value: Tensor, rows: Tensor) -> None:
        """Keep these rows of a tensor [T, ...]."""
        if rows.numel():
            taken = value[rows.to(value.device)].detach()
            self.parts.append(taken.float() if taken.is_floating_point() else taken)

    def joined(self, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """All rows; of a layer that no sampled token reached, none, and so wide."""
        return torch.cat(self.parts) if self.parts else torch.zeros(0, width, dtype=dtype)


class _OfCalls(Sample):
    """A sample of what the experts are called with."""

    of: ClassVar[str]  # field of an `ExpertsCall`

    def experts_called(self, call: ExpertsCall) -> None:
        self.take(getattr(call, self.of), call.rows)

    def finish(self, smaller_router: SmallerRouter) -> Tensor:
        dtype = torch.long if self.of == "index" else torch.float32
        return self.joined(1 if self.of == "hidden" else self.observed.layer.top_k, dtype)


class Inputs(_OfCalls):
    name, shape, meaning, of = "inputs", "[S, H]", "inputs of the experts at the sampled tokens", "hidden"


class RouterLogits(Sample):
    name, shape, meaning = "router_logits", "[S, E]", "router logits there"

    def router_called(self, call: RouterCall) -> None:
        self.take(call.logits[:, : self.observed.layer.experts], call.rows)

    def finish(self, smaller_router: SmallerRouter) -> Tensor:
        return self.joined(self.observed.layer.experts)


class TopKIndex(_OfCalls):
    name, shape, meaning, of = "top_k_index", "[S, K]", "experts chosen there", "index"


class TopKWeights(_OfCalls):
    name, shape, meaning, of = "top_k_weights", "[S, K]", "their gate weights", "weights"


class RouterArgumentsThere(Sample):
    name, meaning = "router_arguments", "positional and by keyword, what the router was called with there"

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        block = observed.block
        self.own = {id(value) for value in (*block.parameters(), *block.buffers())}  # no reference: it must be freed
        self.last: list[tuple[str | None, int | None, Any]] = []  # of the last call, maybe of no rows

    def router_called(self, call: RouterCall) -> None:
        tokens = len(call.logits)
        self.last = [(name, *self._rows(value, tokens, call.rows)) for name, value in call.arguments]
        if call.rows.numel():
            self.parts.append(self.last)

    def absorb(self, other: Self, scale: float) -> None:
        super().absorb(other, scale)
        self.last = other.last or self.last

    def samples(self) -> list[Tensor]:
        return [value for part in self.parts for _, dim, value in part if dim is not None]

    def restore(self, samples: list[Tensor], like: Self) -> None:
        left, self.last = iter(samples), like.last
        width = sum(dim is not None for _, dim, _ in self.last)
        device = self.observed.experts.down_proj.device
        for _ in range(len(samples) // width if width else 0):
            self.parts.append(
                [(name, dim, value if dim is None else next(left).to(device)) for name, dim, value in self.last]
            )

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
        for place, column in enumerate(zip(*self.parts, strict=True)):
            (name, dim, first), values = column[0], [value for _, _, value in column]
            joined.append((name, first if dim is None else torch.cat(values, dim)))
            dims[place if name is None else name] = dim
        return RouterArguments(*as_call(joined), dims)


class ExpertOutputs(Sample):
    name, shape, meaning, kind = "expert_outputs", "[E, S, H]", "every expert's output there", "dense"

    def experts_called(self, call: ExpertsCall) -> None:
        if call.rows.numel():
            self.parts.append(call.hidden[call.rows.to(call.hidden.device)].detach())

    def inputs(self) -> Tensor:
        """What the experts are run on, [S, H]."""
        return torch.cat(self.parts)

    @torch.no_grad()
    def finish(self, smaller_router: SmallerRouter) -> Tensor:
        experts, count = self.observed.experts, self.observed.layer.experts
        if not self.parts:
            return torch.zeros(count, 0, 1)
        hidden = self.inputs()
        outputs = torch.empty(count, *hidden.shape, dtype=torch.float32, device=hidden.device)
        for expert in range(count):
            outputs[expert] = apply_expert(experts, expert_parameters(experts, expert), hidden)
        return outputs


class MixedOutputs(ExpertOutputs):
    name, meaning = "mixed_outputs", "every expert's output on random mixtures of those inputs"

    def inputs(self) -> Tensor:
        """What the experts are run on, [S, H]."""
        return mix_tokens(super().inputs(), self.observed.seed)


def mix_tokens(hidden: Tensor, seed: int) -> Tensor:
    """Tokens [S, H] -> [S, H], each mixed with another in random proportion: section 3.4 of arXiv:2407.09590."""
    generator = torch.Generator().manual_seed(seed)
    partner = torch.randperm(len(hidden), generator=generator).to(hidden.device)
    share = torch.rand(len(hidden), 1, generator=generator).to(hidden.device)
    mixed = share * hidden.float() + (1 - share) * hidden[partner].float()
    return mixed.to(hidden.dtype)


class Weights(Meter):
    name, kind, meaning = "weights", "weights", "the layer's live experts and router modules, to be read only"

    def finish(self, smaller_router: SmallerRouter) -> LayerWeights:
        return LayerWeights(self.observed.experts, self.observed.router, self.observed.block, smaller_router)


class Heldout(Meter):
    """Measured by a collector of its own, on other tokens."""

    name, kind = "heldout", "heldout"
    meaning = "statistics of calibration tokens that no other statistic saw, enough to reconstruct the layer's output"


class RankChange(Meter):
    """Measured by routing attribution, over the layers at once, where a strategy asks for it."""

    name, shape, kind = "rank_change", "[E]", "attributed"
    meaning = (
        "AARV: places by which the ranks of later routers' chosen experts change without the expert, on average over "
        "all tokens, summed over those routers; 0 where there are none"
    )


METERS: Mapping[str, type[Meter]] = {  # every class above that names a statistic, in the order of the table
    found.name: found
    for found in list(globals().values())
    if isinstance(found, type) and issubclass(found, Meter) and "name" in vars(found)
}


def statistics_table() -> list[tuple[str, str, str]]:
    """Name, shape ("" where there is none) and meaning of each statistic that a strategy may need."""
    return [(name, meter.shape, meter.meaning) for name, meter in METERS.items()]
