"""Lockstep streaming: every batch runs the stock forward, and all pause before each layer until it is loaded.

Each batch's ordinary `model(input_ids)` runs inside its own greenlet; every decoder layer's forward first switches
back to the driver, which loads that layer, lets every batch pass it, shows it to the visitors and empties it again.
Masks, position embeddings and per-layer arguments are left to the stock code.
"""

import copy
import logging
import tempfile
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from functools import cache
from functools import partial as bind
from itertools import pairwise
from typing import Any, ClassVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.memory import give_back
from compressor.model.architecture import head_of
from compressor.model.inputs import Inputs, forward_inputs, tower_blocks
from compressor.model.loading import PartialModel
from compressor.model.moe_layer import MoeLayer, decoder_layer_of, layers_by_decoder_layer
from compressor.model.opened import OpenModel
from compressor.progress import Progress, Silent

logger = logging.getLogger(__name__)

TINY = torch.finfo(torch.float32).tiny
BUDGET = 4 * 2**30  # bytes of one recorded tensor that are held in memory
DEFAULT_ACTIVATION_BUDGET = 4 * 2**30  # bytes of hidden states held in memory before they go to disk
Arguments = tuple[tuple[str | None, Any], ...]  # of a call, each with its keyword or None


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, budget: int = BUDGET) -> Tensor:
    """Return an uninitialised tensor, in memory or, on the CPU past the budget, in a mapped file without a name."""
    count = torch.Size(shape).numel()
    if device.type != "cpu" or count * dtype.itemsize <= budget:
        return torch.empty(shape, dtype=dtype, device=device)
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(count * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)


class ActivationOffload:
    """Moves hidden states that wait between layers into unlinked mapped files once they pass a budget of bytes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held: dict[Hashable, int] = {}  # bytes in memory, by what waits: a batch, or a batch's call of a layer
        self.total = 0

    def keep(self, key: Hashable, value: Any) -> None:
        """Count what waits at a place, if it is a floating-point tensor, and move what is too much, in place."""
        if isinstance(value, Tensor) and value.is_floating_point() and value.device.type == "cpu":
            self.forget(key)
            if value.numel() and self.total + value.nbytes > self.budget:
                self._to_file(value)
            else:
                self.held[key] = value.nbytes
                self.total += value.nbytes

    def forget(self, key: Hashable) -> None:
        """Stop counting what waited at a place."""
        self.total -= self.held.pop(key, 0)

    @staticmethod
    def _to_file(value: Tensor) -> None:
        value.data = allocate(tuple(value.shape), value.dtype, value.device, budget=0).copy_(value)


def token_dim(value: Any, tokens: int) -> int | None:
    """Return the dimension of a router's argument that counts tokens: 0 of [T, ...], 1 of [B, L, ...], or None."""
    if isinstance(value, Tensor):
        if value.dim() >= 1 and len(value) == tokens:
            return 0
        if value.dim() >= 2 and value.shape[:2].numel() == tokens:
            return 1
    return None


def as_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Return a call's arguments in order, each with its keyword or None."""
    return (*((None, value) for value in args), *kwargs.items())


