"""Lockstep streaming: all batches run the stock forward, and pause before each layer until it is
loaded.

The `model(input_ids)` of each batch runs in its own greenlet. Every decoder layer's forward first
switches back to the driver, which loads that layer, lets every batch pass it, shows it to the
visitors and empties it again. Masks, position embeddings and the arguments of layers are left to
the stock code."""

import copy
import logging
import tempfile
from collections import defaultdict
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
from contextlib import ExitStack
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
from compressor.frozen import frozen
from compressor.memory import give_back
from compressor.model.architecture import head_of
from compressor.model.inputs import Inputs, forward_inputs, tower_blocks
from compressor.model.loading import PartialModel
from compressor.model.moe_layer import MoeLayer, decoder_layer_of, layers_by_decoder_layer
from compressor.model.opened import OpenModel
from compressor.progress import Progress, Silent

logger = logging.getLogger(__name__)

TINY = torch.finfo(torch.float32).tiny
BUDGET = 4 * 2**30  # largest recorded tensor in memory, in bytes; larger ones go to disk
DEFAULT_ACTIVATION_BUDGET = 4 * 2**30  # bytes of hidden states in memory; more go to disk
Arguments = tuple[tuple[str | None, Any], ...]  # of a call, each after its keyword or None


def allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, budget: int = BUDGET
) -> Tensor:
    """Return an uninitialised tensor; on the CPU, one above the budget is in a mapped, unlinked
    file."""
    count = torch.Size(shape).numel()
    if device.type != "cpu" or count * dtype.itemsize <= budget:
        return torch.empty(shape, dtype=dtype, device=device)
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(count * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)


class ActivationOffload:
    """Moves hidden states waiting between layers into mapped, unlinked files when they exceed a
    budget of bytes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        # bytes in memory by key: a batch, or a batch's call of a layer
        self.held: dict[Hashable, int] = {}
        self.total = 0

    def keep(self, key: Hashable, value: Any) -> None:
        """Count a waiting tensor if it is of floating point on the CPU, and move it in place if
        there is no room."""
        if isinstance(value, Tensor) and value.is_floating_point() and value.device.type == "cpu":
            self.forget(key)
            if value.numel() and self.total + value.nbytes > self.budget:
                mapped = allocate(tuple(value.shape), value.dtype, value.device, budget=0)
                value.data = mapped.copy_(value)
            else:
                self.held[key] = value.nbytes
                self.total += value.nbytes

    def forget(self, key: Hashable) -> None:
        """Stop counting the tensor with this key."""
        self.total -= self.held.pop(key, 0)


def token_dim(value: Any, tokens: int) -> int | None:
    """Return the dimension of tokens in a router's argument: 0 of [T, ...], 1 of [B, L, ...], or
    None."""
    if isinstance(value, Tensor):
        if value.dim() >= 1 and len(value) == tokens:
            return 0
        if value.dim() >= 2 and value.shape[:2].numel() == tokens:
            return 1
    return None


def as_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Return a call's arguments in order, each after its keyword or None."""
    return (*((None, value) for value in args), *kwargs.items())


