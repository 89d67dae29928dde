"""One decoder layer run on one batch with traced tensors: what it adds to the residual stream, and to its routers.

The layer's own forward runs. Modules with weight matrices (attention, MLPs, the experts) are components: they get
plain tensors, and what they put out begins a term. Modules without (norms, residual scalings) rescale terms. A
router's first matrix product with as many rows as experts gives the logits that are decomposed.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compressor.attribution.tracing import Context, Term, Traced, ignore, plain, untraced
from compressor.model.architecture import MoeLayer
from compressor.model.experts import Watch

STREAM = "stream"
HEAD_SIZES = ("v_head_dim", "head_v_dim", "head_dim")


@dataclass(frozen=True, slots=True)
class RanExpert:
    """What one expert put out for its tokens: rows [n], gate weights [n], outputs [n, H] before those weights."""

    expert: int
    rows: Tensor
    weights: Tensor
    outputs: Tensor


@dataclass(frozen=True, slots=True)
class Logits:
    """A router's logits [T, E] with their terms, and the experts [T, K] that it chose."""

    value: Tensor
    terms: tuple[Term, ...]
    chosen: Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """What an attention's output projection was given, [T, heads * size], its weight [H, heads * size] and bias [H]."""

    inputs: Tensor
    weight: Tensor
    heads: int
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Component:
    """A module of the layer that is a component of its own."""

    name: str
    kind: str  # attention, mlp, shared or expert


@dataclass(slots=True)
class UnitTrace:
    """What one batch's pass through a layer showed. Leaves are named by module; the stream's is `STREAM`."""

    context: Context
    terms: tuple[Term, ...] = ()  # of the layer's output
    logits: dict[str, Logits] = field(default_factory=dict)  # by experts module
    routed: dict[str, list[RanExpert]] = field(default_factory=dict)
    heads: dict[str, Heads] = field(default_factory=dict)  # by attention module
    called: set[str] = field(default_factory=set)  # experts modules whose router was called
    projected: dict[str, tuple[Heads, Tensor]] = field(default_factory=dict)  # by attention module, while it runs


def parts_of(unit: str, module: nn.Module, layers: Sequence[MoeLayer]) -> tuple[Component, ...]:
    """The components of a decoder layer: its topmost modules with weight matrices that hold no router or experts.

    A bare linear module, as into and out of a latent space of the experts, is a step of a term and not a component.
    """
    inner = {name for layer in layers for name in (layer.name, layer.router)}
    found: list[Component] = []

    def walk(name: str, owner: nn.Module) -> None:
        for child_name, child in owner.named_children():
            full = f"{name}.{child_name}"
            if full in inner:
                if any(full == layer.name for layer in layers):
                    found.append(Component(full, "expert"))
            elif any(entry.startswith(f"{full}.") for entry in inner):
                walk(full, child)
            elif not isinstance(child, nn.Linear) and any(parameter.dim() > 1 for parameter in child.parameters()):
                found.append(Component(full, _kind(child, bool(layers))))

    walk(unit, module)
    return tuple(found)


def _kind(module: nn.Module, in_moe_layer: bool) -> str:
    """A token mixer takes masks, positions or a cache beside its input; an MLP its input alone."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = [entry.kind not in variadic for entry in inspect.signature(type(module).forward).parameters.values()]
    alone = "shared" if in_moe_layer else "mlp"
    return "attention" if sum(taken) > 2 else alone  # more than self and the hidden states


def router_width(layer: MoeLayer) -> int:
    """Rows of a router's last matrix: its experts, and what it scores beside them."""
    own = [tensor.extra for tensor in layer.tensors if tensor.key.startswith(f"{layer.router}.")]
    return layer.experts + max(own, default=0)


def head_count(attention: nn.Module, projection: nn.Linear) -> int | None:
    """How many heads the output projection mixes; None if the module does not say."""
    for name in HEAD_SIZES:
        size = getattr(attention, name, None)
        if isinstance(size, int) and size > 0 and projection.in_features % size == 0:
            return projection.in_features // size
    return None


def trace_unit(
    model: Any,
    unit: str,
    layers: Sequence[MoeLayer],
    own: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, UnitTrace]:
    """Run a layer's `own` forward on its arguments; returns its plain output and what it showed."""
    hidden = args[0] if args else kwargs["hidden_states"]
    trace = UnitTrace(Context(hidden.shape[:-1].numel()))
    start = trace.context.start(STREAM, hidden)
    args, kwargs = ((start, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": start})
    with ExitStack() as stack:
        for handle in _watch(model, unit, layers, trace):
            stack.callback(handle)
        output = own(*args, **kwargs)
    first = output[0] if isinstance(output, tuple) else output
    if isinstance(first, Traced):
        trace.terms = first.terms
    return untraced(output), trace


def _watch(model: Any, unit: str, layers: Sequence[MoeLayer], trace: UnitTrace) -> Iterator[Callable[[], Any]]:
    """Attach everything; yields what takes it away again."""
    for part in parts_of(unit, model.get_submodule(unit), layers):
        module = model.get_submodule(part.name)
        yield module.register_forward_pre_hook(lambda _, *inputs: untraced(inputs), with_kwargs=True).remove
        yield module.register_forward_hook(partial(_begin, part.name, trace)).remove
        if part.kind == "attention":
            yield from _watch_heads(part.name, module, trace)
    for layer in layers:
        yield from _watch_layer(layer, model, trace)


def _begin(name: str, trace: UnitTrace, module: Any, args: Any, output: Any) -> Any:
    """What the module puts out for the tokens begins a term of its own."""
    first = output[0] if isinstance(output, tuple) else output
    if not trace.context.fits(first):
        return output
    heads, projected = trace.projected.pop(name, (None, first))
    # heads can be told apart if what the attention puts out is its last projection, unchanged
    if heads and projected.numel() == first.numel() and torch.equal(projected.reshape(first.shape), first):
        trace.heads[name] = heads
    begun = trace.context.start(name, first)
    return (begun, *output[1:]) if isinstance(output, tuple) else begun


def _watch_heads(name: str, attention: nn.Module, trace: UnitTrace) -> Iterator[Callable[[], None]]:
    """Note the attention's linear modules that mix heads; the last one may be its output projection."""

    def hook(module: nn.Linear, args: Any, output: Tensor) -> None:
        heads = head_count(attention, module)
        if heads is not None and trace.context.fits(args[0]):
            inputs = args[0].reshape(trace.context.tokens, -1)
            trace.projected[name] = (Heads(inputs, module.weight, heads, module.bias), output)

    for module in attention.modules():
        if isinstance(module, nn.Linear):
            yield module.register_forward_hook(hook).remove


def _watch_layer(layer: MoeLayer, model: nn.Module, trace: UnitTrace) -> Iterator[Callable[[], None]]:
    """Note the experts' outputs, the router's first matrix product with a column for each, and what it chose."""

    def projected(value: Tensor, terms: tuple[Term, ...]) -> None:
        if value.shape[-1] == router_width(layer) and layer.name not in trace.logits:
            flat = value.detach().reshape(-1, value.shape[-1])[:, : layer.experts]
            trace.logits[layer.name] = Logits(flat.float(), terms, torch.zeros(0))

    def before(module: Any, args: Any) -> None:
        trace.called.add(layer.name)
        trace.context.projected = projected

    def after(args: Any, kwargs: Any, output: Any) -> None:
        trace.context.projected = ignore
        if (found := trace.logits.get(layer.name)) is not None:
            trace.logits[layer.name] = replace(found, chosen=plain(output[2]).reshape(len(found.value), -1))

    yield model.get_submodule(layer.router).register_forward_pre_hook(before).remove
    routed = trace.routed.setdefault(layer.name, [])
    watch = Watch(model, layer, on_router=after, on_expert_output=lambda *seen: routed.append(RanExpert(*seen)))
    yield watch.attach().detach