def as_call(arguments: Iterable[tuple[str | None, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and those by keyword: the reverse of `as_arguments`."""
    positional, by_keyword = list[Any](), dict[str, Any]()
    for name, value in arguments:
        if name is None:
            positional.append(value)
        else:
            by_keyword[name] = value
    return tuple(positional), by_keyword


def picked(value: Tensor, rows: Tensor) -> Tensor:
    """[n, ...] rows by their places, which may be of another device; indexing gives the same in five times as long."""
    return value.index_select(0, rows.to(value.device))


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states, [B, L, H] or several a token, in the output of a decoder layer."""
    return _tensors(output)[0]


def stream_weights(hidden: Tensor, tokens: int) -> Tensor:
    """Return the weight of an error behind a layer, 1 / ||h||^2 of each token: [B, L, ...] -> [tokens], float64.

    Later layers see a hidden state divided by its size. Experts that see other tokens than the layer outputs
    get the mean for all of them.
    """
    states = as_float64(hidden.detach().flatten(0, 1).flatten(1))
    weights = 1 / states.square().sum(-1).clamp(min=TINY)
    return weights if len(weights) == tokens else weights.mean().expand(tokens)


_REPLAY = "replay"
_SILENT = Silent()

Forward = Callable[..., Any]
Replay = Callable[[Iterable[int]], None]


@dataclass(slots=True)
class PassPosition:
    """The position of a pass, shared by all its visitors."""

    model: Any  # the live modules, of which one decoder layer is loaded
    by_layer: Mapping[str, Sequence[MoeLayer]]  # the MoE layers of each decoder layer that has any
    layer: str = ""  # name of the loaded decoder layer; "" before the first and after the last
    batch: int = 0  # number of the batch that is running, or ran last

    @property
    def moe_layers(self) -> Sequence[MoeLayer]:
        """The loaded decoder layer's MoE layers, often one."""
        return self.by_layer.get(self.layer, ())


class LayerVisitor:
    """Base of what acts along a streamed pass; every method does nothing by default.

    Each method is called on all visitors of a pass in their order, with layers' names and batches' numbers. The pass
    sets `at` to its position.
    """

    at: PassPosition
    repeatable: ClassVar[bool] = False  # may see a layer several times, as some models run it

    def on_layer_loaded(self, decoder_layer: str) -> None:
        """Act when a layer has been loaded and every batch has reached it."""

    def before_layer(self, decoder_layer: str, replay: Replay) -> None:
        """Act when all visitors have seen the layer loaded, and no batch has passed it yet.

        `replay(numbers)` runs these batches through the layer and leaves them where they are.
        """

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        """Return the forward that the batch which is running passes, in place of the `layer_forward`.

        Replays keep that.
        """
        return layer_forward

    def on_batch_start(self, batch: int) -> None:
        """Act before a batch runs: to the first layer, through a layer to the next, in a replay, or to the output."""

    def on_layer_output(self, output: Any) -> None:
        """Act on a batch's output of the layer's forward, or of its replacement, in replays too (`hidden_of`)."""

    def on_layer_end(self, decoder_layer: str) -> None:
        """Act when every batch has passed the layer, which is still loaded."""

    def on_batch_end(self, batch: int, output: Any) -> None:
        """Act when a batch has reached the model's output."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of `batches` (token ids [B, L]) through a model's decoder layers, one of them in memory at a time.

    It ends with the last layer that has MoE layers, or that is `wanted`. With `to_end` all batches go on to the model's
    output; those of `evaluation`, numbered after the others, always do. A `phase` is reported to `progress`, layer by
    layer. With a `seed` torch's random state is forked for the pass and seeded. Of several processes each runs its
    share of the batches if they are `shared`, or those numbered in `share`; visitors see those alone.
    """

    model: OpenModel
    batches: Sequence[Tensor]
    progress: Progress = _SILENT
    phase: str = ""
    seed: int | None = None
    to_end: bool = False
    evaluation: Sequence[Tensor] = ()
    wanted: Collection[str] | None = None  # decoder layers
    shared: bool = False
    share: Collection[int] | None = None
    gradients: bool = False  # run the stock code around the layers with gradients
    activation_budget: int = DEFAULT_ACTIVATION_BUDGET

    @property
    def finishing(self) -> range:
        """Numbers of the batches that go on to the model's output."""
        return range(0 if self.to_end else len(self.batches), len(self.batches) + len(self.evaluation))

    def run(self, *visitors: LayerVisitor) -> None:
        """Carry out the whole pass; in the end nothing is loaded."""
        for _ in self.layers(*visitors):
            pass

    def layers(self, *visitors: LayerVisitor) -> Generator[str, None, None]:
        """Yield each layer's name when every batch has passed it, its weights still loaded until the next is asked for.

        Nothing stays loaded once the generator is exhausted or closed.
        """
        lengths = [batch.shape[1] for batch in (*self.batches, *self.evaluation)]
        _warn_beyond_positions(max(lengths, default=0), self.model.positions)
        lockstep, layer_names = _Lockstep(self, visitors), self.model.architecture.decoder_layers
        with torch.random.fork_rng(devices=[], enabled=self.seed is not None):
            try:
                if self.phase:
                    last = max((layer_names.index(decoder_layer) for decoder_layer in lockstep.waiting), default=-1)
                    self.progress.start(self.phase, last + 1)
                if self.seed is not None:
                    torch.manual_seed(self.seed)
                for decoder_layer in lockstep.layers():
                    yield decoder_layer
                    if self.phase:
                        self.progress.advance(decoder_layer)
            finally:
                lockstep.close()


@cache
def _warn_beyond_positions(length: int, positions: int | None) -> None:
    """Warn, once, of sequences that are longer than the model was made for."""
    if positions is not None and length > positions:
        text = "sequences of %d tokens go beyond the %d positions that the model was made for; %s"
        logger.warning(text, length, positions, "what comes after them may be nonsense")


class _Lockstep:
    """One pass: the batches, each in its own greenlet, and the forwards that pause them before every layer."""

    def __init__(self, run: Pass, visitors: Sequence[LayerVisitor]) -> None:
        self.run, self.visitors, self.driver = run, visitors, getcurrent()
        architecture, self.partial = run.model.architecture, run.model.partial
        self.model, self.decoder_layers = self.partial.model, architecture.decoder_layers
        self.position = PassPosition(self.model, layers_by_decoder_layer(architecture.layers))
        for visitor in visitors:
            visitor.at = self.position
        self.batches = [*run.batches, *run.evaluation]
        everything = self.decoder_layers if run.finishing else self.position.by_layer
        self.waiting = set(everything if run.wanted is None else run.wanted)
        self.offload = ActivationOffload(run.activation_budget)
        self.share = ranks().share(run.batches, run.evaluation) if run.shared else run.share
        modules = {decoder_layer: self.model.get_submodule(decoder_layer) for decoder_layer in self.decoder_layers}
        self.forwards: dict[str, Forward] = {decoder_layer: module.forward for decoder_layer, module in modules.items()}
        for decoder_layer, module in modules.items():
            module.forward = bind(self._pass_layer, decoder_layer)
        self.before_layers = True
        self.blocks = dict[str, str]()  # of towers, which pictures and sound pass ahead of the decoder layers
        if any(isinstance(batch, Inputs) for batch in self.batches):
            self.blocks = tower_blocks(self.model, self.decoder_layers)
        for block in self.blocks:
            module = self.model.get_submodule(block)
            module.forward = bind(self._pass_block, block, module.forward)
        self.handles = [
            module.register_forward_hook(bind(self._after, decoder_layer)) for decoder_layer, module in modules.items()
        ]
        self.handles += [
            self.model.get_submodule(name).register_forward_pre_hook(lambda *_, keys=keys: self.partial.load(keys))
            for name, keys in _outside_keys(self.partial, (*self.decoder_layers, *self.blocks)).items()
        ]
        numbers = range(len(self.batches)) if self.share is None else sorted(self.share)
        self.runs = {number: greenlet(self._run) for number in numbers}

    def layers(self) -> Iterator[str]:
        """Load, pass, yield and release one layer after another, as far as any is wanted, then finish batches."""
        standing = self._first_layers()
        _release_embedding(self.partial)
        for tower in set(self.blocks.values()):
            self.partial.release(tower)
        following, passed = dict(pairwise(self.decoder_layers)), set[str]()
        idle = iter(() if ranks().is_alone or standing else self.decoder_layers)  # ranks keep in step

        def replay(numbers: Iterable[int]) -> None:
            for number in numbers:
                if number in self.runs:
                    self._resume(number, _REPLAY)

        while True:
            decoder_layer = standing[0] if standing else next(idle, None)
            if decoder_layer is None:
                break
            if any(layer != decoder_layer for layer in standing):
                raise CompressionError(
                    f"batches took different ways through the model at {decoder_layer}; this architecture cannot be "
                    "streamed"
                )
            if decoder_layer in passed and not all(visitor.repeatable for visitor in self.visitors):
                raise self._another_run(decoder_layer)
            passed.add(decoder_layer)
            self.partial.load(self.partial.keys_under(decoder_layer))
            self.position.layer = decoder_layer
            if self.waiting - {decoder_layer} and (successor := following.get(decoder_layer)):
                self.partial.read_ahead(self.partial.keys_under(successor))
            for visitor in self.visitors:
                visitor.on_layer_loaded(decoder_layer)
            for visitor in self.visitors:
                visitor.before_layer(decoder_layer, replay)
            standing = [self._resume(number) for number in self.runs]
            for visitor in self.visitors:
                visitor.on_layer_end(decoder_layer)
            yield decoder_layer
            self.partial.release(decoder_layer)
            give_back()
            self.waiting.discard(decoder_layer)
            if not self.waiting:
                break
        self.position.layer = ""
        for number in self.run.finishing:
            if number in self.runs:
                output = self._resume(number)
                if isinstance(output, str):  # it stands before a layer, after the last one
                    raise self._another_run(output)
                for visitor in self.visitors:
                    visitor.on_batch_end(number, output)

    def close(self) -> None:
        """End all batches, and leave the model empty and as it was."""
        for run in self.runs.values():
            if run:
                run.throw(GreenletExit)
        for handle in self.handles:
            handle.remove()
        for name in (*self.decoder_layers, *self.blocks):
            self.model.get_submodule(name).__dict__.pop("forward", None)
        self.partial.release("")

    def _another_run(self, decoder_layer: str) -> CompressionError:
        return CompressionError(
            f"{type(self.model).__name__} runs {decoder_layer} more than once in a forward, so it cannot be calibrated "
            "or measured layer by layer; use a strategy that needs no calibration, such as model-centric"
        )

    def _first_layers(self) -> list[str]:
        """Let every batch come to its first decoder layer; on the way one block of a tower is loaded at a time."""
        standing = {number: self._resume(number, number) for number in self.runs}
        while blocks := [module for module in standing.values() if module in self.blocks]:
            block = blocks[0]
            for number, module in standing.items():
                if module == block:
                    standing[number] = self._resume(number)
            self.partial.release(block)
        self.before_layers = False
        return list(standing.values())

    def _resume(self, number: int, *values: Any) -> Any:
        """Let a batch run on until it stands before a layer; returns that layer's name, or what its greenlet does."""
        self.position.batch = number
        for visitor in self.visitors:
            visitor.on_batch_start(number)
        with torch.set_grad_enabled(self.run.gradients):
            return self.runs[number].switch(*values)

    def _run(self, number: int) -> Any:
        inputs = forward_inputs(self.batches[number], self.partial.device, self.partial.dtype)
        return self.model(**inputs, use_cache=False)

    def _offload(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Have the hidden states that a layer or block is called with wait on disk, where they are too much."""
        hidden = next(iter((*args, *kwargs.values())), None)
        self.offload.keep(self.position.batch, hidden)

    def _pass_block(self, block: str, layer_forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a tower's block once it is loaded; one that layers call later is loaded as it runs."""
        if self.before_layers:
            self._offload(args, kwargs)
            self.driver.switch(block)
        self.partial.load(self.partial.keys_under(block))
        return layer_forward(*args, **kwargs)

    def _pass_layer(self, decoder_layer: str, *args: Any, **kwargs: Any) -> Any:
        """Run a decoder layer once it is loaded: as often as it is replayed, and then for the batch's own output."""
        layer_forward = self.forwards[decoder_layer]
        self._offload(args, kwargs)
        while self.driver.switch(decoder_layer) == _REPLAY:
            # the layer may change its arguments in place without the batch noticing
            copies = (value.clone() if isinstance(value, Tensor) else value for value in args)
            self._show_output(layer_forward(*copies, **kwargs))
        for visitor in self.visitors:
            layer_forward = visitor.wrap_forward(decoder_layer, layer_forward)
        return self._show_output(layer_forward(*args, **kwargs))

    def _show_output(self, output: Any) -> Any:
        for visitor in self.visitors:
            visitor.on_layer_output(output)
        return output

    def _after(self, decoder_layer: str, module: nn.Module, args: Any, output: Any) -> None:
        if self.waiting <= {decoder_layer}:
            self.driver.switch(None)  # the pass is done: skip the rest, above all the head


def _outside_keys(partial: PartialModel, layer_names: tuple[str, ...]) -> dict[str, list[str]]:
    """Return by module, outside the decoder layers and blocks `layer_names`, the tensors that its forward may use."""
    model, head = partial.model, head_of(partial.model)
    keys_of = dict[str, list[str]]()
    direct: dict[str, list[str]] = {}  # tensors by the module that owns them
    for key in model.state_dict():  # a head of multi-token prediction has its embedding replaced
        direct.setdefault(key.rpartition(".")[0], []).append(key)
    for name, module in model.named_modules():
        if decoder_layer_of(f"{name}.", layer_names):
            continue
        prefix = f"{name}." if name else ""
        children = [f"{prefix}{child_name}" for child_name, child in module.named_children() if child is not head]
        owners = [name, *(child for child in children if child not in layer_names)]
        if keys := [key for owner in owners for key in direct.get(owner, ())]:
            keys_of[name] = keys
    return keys_of


def _release_embedding(partial: PartialModel) -> None:
    """Give back the token embedding, often larger than a layer; one that a later part of the model shares stays."""
    model = partial.model
    names = {module: name for name, module in model.named_modules()}
    embedding = names[model.get_input_embeddings()]
    known = {embedding, names.get(head_of(model), embedding)}
    for pair in partial.tied.items():
        sharing = {name.rpartition(".")[0] for name in pair}
        if embedding in sharing and not sharing <= known:
            return
    partial.release(embedding)


Loss = Callable[[int, Any], Tensor]  # (batch, the model's output) -> its share of the loss


class ReverseVisitor(LayerVisitor):
    """Base of what acts along a reverse pass, on the way forward and on the way back.

    `on_layer_loaded` is called on both ways, so that weights changed there are changed for both; parameters ask for no
    gradients unless a visitor has them do so there.
    """

    def replaying(self, decoder_layer: str, batch: int) -> None:
        """Act before a batch passes the layer once more, with gradients."""

    def returned(self, decoder_layer: str, batch: int) -> None:
        """Act when the loss's gradient has come back through the layer for a batch; requested `.grad` are set."""

    def done(self, decoder_layer: str) -> None:
        """Act when all batches have come back through the layer, which is still loaded."""


@dataclass(frozen=True, slots=True)
class ReversePass:
    """`batches` (token ids [B, L]) forward through all decoder layers and back, one layer in memory at a time.

    Hidden states that one layer hands to the next are all that may carry a gradient from layer to layer: `run` refuses
    an architecture of another kind.
    """

    model: OpenModel
    batches: Sequence[Tensor]
    activation_budget: int = DEFAULT_ACTIVATION_BUDGET

    def run(self, loss: Loss, *visitors: ReverseVisitor) -> list[float]:
        """Carry out the pass and return each batch's loss, of which the sum is what the gradients are of.

        Raises `CompressionError` if gradients go from layer to layer in another way than in hidden states.
        """
        inside = tuple(f"{decoder_layer}." for decoder_layer in self.model.architecture.decoder_layers)
        if shared := next((key for key in self.model.partial.tied if key.startswith(inside)), None):
            raise _another_way(self.model.partial, f"{shared} shares its weights with another layer")
        calls = _Calls(self, loss)
        forward = Pass(
            self.model,
            self.batches,
            to_end=True,
            gradients=True,
            activation_budget=self.activation_budget,
        )
        forward.run(*visitors, calls)
        try:
            for decoder_layer in reversed(self.model.architecture.decoder_layers):
                self._reverse(decoder_layer, calls, visitors)
        finally:
            self.model.partial.release("")
        return calls.losses

    def _reverse(self, decoder_layer: str, calls: "_Calls", visitors: Sequence[ReverseVisitor]) -> None:
        """Load a layer and hand the gradients of all batches down through it."""
        partial, layer_names = self.model.partial, self.model.architecture.decoder_layers
        partial.load(partial.keys_under(decoder_layer))
        calls.at.layer = decoder_layer
        if (number := layer_names.index(decoder_layer)) > 0:
            partial.read_ahead(partial.keys_under(layer_names[number - 1]))
        module = partial.model.get_submodule(decoder_layer)
        for visitor in visitors:
            visitor.on_layer_loaded(decoder_layer)
        for batch in range(len(self.batches)):
            calls.at.batch = batch
            for visitor in visitors:
                visitor.replaying(decoder_layer, batch)
            layer_forward: Forward = module.forward
            for visitor in visitors:
                layer_forward = visitor.wrap_forward(decoder_layer, layer_forward)
            calls.hand_down(decoder_layer, batch, layer_forward)
            for visitor in visitors:
                visitor.returned(decoder_layer, batch)
        for visitor in visitors:
            visitor.done(decoder_layer)
        partial.release(decoder_layer)
        give_back()


class _Calls(LayerVisitor):
    """The arguments of every batch's call of every layer, the losses, and the gradients that wait between layers."""

    def __init__(self, run: ReversePass, loss: Loss) -> None:
        count = len(run.batches)
        self.partial, self.loss, self.offload = run.model.partial, loss, ActivationOffload(run.activation_budget)
        self.held: dict[tuple[str, int], Arguments] = {}
        self.left: list[list[Tensor]] = [[] for _ in range(count)]  # what layers put into containers, by batch
        self.outputs: list[list[Tensor]] = [[] for _ in range(count)]  # of the last layer passed, by batch
        self.gradients = [torch.empty(0)] * count  # of the loss, at the hidden states that come out of a layer
        self.losses = [0.0] * count
        self.strayed = list[str]()

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        """Return the layer's forward, with its call kept and its outputs made leaves from which gradients start."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            (name, hidden), *others = as_arguments(args, kwargs)
            self._refuse_other_ways(decoder_layer, hidden, others)
            saved = hidden.detach().to("cpu", copy=True)  # the layer may write into what it is given
            self.offload.keep((decoder_layer, self.at.batch), saved)
            as_now = [(name, saved)]
            for key, value in others:  # containers are copied, should the layer write into one
                as_now.append((key, copy.copy(value) if isinstance(value, MutableMapping | list) else value))
            self.held[decoder_layer, self.at.batch] = tuple(as_now)
            before = {id(value) for value in _tensors(others)}
            with torch.no_grad():
                output = layer_forward(*args, **kwargs)
            for value in _tensors(others):  # for later layers, if any asks
                if id(value) not in before and value.is_floating_point():
                    self.left[self.at.batch].append(value)
            output = tree_map_only(Tensor, _as_leaf, output)
            self.outputs[self.at.batch] = _tensors(output)
            return output

        return forward

    def _refuse_other_ways(self, decoder_layer: str, hidden: Any, others: Sequence[tuple[str | None, Any]]) -> None:
        """Raise unless the hidden states are the outputs of the layer before, and nothing else hangs on it."""
        before = self.outputs[self.at.batch]
        if before and hidden is not before[0]:
            raise _another_way(
                self.partial, f"{decoder_layer} is not given the hidden states that the layer before outputs"
            )
        if any(value.requires_grad for value in _tensors(others)):
            raise _another_way(
                self.partial, f"{decoder_layer} is given more of earlier layers than their hidden states"
            )
        for leaf in (value for value in before if value.requires_grad):  # reached through the layers' replay alone
            leaf.register_hook(lambda _, decoder_layer=decoder_layer: self.strayed.append(decoder_layer))

    def on_batch_end(self, batch: int, output: Any) -> None:
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

    def hand_down(self, decoder_layer: str, batch: int, layer_forward: Forward) -> None:
        """Replay a batch's call of a layer with gradients, and send the gradient of its output back through it."""
        (name, saved), *others = self.held.pop((decoder_layer, batch))
        hidden = saved.to(self.partial.device).requires_grad_()
        gradient = self.gradients[batch].to(self.partial.device)
        with torch.enable_grad():
            for value in self.left[batch]:
                value.requires_grad_()
            args, kwargs = as_call([(name, hidden.clone()), *others])  # a layer may write into it, but not into a leaf
            output = hidden_of(layer_forward(*args, **kwargs))
        output.backward(gradient)
        if any(value.grad is not None for value in self.left[batch]):
            raise _another_way(
                self.partial, f"{decoder_layer} is given more of earlier layers than their hidden states"
            )
        self.offload.forget((decoder_layer, batch))
        self._keep_gradient(batch, hidden)

    def _keep_gradient(self, batch: int, hidden: Tensor) -> None:
        gradient = (torch.zeros_like(hidden) if hidden.grad is None else hidden.grad).cpu()
        self.offload.keep(batch, gradient)
        self.gradients[batch] = gradient


def _as_leaf(value: Tensor) -> Tensor:
    """Return a tensor at which gradients that come back to it end."""
    return value.detach().requires_grad_(value.is_floating_point())


def _another_way(partial: PartialModel, how: str) -> CompressionError:
    return CompressionError(
        f"{type(partial.model).__name__}: {how}, so gradients cannot be taken layer by layer; use what needs "
        "none, or takes them in memory"
    )


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value, also in mappings of the stock code's own."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []
