"""Meters, each of which computes a statistic from the batches that pass an MoE layer.

T tokens of a batch, S sampled ones, E experts, K top-k, H hidden, I neurons of an expert.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compressor.devices import as_float64, float64_device
from compressor.distributed import ranks
from compressor.frozen import frozen
from compressor.model.architecture import another_top_k
from compressor.model.experts import (
    CHUNK,
    Choices,
    apply_expert,
    expert_parameters,
    intermediate,
    observed_forward,
    split_choices,
    width_of,
)
from compressor.model.moe_layer import MoeLayer
from compressor.model.streaming import TINY, as_call, stream_weights, token_dim

# share by which one expert more changes the weights of others where these are normalised
NORMALISED = 1e-3

# (experts) -> the router module, on meta, of a model with that many
SmallerRouter = Callable[[int], Any]


@frozen
class LayerWeights:
    """The layer's own modules while it is loaded. Strategies read them; they never write."""

    experts: Any
    router: Any
    block: Any
    smaller_router: SmallerRouter


@frozen
class RouterArguments:
    """The arguments of a router's calls at the sampled tokens."""

    positional: tuple[Any, ...] = ()
    by_keyword: Mapping[str, Any] = field(default_factory=dict)
    # which dimension counts tokens, if one does
    dims: Mapping[int | str, int | None] = field(default_factory=dict)


@frozen
class Observed(LayerWeights):
    """The observed layer; `smaller_router` is None if weights are not needed."""

    layer: MoeLayer
    config: Any
    seed: int
    sources: int  # of text, whose sums are kept apart until the end


@frozen
class ExpertsCall:
    """A call of the experts: hidden [T, H], index and weights [T, K], 0 for a skip expert; `rows`
    [s] are sampled.

    `media` [T] says which tokens stand for pictures, video or sound.
    """

    batch: tuple[int, int]  # source and number
    rows: Tensor
    hidden: Tensor
    index: Tensor
    weights: Tensor
    media: Tensor


@frozen
class RouterCall:
    """A call of the router: logits [T, E or more], its arguments, each after a keyword or None, and
    sampled `rows`."""

    batch: tuple[int, int]  # source and number
    rows: Tensor
    logits: Tensor
    arguments: tuple[tuple[str | None, Any], ...]


class Meter:
    """Measures one statistic of a layer; its options are attributes."""

    def __init__(self, observed: Observed, **options: Any) -> None:
        self.observed = observed
        vars(self).update(options)

    def begin(self, source: int) -> None:
        """Expect a batch of this source of text."""

    def experts_called(self, call: ExpertsCall) -> None:
        """Observe a batch before it passes the experts."""

    def router_called(self, call: RouterCall) -> None:
        """Observe a batch that has passed the router."""

    def experts_ran(self, choices: Choices, norms: Tensor, outputs: Tensor) -> None:
        """Observe the experts' `outputs` [m, H], in the computing dtype, for choices of some tokens
        of a batch.

        `norms` [m] are the outputs' L2 norms.
        """

    def on_layer_output(self, hidden: Tensor) -> None:
        """Take the batch's hidden states [B, L, H] behind the decoder layer."""

    def all_reduce(self) -> None:
        """Bring together the sums and samples of all ranks."""

    def combine(self, scales: Sequence[float]) -> None:
        """Add up the sums of all sources, each times its scale, and put samples in the order of
        sources and batches."""

    def finish(self) -> Any:
        """Return the value of the statistic."""
        raise NotImplementedError

    def of_source(self, source: int) -> Any:
        """Return the value for one source's tokens, unweighted; samples are not kept by source."""
        return self.finish()


