"""Gradients through the whole model with one decoder layer in memory: once forward, then back from layer to layer.

The forward pass keeps what each batch calls each layer with, under a budget and on disk past it. The loss is taken at
the model's output; then the layers are loaded from last to first, each call is replayed with gradients, and the
gradient of its hidden states is handed down. What happens before the first layer, between layers and after the last
one stays the stock code's business.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compressor.errors import CompressionError
from compressor.memory import give_back
from compressor.model.buffers import Spill, as_arguments, as_call
from compressor.model.loading import PartialModel
from compressor.model.opened import OpenModel
from compressor.model.streaming import DEFAULT_ACTIVATION_BUDGET, Forward, LayerVisitor, Pass

Loss = Callable[[int, Any], torch.Tensor]  # (batch, the model's output) -> its share of the loss


class ReverseVisitor(LayerVisitor):
    """What is done along a reverse pass, on the way forward and on the way back.

    `loaded` is called on both ways, so that weights changed there are changed for both; parameters ask for no
    gradients unless a visitor has them do so there.
    """

    def replaying(self, unit: str, batch: int) -> None:
        """A batch is about to pass the layer once more, with gradients."""

    def returned(self, unit: str, batch: int) -> None:
        """The gradient of the loss has come back through the layer for a batch; `.grad` of what asked for it is set."""

    def done(self, unit: str) -> None:
        """All batches have come back through the layer, which is still loaded."""


@dataclass(frozen=True, slots=True)
class ReversePass:
    """`batches` (token ids [B, L]) forward through all decoder layers and back, one layer in memory at a time.

    `padding` are their attention masks [B, L], or nothing. Hidden states that one layer hands to the next are all that
    may carry a gradient from layer to layer: `run` refuses an architecture of another kind.
    """

    model: OpenModel
    batches: Sequence[torch.Tensor]
    padding: Sequence[torch.Tensor] = ()
    activation_budget: int = DEFAULT_ACTIVATION_BUDGET

    def run(self, loss: Loss, *visitors: ReverseVisitor) -> list[float]:
        """Carry out the pass and return each batch's loss, of which the sum is what the gradients are of.

        Raises `CompressionError` if gradients go from layer to layer in another way than in hidden states.
        """
        self._refuse_shared()
        calls = _Calls(self, loss)
        forward = Pass(
            self.model,
            self.batches,
            to_end=True,
            padding=self.padding,
            gradients=True,
            activation_budget=self.activation_budget,
        )
        forward.run(*visitors, calls)
        try:
            for unit in reversed(self.model.architecture.units):
                self._reverse(unit, calls, visitors)
        finally:
            self.model.partial.release("")
        return calls.losses

    def _reverse(self, unit: str, calls: "_Calls", visitors: Sequence[ReverseVisitor]) -> None:
        """Load a layer and hand the gradients of all batches down through it."""
        partial, units = self.model.partial, self.model.architecture.units
        partial.load(partial.keys_under(unit))
        calls.at.layer = unit
        if (number := units.index(unit)) > 0:
            partial.read_ahead(partial.keys_under(units[number - 1]))
        module = partial.model.get_submodule(unit)
        for visitor in visitors:
            visitor.loaded(unit)
        for batch in range(len(self.batches)):
            calls.at.batch = batch
            for visitor in visitors:
                visitor.replaying(unit, batch)
            own: Forward = module.forward
            for visitor in visitors:
                own = visitor.replaced(unit, own)
            calls.hand_down(unit, batch, own)
            for visitor in visitors:
                visitor.returned(unit, batch)
        for visitor in visitors:
            visitor.done(unit)
        calls.at.layer = ""
        partial.release(unit)
        give_back()

    def _refuse_shared(self) -> None:
        inside = tuple(f"{unit}." for unit in self.model.architecture.units)
        shared = next((key for key in self.model.partial.tied if key.startswith(inside)), None)
        if shared is not None:
            raise _another_way(self.model.partial, f"{shared} shares its weights with another layer")


class _Calls(LayerVisitor):
    """What every batch called every layer with, the losses, and the gradients that wait between layers."""

    def __init__(self, run: ReversePass, loss: Loss) -> None:
        count = len(run.batches)
        self.partial, self.loss, self.spill = run.model.partial, loss, Spill(run.activation_budget)
        self.held: dict[tuple[str, int], tuple[tuple[str | None, Any], ...]] = {}
        self.left: list[list[torch.Tensor]] = [[] for _ in range(count)]  # what layers put into containers, by batch
        self.outputs: list[list[torch.Tensor]] = [[] for _ in range(count)]  # of the last layer passed, by batch
        self.gradients = [torch.empty(0)] * count  # of the loss, at the hidden states that come out of a layer
        self.losses = [0.0] * count
        self.strayed = list[str]()

    def replaced(self, unit: str, own: Forward) -> Forward:
        """The layer's forward, with its call kept and its outputs made leaves from which gradients start."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            (name, hidden), *others = as_arguments(args, kwargs)
            self._refuse_other_ways(unit, hidden, others)
            kept = hidden.detach().to("cpu", copy=True)  # the layer may write into what it is given
            self.spill.keep((unit, self.at.batch), kept)
            self.held[unit, self.at.batch] = ((name, kept), *((key, _snapshot(value)) for key, value in others))
            before = {id(value) for value in _tensors(others)}
            with torch.no_grad():
                output = own(*args, **kwargs)
            left = (value for value in _tensors(others) if id(value) not in before)  # for later layers, if any asks
            self.left[self.at.batch] += [value for value in left if value.is_floating_point()]
            leaves = self.outputs[self.at.batch] = list[torch.Tensor]()
            return _as_leaves(output, leaves)

        return forward

    def _refuse_other_ways(self, unit: str, hidden: Any, others: Sequence[tuple[str | None, Any]]) -> None:
        """Raise unless the hidden states are what the layer before has put out, and nothing else hangs on it."""
        before = self.outputs[self.at.batch]
        if before and hidden is not before[0]:
            raise _another_way(self.partial, f"{unit} is not given the hidden states that the layer before puts out")
        if any(value.requires_grad for value in _tensors(others)):
            raise _another_way(self.partial, f"{unit} is given more of earlier layers than their hidden states")
        for leaf in (value for value in before if value.requires_grad):  # reached through the layers' replay alone
            leaf.register_hook(lambda _, unit=unit: self.strayed.append(unit))

    def finished(self, batch: int, output: Any) -> None:
        """Take the loss of a batch that has reached the output, and its gradient at the last layer's hidden states."""
        hidden, *others = self.outputs[batch]
        with torch.enable_grad():
            loss = self.loss(batch, output)
        self.losses[batch] = float(loss.detach())
        if loss.requires_grad:
            loss.backward()
        self.outputs[batch] = []
        if self.strayed or any(value.grad is not None for value in others):
            raise _another_way(self.partial, "its output hangs on more than the last layer's hidden states")
        self._keep_gradient(batch, hidden)

    def hand_down(self, unit: str, batch: int, own: Forward) -> None:
        """Replay a batch's call of a layer with gradients, and send the gradient of its output back through it."""
        (name, kept), *others = self.held.pop((unit, batch))
        hidden, gradient = (value.to(self.partial.device) for value in (kept, self.gradients[batch]))
        hidden.requires_grad_()
        with torch.enable_grad():
            for value in self.left[batch]:
                value.requires_grad_()
            args, kwargs = as_call([(name, hidden.clone()), *others])  # a layer may write into it, but not into a leaf
            output = next(_tensors(own(*args, **kwargs)))
        output.backward(gradient)
        if any(value.grad is not None for value in self.left[batch]):
            raise _another_way(self.partial, f"{unit} is given more of earlier layers than their hidden states")
        self.spill.forget((unit, batch))
        self._keep_gradient(batch, hidden)

    def _keep_gradient(self, batch: int, hidden: torch.Tensor) -> None:
        gradient = (torch.zeros_like(hidden) if hidden.grad is None else hidden.grad).cpu()
        self.spill.keep(batch, gradient)
        self.gradients[batch] = gradient


def _another_way(partial: PartialModel, how: str) -> CompressionError:
    return CompressionError(
        f"{type(partial.model).__name__}: {how}, so gradients cannot be taken layer by layer; use what needs "
        "none, or takes them in memory"
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors within arguments or outputs, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


def _snapshot(value: Any) -> Any:
    """An argument as it is now: a container of its own, should a layer write into it."""
    return copy.copy(value) if isinstance(value, MutableMapping | list) else value


def _as_leaves(output: Any, leaves: list[torch.Tensor]) -> Any:
    """A layer's output, its tensors in `leaves` too, where gradients that come back to them end."""
    if isinstance(output, torch.Tensor):
        leaves.append(output.detach())
        return leaves[-1].requires_grad_(output.is_floating_point())
    return tuple(_as_leaves(entry, leaves) for entry in output) if isinstance(output, tuple) else output
