"""Sub-scores by brute force: a stock model in memory, run once more without one component.

Every component puts out what it once did and every norm of the residual stream keeps its statistics, so the routers'
logits are an affine function of the components: the logits lost with a component are its sub-scores. Nothing here is
shared with the code under test. T tokens, E experts, K top-k.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.model.moe_layer import MoeLayer

TOKEN = "token"


def first(output: Any) -> Tensor:
    value: Tensor = output[0] if isinstance(output, tuple) else output
    return value


@dataclass(slots=True)
class Frozen:
    """What one ordinary forward of a stock model showed, and that forward again with components replaced.

    `parts` are the names of the modules that write to the stream, `scored` maps experts modules to the modules whose
    first output is their router's logits.
    """

    model: PreTrainedModel
    decoder_layers: Sequence[str]
    layers: Sequence[MoeLayer]
    parts: Sequence[str]
    scored: Mapping[str, str]
    ids: Tensor
    outputs: dict[str, Tensor] = field(default_factory=dict)
    routed: dict[str, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)  # what the experts were called with
    projected: dict[str, Tensor] = field(default_factory=dict)  # what output projections were given
    norms: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    chosen: dict[str, Tensor] = field(default_factory=dict)  # [T, K]
    logits: dict[str, Tensor] = field(default_factory=dict)  # [T, E]

    def __post_init__(self) -> None:
        with self._hooked(self._recording()):
            self._run()
        self.logits = self.without({})

    def _run(self) -> None:
        with torch.no_grad():
            self.model(input_ids=self.ids, use_cache=False)

    @contextmanager
    def _hooked(self, hooks: Iterator[tuple[str, Callable[..., Any]]]) -> Iterator[None]:
        handles = [self.model.get_submodule(name).register_forward_hook(hook, with_kwargs=True) for name, hook in hooks]
        yield
        for handle in handles:
            handle.remove()

    def _stream_norms(self) -> Iterator[str]:
        for name, module in self.model.named_modules():
            outside = not any(name.startswith(f"{part}.") for part in self.parts)
            if (
                "Norm" in type(module).__name__
                and outside
                and any(name.startswith(f"{decoder_layer}.") for decoder_layer in self.decoder_layers)
            ):
                yield name

    def _recording(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        def on_part(name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
            self.outputs[name] = first(output).clone()
            if hasattr(module, "num_experts"):
                self.routed[name] = args

        def on_norm(name: str, module: Any, args: Any, kwargs: Any, output: Tensor) -> None:
            self.norms[name] = args[0].clone(), output.clone()

        def on_layer(name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
            self.outputs[TOKEN] = (args[0] if args else kwargs["hidden_states"]).clone()

        def on_projection(name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
            self.projected[name] = args[0].clone()

        def on_router(name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
            self.chosen[name] = output[2].reshape(-1, output[2].shape[-1])

        yield self.decoder_layers[0], partial(on_layer, self.decoder_layers[0])
        yield from ((name, partial(on_part, name)) for name in self.parts)
        yield from ((name, partial(on_norm, name)) for name in self._stream_norms())
        yield from ((layer.router, partial(on_router, layer.name)) for layer in self.layers)
        for name in self.parts:
            if hasattr(self.model.get_submodule(name), "o_proj"):
                yield f"{name}.o_proj", partial(on_projection, name)

    def without(self, removed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every router's logits [T, E] if components lose these parts of their outputs."""
        found: dict[str, Tensor] = {}

        def on_part(name: str, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
            value = self.outputs[name]
            value = value - removed[name].reshape(value.shape) if name in removed else value
            return (value, *output[1:]) if isinstance(output, tuple) else value

        def on_norm(name: str, module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            before, after = self.norms[name]
            return frozen_norm(module, before, after, args[0])

        def on_logits(name: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
            found[name] = first(output).reshape(-1, first(output).shape[-1]).double()

        def on_start(module: Any, args: Any, kwargs: Any) -> Any:
            start = self.outputs[TOKEN] - removed.get(TOKEN, 0)
            return ((start, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": start})

        handle = self.model.get_submodule(self.decoder_layers[0]).register_forward_pre_hook(on_start, with_kwargs=True)
        hooks = [(name, partial(on_part, name)) for name in self.parts]
        hooks += [(name, partial(on_norm, name)) for name in self.norms]
        hooks += [(module, partial(on_logits, name)) for name, module in self.scored.items()]
        with self._hooked(iter(hooks)):
            self._run()
        handle.remove()
        return found

    def sub_scores(self, removed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """[T, E] by experts module: the logits that go with these parts."""
        left = self.without(removed)
        return {name: logits - left[name] for name, logits in self.logits.items()}

    def whole(self, *names: str) -> dict[str, Tensor]:
        """All that these components put out."""
        return {name: self.outputs[name] for name in names}

    def _every(self, name: str, expert: int) -> Tensor:
        """[T, H]: what one expert would put out for every token, with gate weight 1."""
        hidden, index, weights = self.routed[name]
        module: Any = self.model.get_submodule(name)
        with torch.no_grad():
            output: Tensor = module(hidden, torch.full((len(index), 1), expert), weights.new_ones(len(index), 1))
        return output

    def alone(self, name: str, expert: int) -> Tensor:
        """[n, H]: what one expert put out for the tokens that came to it, before its gate weight."""
        return self._every(name, expert)[(self.routed[name][1] == expert).any(-1)]

    def expert(self, name: str, expert: int) -> dict[str, Tensor]:
        """What one expert added to its module's output."""
        _, index, weights = self.routed[name]
        return {name: self._every(name, expert) * (weights * (index == expert)).sum(-1, keepdim=True)}

    def head(self, name: str, head: int, heads: int) -> dict[str, Tensor]:
        """What one head put out, through its columns of the output projection."""
        projection: Any = self.model.get_submodule(f"{name}.o_proj")
        inputs = torch.zeros_like(self.projected[name])
        size = inputs.shape[-1] // heads
        inputs[..., head * size : (head + 1) * size] = self.projected[name][..., head * size : (head + 1) * size]
        with torch.no_grad():
            return {name: nn.functional.linear(inputs, projection.weight)}


def frozen_norm(module: nn.Module, before: Tensor, after: Tensor, now: Tensor) -> Tensor:
    """A norm's output for another input, as if its statistics were still those of `before`, which gave `after`."""
    change = now - before
    if "LayerNorm" not in type(module).__name__:
        return after + change * (after / before)  # RMS: each entry by a factor of its own
    bias = getattr(module, "bias", None)
    factor = (after if bias is None else after - bias) / (before - before.mean(-1, keepdim=True))
    return after + (change - change.mean(-1, keepdim=True)) * factor


def ranking_change(scores: Tensor, without: Tensor, chosen: Tensor) -> float:
    """AARV of one router by sorting: selection scores [T, E] with and without a component, chosen experts [T, K]."""
    places = [(-values).argsort(dim=-1, stable=True).argsort(-1) for values in (scores, without)]
    change = (places[0] - places[1]).abs().gather(-1, chosen)
    return float(change.double().mean())
