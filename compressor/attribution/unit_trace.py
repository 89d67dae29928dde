"""One decoder layer run on one batch with traced tensors: what it adds to the residual stream, and to its routers.

The layer's own forward runs. Modules with weight matrices (attention, MLPs, the experts) are components: they get
plain tensors, and their output begins a term. Modules without (norms, residual scalings) rescale terms. A router's
first matrix product with as many rows as experts gives the logits that are decomposed.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compressor.attribution.tracing import Context, Term, Traced, plain, untraced
from compressor.distributed import here
from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.model.experts import Watch
from compressor.model.streaming import Forward, LayerVisitor

STREAM = "stream"
HEAD_SIZES = ("v_head_dim", "head_v_dim", "head_dim")


@dataclass(frozen=True, slots=True)
class RanExpert:
    """One expert's outputs [n, H] before its gate weights [n], for its tokens: rows [n]."""

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
    """Input [T, heads * size] of an attention's output projection, its weight [H, heads * size] and bias [H]."""

    inputs: Tensor
    weight: Tensor
    heads: int
    bias: Tensor | None = None

    def span(self, head: int) -> slice:
        """A head's columns of inputs and weight."""
        size = self.inputs.shape[-1] // self.heads
        return slice(head * size, (head + 1) * size)


@dataclass(slots=True)
class UnitTrace:
    """One batch's pass through a layer. Leaves are named by module; the stream's is `STREAM`."""

    context: Context
    terms: tuple[Term, ...] = ()  # of the layer's output
    logits: dict[str, Logits | None] = field(default_factory=dict)  # by experts module; None: no product as wide
    routed: dict[str, list[RanExpert]] = field(default_factory=dict)
    heads: dict[str, Heads] = field(default_factory=dict)  # by attention module


def parts_of(unit: str, module: nn.Module, layers: Sequence[MoeLayer]) -> dict[str, str]:
    """The components of a decoder layer: its topmost modules with weight matrices that hold no router or experts.

    Returns the kind of each by its full name: attention, mlp, shared or expert. A bare linear module, as into and out
    of a latent space of the experts, is a step of a term and not a component.
    """
    inner = {name for layer in layers for name in (layer.name, layer.router)}
    experts = {layer.name for layer in layers}

    def walk(name: str, owner: nn.Module) -> Iterator[tuple[str, str]]:
        for child_name, child in owner.named_children():
            full = f"{name}.{child_name}"
            if full in experts:
                yield full, "expert"
            elif any(entry.startswith(f"{full}.") for entry in inner):
                yield from walk(full, child)
            elif full in inner or isinstance(child, nn.Linear):
                continue
            elif any(parameter.dim() > 1 for parameter in child.parameters()):
                yield full, _kind(child, bool(layers))

    return dict(walk(unit, module))


