"""Meters of samples: what some of the tokens show in an MoE layer, S of them, kept as it was seen.

E experts, K top-k, H hidden. Samples are float32, or in the computing dtype where experts are to be run on them.
"""

from typing import Any, Self

import torch
from torch import Tensor

from compressor.model.buffers import as_call, token_dim
from compressor.model.experts import apply_expert, expert_parameters
from compressor.statistics.observing import ExpertsCall, Meter, Observed, RouterArguments, RouterCall, SmallerRouter


class _Sample(Meter):
    kind = "sampled"

    def __init__(self, observed: Observed) -> None:
        super().__init__(observed)
        self.parts: list[Any] = []

    def absorb(self, other: Self, scale: float) -> None:
        self.parts.extend(other.parts)

    def tensors(self) -> list[Tensor]:
        return self.parts

    def restore(self, tensors: list[Tensor], like: Self) -> None:
        device = self.observed.experts.down_proj.device
        self.parts = [value.to(device) for value in tensors]

    @property
    def sampled(self) -> bool:
        return bool(self.parts)

    def take(self, value: Tensor, rows: Tensor) -> None:
        """Keep these rows of a tensor [T, ...]."""
        if rows.numel():
            taken = value[rows.to(value.device)].detach()
            self.parts.append(taken.float() if taken.is_floating_point() else taken)

    def joined(self, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """All rows; of a layer that no sampled token reached, none, and so wide."""
        return torch.cat(self.parts) if self.parts else torch.zeros(0, width, dtype=dtype)


class Inputs(_Sample):
    name, shape, meaning = "inputs", "[S, H]", "inputs of the experts at the sampled tokens"

    def experts_called(self, call: ExpertsCall) -> None:
        self.take(call.hidden, call.rows)

    def finish(self, smaller_router: SmallerRouter) -> Tensor:
        return self.joined(1)


class RouterLogits(_Sample):
    name, shape, meaning = "router_logits", "[S, E]", "router logits there"

    def router_called(self, call: RouterCall) -> None:
        self.take(call.logits[:, : self.observed.layer.experts], call.rows)

    def finish(self, smaller_router: SmallerRouter) -> Tensor:
        return self.joined(self.observed.layer.experts)


class TopKIndex(_Sample):
    name, shape, meaning = "top_k_index", "[S, K]", "experts chosen there"

    def experts_called(self, call: ExpertsCall) -> None:
        self.take(call.index, call.rows)

    def finish(self, smaller_router: SmallerRouter) -> Tensor:
        return self.joined(self.observed.layer.top_k, torch.long)


class TopKWeights(_Sample):
    name, shape, meaning = "top_k_weights", "[S, K]", "their gate weights"

    def experts_called(self, call: ExpertsCall) -> None:
        self.take(call.weights, call.rows)

    def finish(self, smaller_router: SmallerRouter) -> Tensor:
        return self.joined(self.observed.layer.top_k)


class RouterArgumentsThere(_Sample):
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

    def tensors(self) -> list[Tensor]:
        return [value for part in self.parts for _, dim, value in part if dim is not None]

    def restore(self, tensors: list[Tensor], like: Self) -> None:
        left, self.last = iter(tensors), like.last
        width = sum(dim is not None for _, dim, _ in self.last)
        device = self.observed.experts.down_proj.device
        for _ in range(len(tensors) // width if width else 0):
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


class ExpertOutputs(_Sample):
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
