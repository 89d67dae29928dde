"""One cut MoE layer as float32 tensors that can be refitted: its routing, its output, its error on recorded tokens.

T tokens, n of them at a time, K top-k, N experts, H hidden, I intermediate.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from compressor.correction.recording import Recording
from compressor.model.experts import Parameters, apply_expert, parameter_names

CHUNK = 4096  # tokens computed at once


@dataclass(slots=True)
class CutLayer:
    """A smaller layer's experts, one set of float32 parameters each, and its live router, beside what was recorded."""

    recording: Recording
    experts: Any  # the smaller model's experts module, for its flags and activation
    router: Any
    block: Any
    parameters: list[Parameters]
    floor: float = 1.0  # added to ||y||^2 in a token's weight

    @classmethod
    def of(cls, recording: Recording, experts: Any, router: Any, block: Any) -> "CutLayer":
        """Take float32 copies of the experts' parameters; the router's own are used as they are."""
        names = parameter_names(experts)
        count = len(getattr(experts, names[0]))
        copies = [
            {name: getattr(experts, name)[expert].detach().to(torch.float32, copy=True) for name in names}
            for expert in range(count)
        ]
        return cls(recording, experts, router, block, copies, _typical_energy(recording.outputs))

    def route(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate weights [n, K] and slots [n, K] that the smaller router gives the tokens at `rows` [n]."""
        positional, by_keyword = self.recording.router_arguments(rows, self.block)
        output = self.router(*positional, **by_keyword)
        return output[1].reshape(len(rows), -1).float(), output[2].reshape(len(rows), -1)

    def inputs(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, H] what the experts are given there, in float32."""
        return self.recording.inputs[rows].float()

    def targets(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, H] what the original layer's experts put out there, in float32."""
        return self.recording.outputs[rows].float()

    def token_weights(self, targets: torch.Tensor) -> torch.Tensor:
        """[n]: 1 / (||y||^2 + its median), so that a few tokens of huge output do not drown all others."""
        return 1.0 / (targets.square().sum(-1) + self.floor)

    def output(self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """[n, H]: the gate-weighted sum of the chosen experts' outputs."""
        total = torch.zeros_like(x)
        for expert, rows, gates in routed(weights, index):
            found = apply_expert(self.experts, self.parameters[expert], x[rows])
            total = total.index_add(0, rows, found * gates[:, None])
        return total

    @torch.no_grad()
    def residual(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, H] targets minus outputs."""
        parts = []
        for chunk in rows.split(CHUNK):
            weights, index = self.route(chunk)
            parts.append(self.targets(chunk) - self.output(self.inputs(chunk), weights, index))
        return torch.cat(parts) if parts else self.targets(rows)

    @torch.no_grad()
    def error(self, rows: torch.Tensor) -> float:
        """Weighted sum of ||y - y'||^2 over that of ||y||^2 at `rows`; 0 where there is nothing to bring back."""
        off, size = 0.0, 0.0
        for chunk in rows.split(CHUNK):
            weights, index = self.route(chunk)
            target = self.targets(chunk)
            share = self.token_weights(target).double()
            gap = target - self.output(self.inputs(chunk), weights, index)
            off += float(share @ gap.double().square().sum(-1))
            size += float(share @ target.double().square().sum(-1))
        return off / size if size else 0.0


def _typical_energy(outputs: torch.Tensor) -> float:
    """Median over tokens of ||y||^2; the mean where most are 0, and 1 where all are."""
    energies = torch.cat([chunk.float().square().sum(-1) for chunk in outputs.split(CHUNK)] or [outputs.new_zeros(1)])
    return float(energies.median()) or float(energies.mean()) or 1.0


def routed(weights: torch.Tensor, index: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """For each expert that got a token: its number, the tokens' rows [m] and their gate weights [m]."""
    used = weights.detach() != 0  # a skip expert is handed on as index 0 with weight 0
    for expert in index[used].unique().tolist():
        rows, places = ((index == expert) & used).nonzero(as_tuple=True)
        yield expert, rows, weights[rows, places]
