"""Meters, each of which computes a statistic from the batches that pass an MoE layer.

T tokens of a batch, S sampled ones, E experts, K top-k, H hidden, I neurons of an expert.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.model.architecture import another_top_k
from compressor.model.experts import apply_expert, expert_parameters, intermediate, routed, width_of
from compressor.model.moe_layer import MoeLayer
from compressor.model.streaming import TINY, as_call, stream_weights, token_dim

NORMALISED = 1e-3  # share by which one expert more changes the weights of others where these are normalised

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
    """The arguments of a router's calls at the sampled tokens."""

    positional: tuple[Any, ...] = ()
    by_keyword: Mapping[str, Any] = field(default_factory=dict)
    dims: Mapping[int | str, int | None] = field(default_factory=dict)  # which dimension counts tokens, if one does

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_keyword", MappingProxyType(dict(self.by_keyword)))


@dataclass(frozen=True, slots=True)
class Observed(LayerWeights):
    """The observed layer; `smaller_router` is None if weights are not needed."""

    layer: MoeLayer
    config: Any
    seed: int
    sources: int  # of text, whose sums are kept apart until the end


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """A call of the experts: hidden [T, H], index and weights [T, K], 0 for a skip expert; `rows` [s] are sampled.

    `media` [T] says which tokens stand for pictures, video or sound.
    """

    batch: tuple[int, int]  # source and number
    rows: Tensor
    hidden: Tensor
    index: Tensor
    weights: Tensor
    media: Tensor


@dataclass(frozen=True, slots=True)
class RouterCall:
    """A call of the router: logits [T, E or more], its arguments, each after a keyword or None, and sampled `rows`."""

    batch: tuple[int, int]  # source and number
    rows: Tensor
    logits: Tensor
    arguments: tuple[tuple[str | None, Any], ...]


class Meter:
    """Measures one statistic of a layer."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed

    def begin(self, source: int) -> None:
        """Expect a batch of this source of text."""

    def experts_called(self, call: ExpertsCall) -> None:
        """Observe a batch before it passes the experts."""

    def router_called(self, call: RouterCall) -> None:
        """Observe a batch that has passed the router."""

    def expert_ran(self, expert: int, rows: Tensor, weights: Tensor, norms: Tensor, outputs: Tensor) -> None:
        """Observe an expert's `outputs` [n, H], in the computing dtype, for the tokens `rows` [n].

        Their gate weights are [n], and the L2 norms of the outputs [n].
        """

    def on_layer_output(self, hidden: Tensor) -> None:
        """Take the batch's hidden states [B, L, H] behind the decoder layer."""

    def all_reduce(self) -> None:
        """Bring together the sums and samples of all ranks."""

    def combine(self, scales: Sequence[float]) -> None:
        """Add up the sums of all sources, each times its scale, and put samples in the order of sources and batches."""

    def finish(self) -> Any:
        """Return the value of the statistic."""
        raise NotImplementedError


class Sum(Meter):
    """A sum for each expert, [E] or [E, width], over all tokens."""

    def __init__(self, observed: Observed, *width: int) -> None:
        super().__init__(observed)
        self.totals = torch.zeros(observed.sources, observed.layer.experts, *width, dtype=torch.float64)
        self.total = self.totals[0]  # of the batch's source: a view

    def begin(self, source: int) -> None:
        self.total = self.totals[source]

    def all_reduce(self) -> None:
        self.totals = ranks().all_reduce(self.totals)

    def combine(self, scales: Sequence[float]) -> None:
        self.total = torch.zeros_like(self.totals[0])
        for scale, total in zip(scales, self.totals, strict=True):
            self.total += scale * total

    def finish(self) -> Tensor:
        return self.total


class GateSum(Sum):
    """Gate weights to a power; power 0 counts the tokens."""

    def __init__(self, observed: Observed, power: int = 1) -> None:
        super().__init__(observed)
        self.power = power

    def experts_called(self, call: ExpertsCall) -> None:
        used = call.weights != 0
        index = call.index[used].cpu()
        weights = call.weights[used].cpu().double()
        self.total += torch.zeros_like(self.total).index_add_(0, index, weights**self.power)


class ModalityCount(Sum):
    """Tokens of text, and of pictures, video or sound."""

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed, 2)

    def experts_called(self, call: ExpertsCall) -> None:
        used = (call.weights != 0).cpu()
        kinds = call.media[:, None].expand_as(used)[used].long()
        index = call.index.cpu()[used]
        ones = torch.ones(len(index), dtype=torch.float64)
        self.total += torch.zeros_like(self.total).index_put_((index, kinds), ones, accumulate=True)


