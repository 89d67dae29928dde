"""Lockstep streaming: every batch runs the stock forward, all stand still before each layer until it is loaded.

Each batch's ordinary `model(input_ids)` runs inside its own greenlet; every decoder layer's forward first switches
back to the driver, which loads that layer, lets every batch pass it, shows it to the visitors and empties it again.
Masks, position embeddings and per-layer arguments stay the stock code's business.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial as bind
from itertools import pairwise
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from compressor.errors import CompressionError
from compressor.memory import give_back
from compressor.model.architecture import head_of
from compressor.model.buffers import Spill
from compressor.model.loading import PartialModel

DEFAULT_ACTIVATION_BUDGET = 4 * 2**30  # bytes of hidden states held in memory before they go to disk
_REPLAY = "replay"

Forward = Callable[..., Any]
Replay = Callable[[Iterable[int]], None]


class LayerVisitor:
    """What is done along a streamed pass; each method does nothing unless a visitor has its own.

    Of several visitors of one pass, each method is called in their order. Layers go by name, batches by number.
    """

    def loaded(self, unit: str) -> None:
        """A layer has been loaded, and every batch has come as far as it."""

    def before(self, unit: str, replay: Replay) -> None:
        """All visitors have seen the layer loaded, and no batch has passed it yet.

        `replay(numbers)` runs these batches through the layer and leaves them where they are.
        """

    def replaced(self, unit: str, own: Forward) -> Forward:
        """The forward that the batch which is running passes, in place of the layer's `own`; replays keep that."""
        return own

    def entering(self, batch: int) -> None:
        """A batch is about to run: to the first layer, through a layer to the next one, in a replay, to the output."""

    def passed(self, unit: str) -> None:
        """Every batch has passed the layer, which is still loaded."""

    def finished(self, batch: int, output: Any) -> None:
        """One of the `finishing` batches has reached the model's output."""


@dataclass(frozen=True, slots=True)
class LayerStream:
    """`batches` (token ids [B, L]) through the decoder layers `units`, one of them in memory at a time.

    A pass ends when all `wanted` layers have passed. The `finishing` batches then go on to the model's output; all
    layers must be wanted for that. Of several ranks each runs the batches of its `own` numbers; visitors see those.
    """

    partial: PartialModel
    batches: Sequence[torch.Tensor]
    units: tuple[str, ...]
    wanted: Collection[str]
    finishing: Collection[int] = ()
    activation_budget: int = DEFAULT_ACTIVATION_BUDGET
    padding: Sequence[torch.Tensor] = ()  # attention masks [B, L] of the batches, if there are any
    gradients: bool = False  # whether the stock code around the layers runs with gradients
    own: Collection[int] | None = None  # None: all of them

    def __post_init__(self) -> None:
        if self.finishing and set(self.wanted) < set(self.units):
            raise ValueError("batches reach the model's output only if all layers are wanted")

    def run(self, *visitors: LayerVisitor) -> None:
        """Carry out the whole pass; in the end nothing is loaded."""
        for _ in self.passing(*visitors):
            pass

    def passing(self, *visitors: LayerVisitor) -> Generator[str, None, None]:
        """Yield each layer's name when every batch has passed it, its weights still loaded until the next is asked for.

        Nothing stays loaded once the generator is exhausted or closed.
        """
        lockstep = _Lockstep(self, visitors)
        try:
            yield from lockstep.layers()
        finally:
            lockstep.close()