class Sum(Meter):
    """A sum for each expert, [E] or [E, width], over all tokens; on the device until the end."""

    def __init__(self, observed: Observed, *width: int, **options: Any) -> None:
        super().__init__(observed, **options)
        device = float64_device(observed.experts.down_proj.device)
        shape = observed.sources, observed.layer.experts, *width
        self.totals = torch.zeros(shape, dtype=torch.float64, device=device)
        self.total = self.totals[0]  # of the batch's source: a view

    def begin(self, source: int) -> None:
        self.total = self.totals[source]

    def add(self, places: Tensor, values: Tensor) -> None:
        """Add values [m, width] to the rows of these experts [m], or [m] to entries of the
        flattened sum."""
        values = as_float64(values)
        sums = torch.zeros_like(self.total).view(-1, *values.shape[1:])
        sums.index_add_(0, places.to(values.device), values)
        self.total += sums.view_as(self.total)

    def all_reduce(self) -> None:
        self.totals = ranks().all_reduce(self.totals.cpu())

    def combine(self, scales: Sequence[float]) -> None:
        totals = self.totals.cpu()
        self.total = torch.zeros_like(totals[0])
        for scale, total in zip(scales, totals, strict=True):
            self.total += scale * total

    def finish(self) -> Tensor:
        return self.total

    def of_source(self, source: int) -> Tensor:
        return self.totals[source].cpu()


class GateSum(Sum):
    """Gate weights to a power; power 0 counts the tokens."""

    power = 1

    def experts_called(self, call: ExpertsCall) -> None:
        weights = as_float64(call.weights.flatten())
        self.add(call.index.flatten(), weights**self.power * (weights != 0))


class ModalityCount(Sum):
    """Tokens of text, and of pictures, video or sound."""

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed, 2)

    def experts_called(self, call: ExpertsCall) -> None:
        places = 2 * call.index + call.media[:, None]
        self.add(places.flatten(), (call.weights != 0).flatten())


class ProbabilitySum(Sum):
    """Softmax of the router's logits."""

    def router_called(self, call: RouterCall) -> None:
        shares = as_float64(call.logits.softmax(-1)).sum(0)
        self.total += shares[: len(self.total)]


class NormSum(Sum):
    """L2 norms of the outputs, times the gate weights if `gated`, to a power."""

    gated = False
    power = 1

    def experts_ran(self, choices: Choices, norms: Tensor, outputs: Tensor) -> None:
        weights = as_float64(choices.weights)
        sizes = norms * (weights if self.gated else weights != 0)
        self.add(choices.experts, sizes**self.power)


class StreamEnergySum(Sum):
    """Squared norms of gated outputs, relative to the token's hidden state after the decoder
    layer."""

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        self.tokens = 0
        self.waiting = list[tuple[Choices, Tensor]]()  # with their energies [m]

    def experts_called(self, call: ExpertsCall) -> None:
        self.tokens = len(call.hidden)

    def experts_ran(self, choices: Choices, norms: Tensor, outputs: Tensor) -> None:
        self.waiting.append((choices, (as_float64(choices.weights) * norms).square()))

    def on_layer_output(self, hidden: Tensor) -> None:
        if not self.waiting:
            return
        weights = stream_weights(hidden, self.tokens)
        for choices, energies in self.waiting:
            self.add(choices.experts, energies * weights[choices.tokens.to(weights.device)])
        self.waiting = []


