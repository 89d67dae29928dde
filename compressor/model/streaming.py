"""Lockstep streaming: every batch runs the stock forward, all stand still before each layer until it is loaded.

Each batch's ordinary `model(input_ids)` runs inside its own greenlet; every decoder layer's forward first switches
back to the driver, which loads that layer, lets every batch pass it, hands it to the caller and empties it again.
Masks, position embeddings and per-layer arguments stay the stock code's business.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from compressor.errors import CompressionError
from compressor.memory import give_back
from compressor.model.buffers import allocate
from compressor.model.loading import PartialModel

DEFAULT_ACTIVATION_BUDGET = 4 * 2**30  # bytes of hidden states held in memory before they go to disk
_REHEARSE = "rehearse"
_NONE: Mapping[str, Callable[..., Any]] = {}

Rehearsed = Callable[[str, Callable[[], None]], None]


class _Spill:
    """Moves hidden states that wait between layers into unlinked mapped files once they pass a budget of bytes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held: dict[int, int] = {}

    def keep(self, batch: int, arguments: Sequence[Any]) -> None:
        for value in arguments:
            if (
                isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and value.device.type == "cpu"
                and value.numel()
            ):
                self.held[batch] = value.numel() * value.element_size()
                if sum(self.held.values()) > self.budget:
                    self.held[batch] = 0
                    self._to_file(value)

    @staticmethod
    def _to_file(value: torch.Tensor) -> None:
        value.data = allocate(tuple(value.shape), value.dtype, value.device, budget=0).copy_(value)


def _lazy_hook(partial: PartialModel, keys: list[str]) -> Callable[..., None]:
    def load(module: nn.Module, args: Any) -> None:
        partial.load(keys)

    return load


def _outside_keys(partial: PartialModel, units: tuple[str, ...]) -> dict[str, list[str]]:
    """For each module outside the decoder layers: the tensors that its forward may use directly."""
    model = partial.model
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = {}
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
    head = names.get(model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None, own)
    sharing = [{name.rpartition(".")[0] for name in pair} for pair in partial.tied.items()]
    if all(pair <= {own, head} for pair in sharing if own in pair):
        partial.release(own)


def _copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments that a rehearsal may change in place without the batch noticing."""
    return tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in args)


def stream_layers(
    partial: PartialModel,
    batches: Sequence[torch.Tensor],
    units: tuple[str, ...],
    wanted: Collection[str],
    *,
    before: Callable[[str], None] = lambda unit: None,
    entering: Callable[[int], None] = lambda batch: None,
    standing: Rehearsed | None = None,
    stand_ins: Mapping[str, Callable[..., Any]] = _NONE,
    rehearsing: Collection[int] = (),
    finishing: Sequence[int] = (),
    finished: Callable[[int, Any], None] = lambda batch, output: None,
    activation_budget: int = DEFAULT_ACTIVATION_BUDGET,
) -> Generator[str, None, None]:
    """Run `batches` (token ids [B, L]) through the decoder layers until all `wanted` ones have passed, one at a time.

    Yields a layer's name when every batch has passed it, its weights still loaded; in the end nothing is loaded.
    `before` is called when a layer has been loaded, `entering` with a batch's number when that batch is about to run.
    `standing(unit, rehearse)` is called while all batches stand before a loaded layer; `rehearse()` runs the
    `rehearsing` batches through it without moving them on. What `stand_ins` then holds for the layer, if anything, is
    the forward that the batches pass instead of its own. The `finishing` batches go on to the model's output after the
    last layer, which `finished` gets; all layers must be wanted then.
    """
    model, driver = partial.model, getcurrent()
    spill = _Spill(activation_budget)
    current: dict[str, int] = {"batch": 0}
    waiting = set(wanted)
    if finishing and waiting < set(units):
        raise ValueError("batches reach the model's output only if all layers are wanted")

    def stand(unit: str) -> Callable[..., Any]:
        own = model.get_submodule(unit).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            spill.keep(current["batch"], [*args, *kwargs.values()][:1])
            while driver.switch(unit) == _REHEARSE:
                own(*_copied(args), **kwargs)
            return stand_ins.get(unit, own)(*args, **kwargs)

        return forward

    def end(unit: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if waiting <= {unit}:
                driver.switch(None)  # no batch need go on, least of all through the head

        return hook

    for unit in units:
        model.get_submodule(unit).forward = stand(unit)
    handles = [model.get_submodule(unit).register_forward_hook(end(unit)) for unit in units]
    handles += [
        model.get_submodule(name).register_forward_pre_hook(_lazy_hook(partial, keys))
        for name, keys in _outside_keys(partial, units).items()
    ]

    def forward(tokens: torch.Tensor) -> Any:
        return model(input_ids=tokens.to(partial.device), use_cache=False)

    runs = [greenlet(forward) for _ in batches]

    def resume(number: int, *values: Any) -> Any:
        current["batch"] = number
        entering(number)
        with torch.no_grad():
            return runs[number].switch(*values)

    def rehearse() -> None:
        for number in rehearsing:
            resume(number, _REHEARSE)

    try:
        places = [resume(number, tokens) for number, tokens in enumerate(batches)]
        _release_embedding(partial)
        while places and places[0] is not None:
            unit = places[0]
            if any(place != unit for place in places):
                raise CompressionError(
                    f"batches took different ways through the model at {unit}; this architecture cannot be streamed"
                )
            partial.load(partial.keys_under(unit))
            before(unit)
            if standing is not None:
                standing(unit, rehearse)
            places = [resume(number) for number in range(len(batches))]
            yield unit
            partial.release(unit)
            give_back()
            waiting.discard(unit)
            if not waiting:
                break
        for number in finishing:
            finished(number, resume(number))
    finally:
        for run in runs:
            if run:
                run.throw(GreenletExit)
        for handle in handles:
            handle.remove()
        for unit in units:
            model.get_submodule(unit).__dict__.pop("forward", None)
        partial.release("")