def as_call(arguments: Iterable[tuple[str | None, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments, reversing `as_arguments`."""
    positional = []
    by_keyword = {}
    for name, value in arguments:
        if name is None:
            positional.append(value)
        else:
            by_keyword[name] = value
    return tuple(positional), by_keyword


def picked(value: Tensor, rows: Tensor) -> Tensor:
    """Return rows [n, ...] by positions that may be on another device; indexing would take five
    times as long."""
    return value.index_select(0, rows.to(value.device))


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states, [B, L, H] or several a token, in the output of a decoder layer."""
    return _tensors(output)[0]


def stream_weights(hidden: Tensor, tokens: int) -> Tensor:
    """Return the weight of an error after a layer, 1 / ||h||^2 of each token: [B, L, ...] ->
    [tokens], float64.

    Later layers see hidden states divided by their size. If the experts see other tokens than the
    layer, all tokens get the mean."""
    states = as_float64(hidden.detach().flatten(0, 1).flatten(1))
    weights = 1 / states.square().sum(-1).clamp(min=TINY)
    return weights if len(weights) == tokens else weights.mean().expand(tokens)


_REPLAY = "replay"
_SILENT = Silent()

Forward = Callable[..., Any]
Replay = Callable[..., None]  # (numbers of batches, maybe a forward in place of the layer's own)


@dataclass
class PassPosition:
    """The current position of a pass, shared by its visitors."""

    model: Any  # the live modules, with one decoder layer loaded
    by_layer: Mapping[str, Sequence[MoeLayer]]  # the MoE layers of each decoder layer that has any
    layer: str = ""  # name of the loaded decoder layer; "" before the first and after the last
    batch: int = 0  # number of the batch that is running, or ran last

    @property
    def moe_layers(self) -> Sequence[MoeLayer]:
        """The loaded decoder layer's MoE layers, often one."""
        return self.by_layer.get(self.layer, ())


class LayerVisitor:
    """Base class of visitors of a streamed pass; every method does nothing by default.

    Each method is called on all visitors of a pass in order, with the names of layers and the
    numbers of batches. The pass sets `at` to its position."""

    at: PassPosition
    repeatable: ClassVar[bool] = False  # may see a layer several times, as some models run it

    def on_layer_loaded(self, decoder_layer: str) -> None:
        """Act when a layer has been loaded and every batch has reached it."""

    def before_layer(self, decoder_layer: str, replay: Replay) -> None:
        """Act when all visitors have seen the layer loaded, before any batch passes it.

        `replay(numbers)` runs these batches through the layer without moving them on;
        `replay(numbers, forward)` calls another forward in its place."""

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        """Return the forward that replaces `layer_forward` for the running batch, except in
        replays."""
        return layer_forward

    def on_batch_start(self, batch: int) -> None:
        """Act before a batch runs to the first layer, through a layer to the next, in a replay, or
        to the output."""

    def on_layer_output(self, output: Any) -> None:
        """Act on a batch's output of the layer's forward or its replacement, also in replays
        (`hidden_of`)."""

    def on_layer_end(self, decoder_layer: str) -> None:
        """Act when every batch has passed the layer, which is still loaded."""

    def on_batch_end(self, batch: int, output: Any) -> None:
        """Act when a batch has reached the model's output."""


@frozen
class Pass:
    """One pass of `batches` (token ids [B, L]) through a model's decoder layers, one of them in
    memory at a time.

    It ends with the last decoder layer that is `wanted`, or has an MoE layer. With `to_end`, all
    batches go on to the model's output, and otherwise those numbered in `finishing`. A `phase` is
    reported to `progress`, layer by layer. With a `seed`, torch's random state is forked for the
    pass and seeded. If `shared`, each of several processes runs its share of the batches, or with
    `share` those with these numbers; visitors see only these."""

    model: OpenModel
    batches: Sequence[Tensor]
    progress: Progress = _SILENT
    phase: str = ""
    seed: int | None = None
    to_end: bool = False
    finishing: Collection[int] = ()
    wanted: Collection[str] | None = None  # decoder layers
    shared: bool = False
    share: Collection[int] | None = None
    gradients: bool = False  # enabled in the stock code around the layers
    activation_budget: int = DEFAULT_ACTIVATION_BUDGET

    def run(self, *visitors: LayerVisitor) -> None:
        """Carry out the whole pass; in the end nothing is loaded."""
        for _ in self.layers(*visitors):
            pass

    def layers(self, *visitors: LayerVisitor) -> Generator[str, None, None]:
        """Yield each layer's name after every batch has passed it, still loaded.

        Nothing stays loaded when the generator is exhausted or closed.
        """
        lengths = [batch.shape[1] for batch in self.batches]
        _warn_beyond_positions(max(lengths, default=0), self.model.positions)
        lockstep = _Lockstep(self, visitors)
        layer_names = self.model.architecture.decoder_layers
        with torch.random.fork_rng(devices=[], enabled=self.seed is not None):
            try:
                if self.phase:
                    numbers = map(layer_names.index, lockstep.waiting)
                    self.progress.start(self.phase, max(numbers, default=-1) + 1)
                if self.seed is not None:
                    torch.manual_seed(self.seed)
                for decoder_layer in lockstep.layers():
                    yield decoder_layer
                    if self.phase:
                        self.progress.advance(decoder_layer)
            finally:  # end all batches, and leave the model empty and as it was
                for run in lockstep.runs.values():
                    if run:
                        run.throw(GreenletExit)
                lockstep.changes.close()
                lockstep.partial.release("")


@cache
def _warn_beyond_positions(length: int, positions: int | None) -> None:
    """Warn once about sequences that are longer than the model was made for."""
    if positions is not None and length > positions:
        text = "sequences of %d tokens go beyond the %d positions that the model was made for; %s"
        logger.warning(text, length, positions, "what comes after them may be nonsense")


class _Lockstep:
    """One pass: the batches, each in its own greenlet, and the forwards that pause them before
    every layer."""

    def __init__(self, run: Pass, visitors: Sequence[LayerVisitor]) -> None:
        self.run = run
        self.visitors = visitors
        self.driver = getcurrent()
        architecture = run.model.architecture
        self.partial = run.model.partial
        self.model = self.partial.model
        self.decoder_layers = architecture.decoder_layers
        self.position = PassPosition(self.model, layers_by_decoder_layer(architecture.layers))
        for visitor in visitors:
            visitor.at = self.position
        self.finishing = range(len(run.batches)) if run.to_end else run.finishing
        everything = self.decoder_layers if self.finishing else self.position.by_layer
        self.waiting = set(everything if run.wanted is None else run.wanted)
        self.offload = ActivationOffload(run.activation_budget)
        self.before_layers = True
        self.changes = ExitStack()  # to the modules, undone when it is closed
        # the tower by block: pictures and sound pass towers before the decoder layers
        self.blocks = dict[str, str]()
        if any(isinstance(batch, Inputs) for batch in run.batches):
            self.blocks = tower_blocks(self.model, self.decoder_layers)
        paused = (*self.decoder_layers, *self.blocks)
        for name in paused:
            module: Any = self.model.get_submodule(name)
            module.forward = bind(self._pass, name, module.forward)
            self.changes.callback(module.__dict__.pop, "forward", None)
            if name not in self.blocks:
                hook = module.register_forward_hook(bind(self._after, name))
                self.changes.enter_context(hook)
        # other modules load the tensors that their forward may use
        head = head_of(self.model)
        direct = defaultdict(list)  # tensors by the module that owns them
        for key in self.model.state_dict():  # a multi-token-prediction head has another embedding
            direct[key.rpartition(".")[0]].append(key)
        for name, module in self.model.named_modules():
            if decoder_layer_of(f"{name}.", paused):
                continue
            keys = [*direct[name]]
            for child_name, child in module.named_children():
                owner = f"{name}.{child_name}".removeprefix(".")
                if child is not head and owner not in paused:
                    keys += direct[owner]
            if keys:
                hook = module.register_forward_pre_hook(
                    lambda *_, keys=keys: self.partial.load(keys)
                )
                self.changes.enter_context(hook)
        share = ranks().share(run.batches) if run.shared else run.share
        numbers = range(len(run.batches)) if share is None else sorted(share)
        self.runs = {number: greenlet(self._run) for number in numbers}

    def layers(self) -> Iterator[str]:
        """Load, pass, yield and release layers one by one, up to the last one wanted, then finish
        batches."""
        # run every batch to its first decoder layer, with one block of a tower loaded at a time
        reached = {number: self._resume(number, number) for number in self.runs}
        while True:
            block = next((module for module in reached.values() if module in self.blocks), None)
            if block is None:
                break
            for number, module in reached.items():
                if module == block:
                    reached[number] = self._resume(number)
            self.partial.release(block)
        self.before_layers = False
        standing = list(reached.values())
        # the token embedding is often larger than a layer; a later part of the model may share it
        names = {module: name for name, module in self.model.named_modules()}
        embedding = names[self.model.get_input_embeddings()]
        known = {embedding, names.get(head_of(self.model), embedding)}
        shared = set()  # modules of weights that are tied to it
        for pair in self.partial.tied.items():
            owners = {key.rpartition(".")[0] for key in pair}
            if embedding in owners:
                shared |= owners
        if shared <= known:
            self.partial.release(embedding)
        for tower in set(self.blocks.values()):
            self.partial.release(tower)
        following = dict(pairwise(self.decoder_layers))
        passed = set()
        # ranks keep in step
        idle = iter(() if ranks().is_alone or standing else self.decoder_layers)

        def replay(numbers: Iterable[int], layer_forward: Forward | None = None) -> None:
            for number in numbers:
                if number in self.runs:
                    self._resume(number, layer_forward or _REPLAY)

        while True:
            decoder_layer = standing[0] if standing else next(idle, None)
            if decoder_layer is None:
                break
            if any(layer != decoder_layer for layer in standing):
                raise CompressionError(
                    f"batches took different ways through the model at {decoder_layer}; this "
                    "architecture cannot be streamed"
                )
            if decoder_layer in passed and not all(visitor.repeatable for visitor in self.visitors):
                raise self._another_run(decoder_layer)
            passed.add(decoder_layer)
            self.partial.load(self.partial.keys_under(decoder_layer))
            self.position.layer = decoder_layer
            if decoder_layer in following and self.waiting - {decoder_layer}:
                self.partial.read_ahead(self.partial.keys_under(following[decoder_layer]))
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
        for number in self.finishing:
            if number in self.runs:
                output = self._resume(number)
                if isinstance(output, str):  # it stands before a layer, after the last one
                    raise self._another_run(output)
                for visitor in self.visitors:
                    visitor.on_batch_end(number, output)

    def _another_run(self, decoder_layer: str) -> CompressionError:
        return CompressionError(
            f"{type(self.model).__name__} runs {decoder_layer} more than once in a forward, so it "
            "cannot be calibrated or measured layer by layer; use a strategy that needs no "
            "calibration, such as model-centric"
        )

    def _resume(self, number: int, *values: Any) -> Any:
        """Resume a batch until it reaches a layer; return that layer's name, or the result of its
        greenlet."""
        self.position.batch = number
        for visitor in self.visitors:
            visitor.on_batch_start(number)
        with torch.set_grad_enabled(self.run.gradients):
            return self.runs[number].switch(*values)

    def _run(self, number: int) -> Any:
        inputs = forward_inputs(self.run.batches[number], self.partial.device, self.partial.dtype)
        return self.model(**inputs, use_cache=False)

    def _pass(self, name: str, layer_forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a decoder layer when it is loaded: for each replay, and then for the batch's own
        output.

        A block of a tower runs once; blocks that layers call later are loaded as they run."""
        if name not in self.blocks or self.before_layers:
            # hidden states that exceed the budget go to disk
            self.offload.keep(self.position.batch, next(iter((*args, *kwargs.values())), None))
        if name in self.blocks:
            if self.before_layers:
                self.driver.switch(name)
            self.partial.load(self.partial.keys_under(name))
            return layer_forward(*args, **kwargs)
        while True:
            replayed = self.driver.switch(name)
            forward = replayed if callable(replayed) else layer_forward
            called: Sequence[Any] = args
            if replayed:
                # copied because the layer may change its arguments in place
                called = [value.clone() if isinstance(value, Tensor) else value for value in args]
            else:
                for visitor in self.visitors:
                    forward = visitor.wrap_forward(name, forward)
            output = forward(*called, **kwargs)
            for visitor in self.visitors:
                visitor.on_layer_output(output)
            if not replayed:
                return output

    def _after(self, decoder_layer: str, module: nn.Module, args: Any, output: Any) -> None:
        # after the hooks of visitors, which may watch the whole layer
        if self.waiting <= {decoder_layer}:
            self.driver.switch(None)  # the pass is done; skip the rest, above all the head


GIVEN_MORE = "is given more of earlier layers than their hidden states"
Loss = Callable[[int, Any], Tensor]  # (batch, the model's output) -> its share of the loss


class ReverseVisitor(LayerVisitor):
    """Base class of visitors of a reverse pass, on the way forward and on the way back.

    `on_layer_loaded` is called on both ways, so weights changed there are changed for both.
    Parameters require no gradients unless a visitor sets this there."""

    def before_reverse(self, decoder_layer: str, batch: int) -> None:
        """Act before a batch passes the layer once more, with gradients."""

    def on_gradient(self, decoder_layer: str, batch: int) -> None:
        """Act when the gradient of a batch's loss has passed back through the layer; requested
        `.grad` are set."""

    def on_reverse_end(self, decoder_layer: str) -> None:
        """Act when all gradients have passed back through the layer, which is still loaded."""


@frozen
class ReversePass:
    """`batches` (token ids [B, L]) forward through all decoder layers and back, one layer in memory
    at a time.

    Only the hidden states that a layer passes to the next may carry a gradient: `run` refuses other
    architectures."""

    model: OpenModel
    batches: Sequence[Tensor]
    activation_budget: int = DEFAULT_ACTIVATION_BUDGET

    def run(self, loss: Loss, *visitors: ReverseVisitor) -> list[float]:
        """Carry out the pass and return each batch's loss; gradients are those of the sum.

        Raises `CompressionError` if gradients pass between layers in another way than in hidden
        states."""
        partial = self.model.partial
        layer_names = self.model.architecture.decoder_layers
        for key in partial.tied:
            if decoder_layer_of(key, layer_names):
                raise _another_way(partial, f"{key} shares its weights with another layer")
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
            for number, decoder_layer in reversed([*enumerate(layer_names)]):
                partial.load(partial.keys_under(decoder_layer))
                calls.at.layer = decoder_layer
                if number > 0:
                    partial.read_ahead(partial.keys_under(layer_names[number - 1]))
                for visitor in visitors:
                    visitor.on_layer_loaded(decoder_layer)
                for batch in range(len(self.batches)):
                    calls.at.batch = batch
                    for visitor in visitors:
                        visitor.before_reverse(decoder_layer, batch)
                    layer_forward: Forward = partial.model.get_submodule(decoder_layer).forward
                    for visitor in visitors:
                        layer_forward = visitor.wrap_forward(decoder_layer, layer_forward)
                    calls.pass_back(decoder_layer, layer_forward)
                    for visitor in visitors:
                        visitor.on_gradient(decoder_layer, batch)
                for visitor in visitors:
                    visitor.on_reverse_end(decoder_layer)
                partial.release(decoder_layer)
                give_back()
        finally:
            partial.release("")
        return calls.losses


class _Calls(LayerVisitor):
    """The arguments of every call of a layer by a batch, the losses, and the gradients waiting
    between layers."""

    def __init__(self, run: ReversePass, loss: Loss) -> None:
        count = len(run.batches)
        self.partial = run.model.partial
        self.loss = loss
        self.offload = ActivationOffload(run.activation_budget)
        self.held: dict[tuple[str, int], Arguments] = {}
        # tensors that layers put into containers, by batch
        self.left: list[list[Tensor]] = [[] for _ in range(count)]
        # of the last layer passed, by batch
        self.outputs: list[list[Tensor]] = [[] for _ in range(count)]
        self.gradients = [torch.empty(0)] * count  # of the loss, at the output of a layer
        self.losses = [0.0] * count
        self.strayed = list[str]()

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        """Return the layer's forward, which keeps its call, and whose outputs are leaves for
        gradients."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            (name, hidden), *others = as_arguments(args, kwargs)
            # the layer may depend on earlier ones only by the hidden states of the previous one
            outputs = self.outputs[self.at.batch]
            if outputs and hidden is not outputs[0]:
                raise _another_way(
                    self.partial,
                    f"{decoder_layer} is not given the hidden states that the layer before outputs",
                )
            if any(value.requires_grad for value in _tensors(others)):
                raise _another_way(self.partial, f"{decoder_layer} {GIVEN_MORE}")
            for value in outputs:  # only replays of layers may reach them
                if value.requires_grad:
                    value.register_hook(lambda _: self.strayed.append(decoder_layer))
            saved = hidden.detach().to("cpu", copy=True)  # the layer may write into its arguments
            self.offload.keep((decoder_layer, self.at.batch), saved)
            as_now = [(name, saved)]
            for key, value in others:  # the layer may write into containers, too
                is_container = isinstance(value, MutableMapping | list)
                as_now.append((key, copy.copy(value) if is_container else value))
            self.held[decoder_layer, self.at.batch] = tuple(as_now)
            before = {id(value) for value in _tensors(others)}
            with torch.no_grad():
                output = layer_forward(*args, **kwargs)
            for value in _tensors(others):  # a later layer may use them
                if id(value) not in before and value.is_floating_point():
                    self.left[self.at.batch].append(value)
            # gradients end at the outputs
            output = tree_map_only(
                Tensor,
                lambda value: value.detach().requires_grad_(value.is_floating_point()),
                output,
            )
            self.outputs[self.at.batch] = _tensors(output)
            return output

        return forward

    def on_batch_end(self, batch: int, output: Any) -> None:
        """Compute the loss of a batch that has reached the output, and its gradient at the last
        layer's output."""
        hidden, *others = self.outputs[batch]
        with torch.enable_grad():
            loss = self.loss(batch, output)
        self.losses[batch] = float(loss.detach())
        if loss.requires_grad:
            loss.backward()
        self.outputs[batch] = []
        if self.strayed or any(value.grad is not None for value in others):
            raise _another_way(
                self.partial, "its output depends on more than the last layer's hidden states"
            )
        self._keep_gradient(batch, hidden)

    def pass_back(self, decoder_layer: str, layer_forward: Forward) -> None:
        """Replay the current batch's call of a layer with gradients, and pass the gradient of its
        output back through it."""
        batch = self.at.batch
        (name, saved), *others = self.held.pop((decoder_layer, batch))
        hidden = saved.to(self.partial.device).requires_grad_()
        gradient = self.gradients[batch].to(self.partial.device)
        with torch.enable_grad():
            for value in self.left[batch]:
                value.requires_grad_()
            # a layer may not write into a leaf
            args, kwargs = as_call([(name, hidden.clone()), *others])
            output = hidden_of(layer_forward(*args, **kwargs))
        output.backward(gradient)
        if any(value.grad is not None for value in self.left[batch]):
            raise _another_way(self.partial, f"{decoder_layer} {GIVEN_MORE}")
        self.offload.forget((decoder_layer, batch))
        self._keep_gradient(batch, hidden)

    def _keep_gradient(self, batch: int, hidden: Tensor) -> None:
        gradient = (torch.zeros_like(hidden) if hidden.grad is None else hidden.grad).cpu()
        self.offload.keep(batch, gradient)
        self.gradients[batch] = gradient


def _another_way(partial: PartialModel, how: str) -> CompressionError:
    return CompressionError(
        f"{type(partial.model).__name__}: {how}, so gradients cannot be taken layer by layer; use "
        "what needs none, or takes them in memory"
    )


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested sequences and mappings, the stock code's own classes
    included."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _tensors(item)]