class ProbabilitySum(Sum):
    """Softmax of the router's logits."""

    def router_called(self, call: RouterCall) -> None:
        shares = as_float64(call.logits.softmax(-1)).sum(0)
        self.total += shares[: len(self.total)].cpu()


class NormSum(Sum):
    """L2 norms of the outputs, times the gate weights if `gated`, to a power."""

    def __init__(self, observed: Observed, gated: bool = False, power: int = 1) -> None:
        super().__init__(observed)
        self.gated = gated
        self.power = power

    def expert_ran(self, expert: int, rows: Tensor, weights: Tensor, norms: Tensor, outputs: Tensor) -> None:
        values = as_float64(weights) * norms if self.gated else norms[as_float64(weights) != 0]
        self.total[expert] += (values**self.power).sum().cpu()


class StreamEnergySum(Sum):
    """Squared norms of gated outputs, relative to the token's hidden state after the decoder layer."""

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        self.tokens = 0
        self.waiting = list[tuple[int, Tensor, Tensor]]()  # an expert, its tokens, their energies

    def experts_called(self, call: ExpertsCall) -> None:
        self.tokens = len(call.hidden)

    def expert_ran(self, expert: int, rows: Tensor, weights: Tensor, norms: Tensor, outputs: Tensor) -> None:
        self.waiting.append((expert, rows, (as_float64(weights) * norms).square()))

    def on_layer_output(self, hidden: Tensor) -> None:
        if not self.waiting:
            return
        weights = stream_weights(hidden, self.tokens)
        for expert, rows, energies in self.waiting:
            self.total[expert] += (energies * weights[rows.to(weights.device)]).sum().cpu()
        self.waiting = []


class SquaredGateOutputSum(Sum):
    """Outputs times the square of their gate weights."""

    def __init__(self, observed: Observed) -> None:
        down = observed.experts.down_proj
        turned = observed.experts.is_transposed
        super().__init__(observed, down.shape[2 if turned else 1])

    def expert_ran(self, expert: int, rows: Tensor, weights: Tensor, norms: Tensor, outputs: Tensor) -> None:
        self.total[expert] += (as_float64(weights).square() @ as_float64(outputs)).cpu()


class SquaredNeuronSum(Sum):
    """Squares of what the down projection gets from each neuron, times the gate weight: [E, I]."""

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed, width_of(observed.experts))

    @torch.no_grad()
    def experts_called(self, call: ExpertsCall) -> None:
        experts = self.observed.experts
        for expert, rows, choices in routed(call.weights, call.index):
            activations = intermediate(experts, expert_parameters(experts, expert), call.hidden[rows])
            gated = as_float64(activations) * as_float64(call.weights[rows, choices, None])
            self.total[expert] += gated.square().sum(0).cpu()


class TokenSum(Sum):
    """A sum that needs all outputs of a token at once; those of a batch are kept until its end."""

    def __init__(self, observed: Observed, *width: int) -> None:
        super().__init__(observed, *width)
        self.call: ExpertsCall | None = None
        self.outputs = torch.zeros(0)

    def experts_called(self, call: ExpertsCall) -> None:
        self.call = call
        self.outputs = torch.zeros(*call.index.shape, call.hidden.shape[-1], device=call.hidden.device)

    def expert_ran(self, expert: int, rows: Tensor, weights: Tensor, norms: Tensor, outputs: Tensor) -> None:
        assert self.call is not None
        self.outputs[(self.call.index == expert).nonzero(as_tuple=True)] = outputs.float()

    def on_layer_output(self, hidden: Tensor) -> None:
        if self.call is not None and len(self.call.hidden):
            self.add(self.call, self.outputs)
        self.call = None
        self.outputs = torch.zeros(0)

    def add(self, call: ExpertsCall, outputs: Tensor) -> None:
        """Add a batch's tokens: `outputs` [T, K, H] of the chosen experts in float32, before their gate weights."""
        raise NotImplementedError


class PairSum(TokenSum):
    """[E, E] of the tokens that chose both experts: their number, or products of gated norms or gated outputs."""

    def __init__(self, observed: Observed, of: Literal["tokens", "norms", "outputs"]) -> None:
        super().__init__(observed, observed.layer.experts)
        self.of = of

    def add(self, call: ExpertsCall, outputs: Tensor) -> None:
        gated = outputs * call.weights[..., None].float()
        if self.of == "outputs":
            products = as_float64(gated @ gated.mT)
        else:
            used = as_float64(call.weights) != 0
            sizes = as_float64(gated).norm(dim=-1) if self.of == "norms" else used.to(torch.float64)
            products = sizes[:, :, None] * sizes[:, None]
        pairs = call.index[:, :, None] * len(self.total) + call.index[:, None]
        sums = torch.zeros(self.total.numel(), dtype=torch.float64, device=products.device)
        sums.index_add_(0, pairs.flatten().to(products.device), products.flatten())
        self.total += sums.view_as(self.total).cpu()


class DeletionSum(TokenSum):
    """||y - y'||^2 of deleting each expert over its tokens: y' is what they get when the router takes its next expert.

    The next one, and how gate weights share what is left, are those of the live router asked for one expert more. With
    g the gate weights of the chosen experts, g_r that of the next on their scale and s the sum of g, y' is
    s / (s - g_e + g_r) (y - g_e f_e + g_r f_r) where weights are normalised over what is chosen, else without the
    factor. Where there is no next expert, g_r is 0.
    """

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        self.routed: RouterCall | None = None

    def router_called(self, call: RouterCall) -> None:
        self.routed = call

    def add(self, call: ExpertsCall, outputs: Tensor) -> None:
        gates = call.weights.float()
        index = call.index
        whole = gates.sum(1, keepdim=True)
        total = (gates[..., None] * outputs).sum(1)
        following, weight, normalised = self._next(call)
        refill = torch.zeros_like(total)
        experts = self.observed.experts
        for expert, rows, _ in routed(weight[:, None], following[:, None]):
            refill[rows] = apply_expert(experts, expert_parameters(experts, expert), call.hidden[rows]).float()
        refill *= weight[:, None]
        changed = total[:, None] - gates[..., None] * outputs + refill[:, None]
        left = whole - gates + weight[:, None]
        scale = torch.where(left.abs() > TINY, whole / left, 1.0) if normalised else torch.ones_like(gates)
        damage = as_float64(total[:, None] - scale[..., None] * changed).square().sum(-1)
        used = gates != 0
        self.total.index_add_(0, index[used].cpu(), damage[used.to(damage.device)].cpu())

    @torch.no_grad()
    def _next(self, call: ExpertsCall) -> tuple[Tensor, Tensor, bool]:
        """Return each token's next expert [T], its gate weight [T] beside those in use, and `normalised`."""
        tokens, top_k = call.index.shape
        none = torch.zeros(tokens, dtype=torch.long, device=call.index.device)
        nothing = none, none.float(), False
        observed = self.observed
        if self.routed is None or observed.layer.experts <= top_k:
            return nothing
        positional, by_keyword = as_call(self.routed.arguments)
        with another_top_k(observed.router, observed.block, observed.config, top_k + 1):
            output = observed.router.forward(*positional, **by_keyword)  # past the hooks of those who watch
        weights, index = (part.reshape(-1, part.shape[-1]) for part in output[1:3])
        if index.shape != (tokens, top_k + 1):  # a router that looks its experts up
            return nothing
        added = (index[:, :, None] != call.index[:, None]).all(-1)
        slot = added.int().argmax(1, keepdim=True)
        following = index.gather(1, slot)[:, 0].long()
        weight = weights.float().gather(1, slot)[:, 0]
        before = call.weights.float().sum(1)
        after = weights.float().sum(1) - weight
        known = (added.sum(1) == 1) & (following < observed.layer.experts) & weight.isfinite()
        normalised = bool(((after - before).abs()[known] > NORMALISED * before.abs()[known]).any())
        if normalised:
            weight = weight * before / after.masked_fill(after == 0, 1.0)
        return following.where(known, 0), weight.where(known, 0), normalised


