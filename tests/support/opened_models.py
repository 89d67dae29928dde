"""Tiny zoo models on disk, opened as the compressor opens them, and what a plain forward of the same model shows."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.data.sources import SAMPLE_TOKENS
from compressor.model.architecture import Architecture
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel, open_model
from compressor.model.streaming import LayerVisitor, Pass
from compressor.progress import Silent
from compressor.statistics.statistics import LayerStatistics, collect
from tests.support import zoo


def opened(name: str, folder: Path, seed: int = 0) -> tuple[PreTrainedModel, OpenModel]:
    """The stock model in memory, and the same one opened from the checkpoint that it wrote."""
    stock = zoo.save(name, folder, seed)
    return stock, open_model(locate(str(folder)), "float32", "cpu")


def batches(stock: PreTrainedModel, sizes: Sequence[int] = (2, 1), length: int = 12) -> tuple[Tensor, ...]:
    """Batches of so many sequences each; the tokens do not depend on how they are cut."""
    return torch.split(zoo.tokens(stock, sum(sizes), length, seed=3), list(sizes))


def logits(run: Pass, *visitors: LayerVisitor) -> dict[int, Tensor]:
    """Carry out a pass; the logits of the batches that reach the model's output, by number."""
    found = dict[int, Tensor]()

    class Keeping(LayerVisitor):
        repeatable = True

        def on_batch_end(self, batch: int, output: Any) -> None:
            found[batch] = output.logits.clone()

    run.run(Keeping(), *visitors)
    return found


def of_two_layers(model: nn.Module) -> Any:
    """Enough of an open model for a pass through `layers.0` and `layers.1`, in which nothing has to be loaded."""
    nothing: Any = lambda *_: ()  # noqa: E731
    partial = SimpleNamespace(
        model=model, device=torch.device("cpu"), dtype=torch.float32, tied={}, empty={}, load=lambda keys: None,
        read_ahead=nothing, release=nothing, keys_under=nothing,
    )  # fmt: skip
    architecture = SimpleNamespace(decoder_layers=("layers.0", "layers.1"), layers=())
    return SimpleNamespace(partial=partial, architecture=architecture, positions=None)


def calibration(parts: Sequence[Tensor], sample_tokens: int | None = SAMPLE_TOKENS) -> Calibration:
    """Calibration data that is these batches."""
    return Calibration(tuple(parts), {"source": "random tokens"}, sample_tokens=sample_tokens)


def statistics(
    model: OpenModel,
    needs: frozenset[str],
    parts: Sequence[Tensor] | None,
    seed: int = 0,
    sample_tokens: int | None = SAMPLE_TOKENS,
) -> dict[str, LayerStatistics]:
    """Statistics of all layers by name; `weights` among them is of no use, for the layers have gone by then."""
    found = collect(model, needs, None if parts is None else calibration(parts, sample_tokens), Silent(), seed)
    return {stats.layer.name: stats for stats in found}


@dataclass(slots=True)
class Calls:
    """What one layer's modules were called with and returned, a list entry for each batch."""

    router_arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    router_outputs: list[Any] = field(default_factory=list)
    experts_arguments: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    experts_outputs: list[Tensor] = field(default_factory=list)

    def joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, indices and gate weights of all batches."""
        hidden, index, weights = (torch.cat(parts) for parts in zip(*self.experts_arguments, strict=True))
        return hidden, index, weights


def watch(model: nn.Module, layers: Sequence[MoeLayer]) -> dict[str, Calls]:
    """Note every call of the layers' routers and experts from now on, by the layer's name."""
    seen: dict[str, Calls] = {layer.name: Calls() for layer in layers}

    def on_router(calls: Calls, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        calls.router_arguments.append((args, kwargs))
        calls.router_outputs.append(output)

    def on_experts(calls: Calls, _: Any, args: Any, output: Tensor) -> None:
        calls.experts_arguments.append(tuple(value.detach().clone() for value in args))
        calls.experts_outputs.append(output.detach().clone())

    for layer in layers:
        calls = seen[layer.name]
        model.get_submodule(layer.router).register_forward_hook(partial(on_router, calls), with_kwargs=True)
        model.get_submodule(layer.name).register_forward_hook(partial(on_experts, calls))
    return seen


def plain_calls(stock: PreTrainedModel, architecture: Architecture, parts: Sequence[Tensor]) -> dict[str, Calls]:
    """The calls of a plain forward of each batch through the whole model."""
    seen = watch(stock, architecture.layers)
    for tokens in parts:
        with torch.no_grad():
            stock(input_ids=tokens, use_cache=False)
    return seen


def hidden_states(stock: PreTrainedModel, architecture: Architecture, parts: Sequence[Tensor]) -> dict[str, Tensor]:
    """What each decoder layer puts out in plain forwards of the batches: [T, H], or all of a token's side by side."""
    seen = defaultdict[str, list[Tensor]](list)

    def note(decoder_layer: str, module: Any, args: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        seen[decoder_layer].append(hidden.detach().clone().flatten(0, 1).flatten(1))

    handles = [
        stock.get_submodule(decoder_layer).register_forward_hook(partial(note, decoder_layer))
        for decoder_layer in architecture.decoder_layers
    ]
    for tokens in parts:
        with torch.no_grad():
            stock(input_ids=tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    return {decoder_layer: torch.cat(values) for decoder_layer, values in seen.items()}


@torch.no_grad()
def one_expert(experts: Any, expert: int, hidden: Tensor) -> Tensor:
    """[T, H] -> [T, H]: the stock module's output if each token visits only this expert, with gate weight 1."""
    index = torch.full((len(hidden), 1), expert)
    output: Tensor = experts(hidden, index, torch.ones(len(hidden), 1))
    return output