def _kind(module: nn.Module, in_moe_layer: bool) -> str:
    """A token mixer takes masks, positions or a cache beside its input; an MLP its input alone."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = [entry.kind not in variadic for entry in inspect.signature(type(module).forward).parameters.values()]
    if sum(taken) > 2:  # more than self and the hidden states
        return "attention"
    return "shared" if in_moe_layer else "mlp"


def router_width(layer: MoeLayer) -> int:
    """Rows of a router's last matrix: its experts, and what it scores beside them."""
    extra = [tensor.extra for tensor in layer.tensors if tensor.key.startswith(f"{layer.router}.")]
    return layer.experts + max(extra, default=0)


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
    """Run a layer's `own` forward on its arguments; returns its plain output and the trace."""
    hidden = args[0] if args else kwargs["hidden_states"]
    trace = UnitTrace(Context(hidden.shape[:-1].numel()))
    start = trace.context.start(STREAM, hidden)
    args, kwargs = ((start, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": start})
    with ExitStack() as stack:
        for part, kind in parts_of(unit, model.get_submodule(unit), layers).items():
            for remove in _watch_part(part, kind, model.get_submodule(part), trace):
                stack.callback(remove)
        for layer in layers:
            for remove in _watch_layer(layer, model, trace):
                stack.callback(remove)
        output = own(*args, **kwargs)
    first = output[0] if isinstance(output, tuple) else output
    if isinstance(first, Traced):
        trace.terms = first.terms
    return untraced(output), trace


def _watch_part(part: str, kind: str, module: nn.Module, trace: UnitTrace) -> Iterator[Callable[[], None]]:
    """Give a component plain tensors and let its output begin a term; yields what removes each hook."""
    context = trace.context
    mixed: tuple[Heads, Tensor] | None = None  # by the last linear module that mixes heads, with its output

    def mix(linear: nn.Linear, args: Any, output: Tensor) -> None:
        nonlocal mixed
        heads = head_count(module, linear)
        if heads is not None and context.fits(args[0]):
            mixed = Heads(args[0].reshape(context.tokens, -1), linear.weight, heads, linear.bias), output

    def begin(_: Any, args: Any, output: Any) -> Any:
        nonlocal mixed
        first = output[0] if isinstance(output, tuple) else output
        if not context.fits(first):
            return output
        if mixed is not None:  # heads count one by one if the attention's output is its projection's, unchanged
            (heads, projected), mixed = mixed, None
            if projected.numel() == first.numel() and torch.equal(projected.reshape(first.shape), first):
                trace.heads[part] = heads
        begun = context.start(part, first)
        return (begun, *output[1:]) if isinstance(output, tuple) else begun

    yield module.register_forward_pre_hook(lambda _, *inputs: untraced(inputs), with_kwargs=True).remove
    yield module.register_forward_hook(begin).remove
    for child in module.modules() if kind == "attention" else ():
        if isinstance(child, nn.Linear):
            yield child.register_forward_hook(mix).remove


def _watch_layer(layer: MoeLayer, model: nn.Module, trace: UnitTrace) -> Iterator[Callable[[], None]]:
    """Keep the experts' outputs, the router's first matrix product with a column for each, and its choices."""
    width, products = router_width(layer), list[tuple[Tensor, tuple[Term, ...]]]()

    def keep(value: Tensor, terms: tuple[Term, ...]) -> None:
        if value.shape[-1] == width and not products:
            products.append((value.detach().reshape(-1, width)[:, : layer.experts].float(), terms))

    def before(module: Any, args: Any) -> None:
        trace.context.on_product = keep

    def after(args: Any, kwargs: Any, output: Any) -> None:
        trace.context.on_product = None
        trace.logits[layer.name] = None
        if products:
            value, terms = products[0]
            trace.logits[layer.name] = Logits(value, terms, plain(output[2]).reshape(len(value), -1))

    yield model.get_submodule(layer.router).register_forward_pre_hook(before).remove
    routed = trace.routed.setdefault(layer.name, [])
    watch = Watch(model, layer, on_router=after, on_expert_output=lambda *seen: routed.append(RanExpert(*seen)))
    yield watch.attach().detach


class TracedPass(LayerVisitor):
    """Has every batch pass every layer traced, and shows `visit` the trace of each.

    What `visit` refuses is raised once all batches have passed the layer, by all ranks alike.
    """

    fault: tuple[int, str] | None = None  # of the first batch that was refused

    def visit(self, unit: str, batch: int, trace: UnitTrace) -> None:
        """Look at a layer's trace on a batch; may raise `CompressionError`."""
        raise NotImplementedError

    def replaced(self, unit: str, own: Forward) -> Forward:
        """The layer's own forward, traced."""

        def traced(*args: Any, **kwargs: Any) -> Any:
            output, trace = trace_unit(self.at.model, unit, self.at.moe_layers, own, args, kwargs)
            try:
                self.visit(unit, self.at.batch, trace)
            except CompressionError as error:
                self.fault = self.fault or (self.at.batch, str(error))
            return output

        return traced

    def finish(self, unit: str) -> None:
        """Every batch of this rank has passed the layer."""

    def passed(self, unit: str) -> None:
        """Finish the layer, and refuse together what any rank has refused."""
        self.finish(unit)
        if faults := [fault for fault in here().all_gather(self.fault) if fault is not None]:
            raise CompressionError(min(faults)[1])