def _in_float64(choices: Choices, values: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield experts [n], gate weights [n, 1] and `values` [n, width] of 4,096 choices at a time,
    those in float64."""
    columns = (choices.experts, choices.weights[:, None], values)
    for experts, weights, part in zip(*(column.split(CHUNK) for column in columns), strict=True):
        yield experts, as_float64(weights), as_float64(part)


class SquaredGateOutputSum(Sum):
    """Outputs times the square of their gate weights."""

    def __init__(self, observed: Observed) -> None:
        down = observed.experts.down_proj
        turned = observed.experts.is_transposed
        super().__init__(observed, down.shape[2 if turned else 1])

    def experts_ran(self, choices: Choices, norms: Tensor, outputs: Tensor) -> None:
        for experts, weights, values in _in_float64(choices, outputs):
            self.add(experts, weights.square() * values)


class SquaredNeuronSum(Sum):
    """Squares of what the down projection gets from each neuron, times the gate weight: [E, I]."""

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed, width_of(observed.experts))

    @torch.no_grad()
    def experts_called(self, call: ExpertsCall) -> None:
        module = self.observed.experts
        parameters = expert_parameters(module)
        for choices in split_choices(call.weights, call.index, len(self.total)):
            neurons = intermediate(module, parameters, call.hidden[choices.tokens], choices)
            for experts, weights, values in _in_float64(choices, neurons):
                self.add(experts, (weights * values).square())


class TokenSum(Sum):
    """A sum that needs all outputs of a token at once."""

    top_k: int  # of the batch

    def experts_called(self, call: ExpertsCall) -> None:
        self.top_k = call.index.shape[1]

    def by_token(self, choices: Choices, values: Tensor) -> Tensor:
        """Return values [n K, ...] of choices by token and slot: [n, K, ...]."""
        ordered = values[choices.places.argsort().to(values.device)]
        return ordered.view(-1, self.top_k, *values.shape[1:])


class PairSum(TokenSum):
    """[E, E] of the tokens that chose both experts: their number, or products of gated norms or
    gated outputs."""

    of: Literal["tokens", "norms", "outputs"]

    def __init__(self, observed: Observed, **options: Any) -> None:
        super().__init__(observed, observed.layer.experts, **options)

    def experts_ran(self, choices: Choices, norms: Tensor, outputs: Tensor) -> None:
        if self.of == "outputs":
            gated = self.by_token(choices, outputs.float() * choices.weights.float()[:, None])
            products = gated @ gated.mT
        else:
            weights = as_float64(choices.weights)
            sizes = self.by_token(
                choices, (weights * norms).abs() if self.of == "norms" else (weights != 0).double()
            )
            products = sizes[:, :, None] * sizes[:, None]
        index = self.by_token(choices, choices.experts)
        pairs = index[:, :, None] * len(self.total) + index[:, None]
        self.add(pairs.flatten(), products.flatten())


class DeletionSum(TokenSum):
    """||y - y'||^2 of deleting each expert over its tokens: y' is what they get when the router
    takes its next expert.

    The next one, and how gate weights share what is left, are those of the live router asked for
    one expert more. With g the gate weights of the chosen experts, g_r that of the next on their
    scale and s the sum of g, y' is s / (s - g_e + g_r) (y - g_e f_e + g_r f_r) where weights are
    normalised over what is chosen, else without the factor. Where there is no next expert, g_r is
    0."""

    routed: RouterCall | None = None
    weight: Tensor  # [T] gate weights of the batch's next experts
    refill: Tensor  # [T, H] their outputs times these
    normalised: Tensor  # []

    def router_called(self, call: RouterCall) -> None:
        self.routed = call

    @torch.no_grad()
    def experts_called(self, call: ExpertsCall) -> None:
        super().experts_called(call)
        tokens, top_k = call.index.shape
        following = torch.zeros(tokens, dtype=torch.long, device=call.index.device)
        self.weight = following.float()
        self.normalised = following.new_zeros((), dtype=torch.bool)
        self.refill = torch.zeros(call.hidden.shape, device=call.hidden.device)
        observed = self.observed
        count = observed.layer.experts
        if self.routed is not None and count > top_k:
            positional, by_keyword = as_call(self.routed.arguments)
            with another_top_k(observed.router, observed.block, observed.config, top_k + 1):
                # past the hooks of those who watch
                output = observed.router.forward(*positional, **by_keyword)
            weights, index = (part.reshape(-1, part.shape[-1]) for part in output[1:3])
            # else a router that looks its experts up
            if index.shape == (tokens, top_k + 1):
                added = (index[:, :, None] != call.index[:, None]).all(-1)
                slot = added.int().argmax(1, keepdim=True)
                following = index.gather(1, slot)[:, 0].long()
                weight = weights.float().gather(1, slot)[:, 0]
                before = call.weights.float().sum(1)
                after = weights.float().sum(1) - weight
                known = (added.sum(1) == 1) & (following < count) & weight.isfinite()
                is_shared = (after - before).abs() > NORMALISED * before.abs()
                self.normalised = (known & is_shared).any()
                on_scale = weight * before / after.masked_fill(after == 0, 1.0)
                self.weight = torch.where(self.normalised, on_scale, weight).where(known, 0)
                following = following.where(known, 0)

        def keep(choices: Choices, outputs: Tensor) -> None:
            self.refill[choices.tokens] = choices.weights[:, None] * outputs.float()

        observed_forward(
            observed.experts, call.hidden, following[:, None], self.weight[:, None], keep
        )

    def experts_ran(self, choices: Choices, norms: Tensor, outputs: Tensor) -> None:
        gates = self.by_token(choices, choices.weights.float())
        gated = gates[..., None] * self.by_token(choices, outputs.float())
        tokens = self.by_token(choices, choices.tokens)[:, 0]
        whole = gates.sum(1, keepdim=True)
        total = gated.sum(1, keepdim=True)
        left = whole - gates + self.weight[tokens, None]
        scale = torch.where(self.normalised & (left.abs() > TINY), whole / left, 1.0)
        changed = total - gated + self.refill[tokens, None]
        damage = as_float64(total - scale[..., None] * changed).square().sum(-1)
        damage *= as_float64(gates) != 0
        self.add(self.by_token(choices, choices.experts).flatten(), damage.flatten())


class Sample(Meter):
    """A statistic of the sampled tokens."""

    def __init__(self, observed: Observed, **options: Any) -> None:
        super().__init__(observed, **options)
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
            self.parts.append((call.batch, value[call.rows].detach()))

    def joined(self, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return all rows [S, width]; none if no sampled token reached the layer."""
        parts = [part for _, part in self.parts] or [torch.zeros(0, width)]
        return torch.cat([part.to(dtype) for part in parts])


class CallSample(Sample):
    """The arguments of the experts' calls: a `part` of an `ExpertsCall`."""

    part: str

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
        order = call.logits[:, : self.observed.layer.experts].argsort(
            dim=-1, descending=True, stable=True
        )
        self.parts.append((call.batch, order.to(torch.int16)))

    def finish(self) -> Tensor:
        return self.joined(self.observed.layer.experts, torch.int16).cpu()


class RouterArgumentsSample(Sample):
    """The arguments of the router's calls."""

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        block = observed.block
        # no reference: it must be freed
        self.owned = {id(value) for value in (*block.parameters(), *block.buffers())}

    def router_called(self, call: RouterCall) -> None:
        """Keep the sampled rows of what goes by tokens, [S, ...] of [T, ...] or [1, S, ...]; a bias
        held by the block, for example, stays as it is."""
        if not call.rows.numel():
            return
        arguments = []
        for name, value in call.arguments:
            dim = None if id(value) in self.owned else token_dim(value, len(call.logits))
            if dim == 0:
                value = value[call.rows].detach()
            elif dim is not None:
                value = value.flatten(0, 1)[call.rows].detach()[None]
            arguments.append((name, dim, value))
        self.parts.append((call.batch, arguments))

    def finish(self) -> RouterArguments:
        joined = []
        dims = {}
        calls = [arguments for _, arguments in self.parts]
        for position, (name, dim, first) in enumerate(calls[0] if calls else ()):
            values = [arguments[position][2] for arguments in calls]
            joined.append((name, first if dim is None else torch.cat(values, dim)))
            dims[position if name is None else name] = dim
        return RouterArguments(*as_call(joined), dims)


class ExpertOutputs(Sample):
    """The outputs of all experts, on the sampled inputs or on random mixtures of them."""

    mixed = False

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
        step = max(1, CHUNK // len(hidden))
        for begin in range(0, count, step):
            part = slice(begin, begin + step)
            index = torch.arange(len(outputs[part]), device=hidden.device).expand(len(hidden), -1)
            choices = Choices.of(index, index, index.shape[1])
            chosen = apply_expert(
                experts, expert_parameters(experts, part), hidden[choices.tokens], choices
            )
            outputs[part] = chosen.view_as(outputs[part])
        return outputs


def mix_tokens(hidden: Tensor, seed: int) -> Tensor:
    """Mix each token [S, H] with another one in random proportion (section 3.4 of
    arXiv:2407.09590)."""
    generator = torch.Generator().manual_seed(seed)
    partner = torch.randperm(len(hidden), generator=generator).to(hidden.device)
    share = torch.rand(len(hidden), 1, generator=generator).to(hidden.device)
    mixed = share * hidden.float() + (1 - share) * hidden[partner].float()
    return mixed.to(hidden.dtype)


class Weights(Meter):
    """The live modules, without a batch."""

    def finish(self) -> LayerWeights:
        return self.observed