class _Lockstep:
    """One pass: the batches, each in a greenlet of its own, and what has them stand still before every layer."""

    def __init__(self, stream: LayerStream, visitors: Sequence[LayerVisitor]) -> None:
        self.stream, self.visitors, self.driver = stream, visitors, getcurrent()
        self.partial, self.model = stream.partial, stream.partial.model
        self.waiting, self.running, self.spill = set(stream.wanted), 0, Spill(stream.activation_budget)
        modules = {unit: self.model.get_submodule(unit) for unit in stream.units}
        self.own: dict[str, Forward] = {unit: module.forward for unit, module in modules.items()}
        for unit, module in modules.items():
            module.forward = bind(self._pass_layer, unit)
        self.handles = [module.register_forward_hook(bind(self._after, unit)) for unit, module in modules.items()]
        self.handles += [
            self.model.get_submodule(name).register_forward_pre_hook(bind(self._load, keys))
            for name, keys in _outside_keys(self.partial, stream.units).items()
        ]
        own = range(len(stream.batches)) if stream.own is None else sorted(stream.own)
        self.runs = {number: greenlet(self._run) for number in own}

    def layers(self) -> Iterator[str]:
        """Load, pass, yield and release one layer after another, then finish the batches that are to be finished."""
        places = [self._resume(number, number) for number in self.runs]
        _release_embedding(self.partial)
        following = dict(pairwise(self.stream.units))
        idle = iter(self.stream.units if self.stream.own is not None and not places else ())  # ranks keep in step
        while (unit := places[0] if places else next(idle, None)) is not None:
            if any(place != unit for place in places):
                raise CompressionError(
                    f"batches took different ways through the model at {unit}; this architecture cannot be streamed"
                )
            self.partial.load(self.partial.keys_under(unit))
            if self.waiting - {unit} and (successor := following.get(unit)):
                self.partial.read_ahead(self.partial.keys_under(successor))
            for visitor in self.visitors:
                visitor.loaded(unit)
            for visitor in self.visitors:
                visitor.before(unit, self._replay)
            places = [self._resume(number) for number in self.runs]
            for visitor in self.visitors:
                visitor.passed(unit)
            yield unit
            self.partial.release(unit)
            give_back()
            self.waiting.discard(unit)
            if not self.waiting:
                break
        for number in self.stream.finishing:
            if number in self.runs:
                self._finish(number)

    def close(self) -> None:
        """End all batches, and leave the model empty and as it was."""
        for run in self.runs.values():
            if run:
                run.throw(GreenletExit)
        for handle in self.handles:
            handle.remove()
        for unit in self.stream.units:
            self.model.get_submodule(unit).__dict__.pop("forward", None)
        self.partial.release("")

    def _resume(self, number: int, *values: Any) -> Any:
        """Let a batch run on until it stands before a layer; returns that layer's name, or what its greenlet does."""
        self.running = number
        for visitor in self.visitors:
            visitor.entering(number)
        with torch.set_grad_enabled(self.stream.gradients):
            return self.runs[number].switch(*values)

    def _replay(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self.runs:
                self._resume(number, _REPLAY)

    def _finish(self, number: int) -> None:
        output = self._resume(number)
        for visitor in self.visitors:
            visitor.finished(number, output)

    def _run(self, number: int) -> Any:
        """What a batch's greenlet does: the stock forward."""
        stream, device = self.stream, self.partial.device
        more = {"attention_mask": stream.padding[number].to(device)} if stream.padding else {}
        return self.model(input_ids=stream.batches[number].to(device), use_cache=False, **more)

    def _pass_layer(self, unit: str, *args: Any, **kwargs: Any) -> Any:
        """A decoder layer's forward: wait until it is loaded, run it as often as it is replayed, and go on."""
        own = self.own[unit]
        self.spill.keep(self.running, next(iter((*args, *kwargs.values())), None))
        while self.driver.switch(unit) == _REPLAY:
            own(*_copied(args), **kwargs)
        for visitor in self.visitors:
            own = visitor.replaced(unit, own)
        return own(*args, **kwargs)

    def _after(self, unit: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.waiting <= {unit}:
            self.driver.switch(None)  # no batch need go on, least of all through the head

    def _load(self, keys: list[str], module: nn.Module, args: Any) -> None:
        self.partial.load(keys)


def _outside_keys(partial: PartialModel, units: tuple[str, ...]) -> dict[str, list[str]]:
    """For each module outside the decoder layers: the tensors that its forward may use directly."""
    model, head, found = partial.model, head_of(partial.model), {}
    for name, module in model.named_modules():
        if any(name == unit or name.startswith(f"{unit}.") for unit in units):
            continue
        prefix = f"{name}." if name else ""
        owners = [(prefix, module)] + [
            (f"{prefix}{child_name}.", child)
            for child_name, child in module.named_children()
            if child is not head and f"{prefix}{child_name}" not in units
        ]
        keys = [f"{owner_prefix}{key}" for owner_prefix, owner in owners for key in _direct_tensors(owner)]
        if keys:
            found[name] = keys
    return found


def _direct_tensors(module: nn.Module) -> Iterator[str]:
    yield from (name for name, value in module._parameters.items() if value is not None)
    skipped = module._non_persistent_buffers_set
    yield from (name for name, value in module._buffers.items() if value is not None and name not in skipped)


def _release_embedding(partial: PartialModel) -> None:
    """Give back the token embedding, often larger than a layer, once all batches have passed it.

    One that a later part of the model shares stays.
    """
    model = partial.model
    names = {module: name for name, module in model.named_modules()}
    own = names[model.get_input_embeddings()]
    head = names.get(head_of(model), own)
    sharing = [{name.rpartition(".")[0] for name in pair} for pair in partial.tied.items()]
    if all(pair <= {own, head} for pair in sharing if own in pair):
        partial.release(own)


def _copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments that a replay may change in place without the batch noticing."""
    return tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in args)