class Sample(Meter):
    """A statistic of the sampled tokens."""

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        self.parts: list[tuple[tuple[int, int], Any]] = []  # by batch

    def all_reduce(self) -> None:
        device = self.observed.experts.down_proj.device
        for rank, parts in enumerate(ranks().all_gather(self.parts)):
            if rank != ranks().rank:
                self.parts += tree_map_only(Tensor, lambda value: value.to(device), parts)

    def combine(self, scales: Sequence[float]) -> None:
        self.parts.sort(key=itemgetter(0))

    def take(self, call: ExpertsCall | RouterCall, value: Tensor) -> None:
        """Keep the sampled rows of a tensor [T, ...]."""
        if call.rows.numel():
            self.parts.append((call.batch, value[call.rows.to(value.device)].detach()))

    def joined(self, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return all rows [S, width]; none if no sampled token reached the layer."""
        parts = [part for _, part in self.parts] or [torch.zeros(0, width)]
        device = parts[0].device  # orders are on the CPU, except those of other ranks
        return torch.cat([part.to(device, dtype) for part in parts])


class CallSample(Sample):
    """The arguments of the experts' calls: a `part` of an `ExpertsCall`."""

    def __init__(self, observed: Observed, part: str) -> None:
        super().__init__(observed)
        self.part = part

    def experts_called(self, call: ExpertsCall) -> None:
        self.take(call, getattr(call, self.part))

    def finish(self) -> Tensor:
        dtype = torch.long if self.part == "index" else torch.float32
        return self.joined(1 if self.part == "hidden" else self.observed.layer.top_k, dtype)


class RouterLogits(Sample):
    """The router's logits."""

    def router_called(self, call: RouterCall) -> None:
        self.take(call, call.logits[:, : self.observed.layer.experts])

    def finish(self) -> Tensor:
        return self.joined(self.observed.layer.experts)


class RouterOrders(Sample):
    """The experts of every token in the order of the router's logits, 2 bytes each."""

    def router_called(self, call: RouterCall) -> None:
        order = call.logits[:, : self.observed.layer.experts].argsort(dim=-1, descending=True, stable=True)
        self.parts.append((call.batch, order.to(torch.int16).cpu()))

    def finish(self) -> Tensor:
        return self.joined(self.observed.layer.experts, torch.int16)


class RouterArgumentsSample(Sample):
    """The arguments of the router's calls."""

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        block = observed.block
        self.owned = {id(value) for value in (*block.parameters(), *block.buffers())}  # no reference: it must be freed

    def router_called(self, call: RouterCall) -> None:
        if call.rows.numel():
            arguments = [(name, *self._rows(value, len(call.logits), call.rows)) for name, value in call.arguments]
            self.parts.append((call.batch, arguments))

    def _rows(self, value: Any, tokens: int, rows: Tensor) -> tuple[int | None, Any]:
        """Return a router argument's dimension of tokens and sampled rows: [S, ...] of [T, ...], or [1, S, ...].

        An argument that does not go by tokens, such as a bias held by the parent block, comes back as it is with None.
        """
        dim = None if id(value) in self.owned else token_dim(value, tokens)
        if dim is None:
            return None, value
        by_token = value if dim == 0 else value.flatten(0, 1)
        taken = by_token[rows.to(value.device)].detach().clone()
        return dim, taken if dim == 0 else taken[None]

    def finish(self) -> RouterArguments:
        joined = list[tuple[str | None, Any]]()
        dims = dict[int | str, int | None]()
        calls = [arguments for _, arguments in self.parts]
        for position, (name, dim, first) in enumerate(calls[0] if calls else ()):
            values = [arguments[position][2] for arguments in calls]
            joined.append((name, first if dim is None else torch.cat(values, dim)))
            dims[position if name is None else name] = dim
        return RouterArguments(*as_call(joined), dims)


class ExpertOutputs(Sample):
    """The outputs of all experts, on the sampled inputs or on random mixtures of them."""

    def __init__(self, observed: Observed, mixed: bool = False) -> None:
        super().__init__(observed)
        self.mixed = mixed

    def experts_called(self, call: ExpertsCall) -> None:
        self.take(call, call.hidden)

    @torch.no_grad()
    def finish(self) -> Tensor:
        experts = self.observed.experts
        count = self.observed.layer.experts
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
    """Mix each token [S, H] with another one in random proportion (section 3.4 of arXiv:2407.09590)."""
    generator = torch.Generator().manual_seed(seed)
    partner = torch.randperm(len(hidden), generator=generator).to(hidden.device)
    share = torch.rand(len(hidden), 1, generator=generator).to(hidden.device)
    mixed = share * hidden.float() + (1 - share) * hidden[partner].float()
    return mixed.to(hidden.dtype)


class Weights(Meter):
    """The live modules, without a batch."""

    def finish(self) -> LayerWeights:
        return self.observed
