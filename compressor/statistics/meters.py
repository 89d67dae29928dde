"""Meters measure the statistics of an MoE layer; `LayerStatistics` lists which one measures what.

A meter sees every batch that passes the layer and in the end gives its statistic. Sums run over all tokens that the
router sent to an expert and are float64. Samples are of some of the tokens, S of them, kept as they were seen: float32,
or in the computing dtype where experts are to be run on them. The gate weight is the one that really multiplies an
expert's output. T tokens of a batch, E experts, K top-k, H hidden.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from compressor.distributed import here
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

    def expert_ran(self, expert: int, weights: Tensor, norms: Tensor, outputs: Tensor) -> None:
        """An expert returned `outputs` [n, H], in the computing dtype, with gate weights [n] and L2 norms [n]."""

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
        sums = torch.zeros(len(self.total), dtype=torch.float64, device=call.hidden.device)
        used = call.weights != 0
        self.total += sums.index_add_(0, call.index[used], call.weights[used].double() ** self.power).cpu()


class ProbabilitySum(Sum):
    """Softmax of the router's logits."""

    def router_called(self, call: RouterCall) -> None:
        if len(call.logits):
            shares = call.logits.softmax(-1).sum(0, dtype=torch.float64)
            self.total += shares[: len(self.total)].cpu()


class NormSum(Sum):
    """L2 norms of the outputs, times the gate weights if `gated`, to a power."""

    def __init__(self, observed: Observed, gated: bool = False, power: int = 1) -> None:
        super().__init__(observed)
        self.gated, self.power = gated, power

    def expert_ran(self, expert: int, weights: Tensor, norms: Tensor, outputs: Tensor) -> None:
        values = weights.double() * norms if self.gated else norms[weights != 0]
        self.total[expert] += (values**self.power).sum().cpu()


class SquaredGateOutputSum(Sum):
    """Outputs times the square of their gate weights."""

    def __init__(self, observed: Observed) -> None:
        down, turned = observed.experts.down_proj, observed.experts.is_transposed
        super().__init__(observed, down.shape[2 if turned else 1])

    def expert_ran(self, expert: int, weights: Tensor, norms: Tensor, outputs: Tensor) -> None:
        self.total[expert] += (weights.double().square() @ outputs.double()).cpu()


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
