"""Tensors that know what they are the sum of, and one decoder layer run on them: its own forward tells what adds up.

A `Traced` tensor carries the terms of a sum: components (leaves), each scaled token by token and mapped linearly, by a
chain of steps that act on each token alone. Rows are pulled back through such a chain in float32.
Operations that are linear keep the terms. The result of any other operation is a plain tensor, a constant: so a
norm's statistics are frozen at the values of the whole input, LN(c) = c * gamma / RMS(z), as in "Understanding
Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs" (ICLR 2026), and the terms stay an exact
decomposition.

Modules with weight matrices (attention, MLPs, the experts) are components: they get plain tensors, and their output
begins a term. Modules without (norms, residual scalings) rescale terms. A router's first matrix product with as many
rows as experts gives the logits that are decomposed. T tokens, H width before, H' width after a chain.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.model.experts import Watch
from compressor.model.moe_layer import MoeLayer
from compressor.model.streaming import Forward, LayerVisitor

STREAM = "stream"  # the leaf of what a layer is given
HEAD_SIZES = ("v_head_dim", "head_v_dim", "head_dim")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A linear map of a token's entries: times a `factor` (a number or a vector [H]), or times a `matrix` [H', H].

    Or their `mean` in every entry, or they without it (`centre`).
    """

    kind: Literal["factor", "matrix", "mean", "centre"]
    by: float | Tensor = 1.0

    def pull(self, rows: Tensor) -> Tensor:
        """[M, H'] -> [M, H]: rows whose products with a vector are those of `rows` with its image."""
        if self.kind == "factor":
            return rows * self.by
        if self.kind == "matrix":
            assert isinstance(self.by, Tensor)
            return rows @ self.by.float()
        mean = rows.mean(-1, keepdim=True)
        return mean.expand_as(rows) if self.kind == "mean" else rows - mean

    def is_same(self, other: "Step") -> bool:
        if isinstance(self.by, Tensor) and isinstance(other.by, Tensor):
            return self.kind == other.kind and (self.by is other.by or torch.equal(self.by, other.by))
        return self.kind == other.kind and type(self.by) is type(other.by) and bool(self.by == other.by)


Chain = tuple[Step, ...]


def pull_sum(rows: Tensor, chains: Iterable[Chain]) -> Tensor:
    """[M, H'] -> [M, H]: rows pulled back through a sum of chains."""
    pulled = [reduce(lambda rows, step: step.pull(rows), reversed(chain), rows) for chain in chains]
    return torch.stack(pulled).sum(0)


def same_chains(first: Sequence[Chain], second: Sequence[Chain]) -> bool:
    return [len(chain) for chain in first] == [len(chain) for chain in second] and all(
        a.is_same(b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A component: its values [T, H], or [1, H] where they are the same for every token."""

    name: str
    value: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """One summand: token factor * chain(leaf)."""

    leaf: Leaf
    token: Tensor | None = None  # [T] factor of each token; None: 1
    chain: Chain = ()

    def then(self, step: Step) -> "Term":
        return replace(self, chain=(*self.chain, step))

    def times(self, factor: Tensor) -> "Term":
        return replace(self, token=factor if self.token is None else self.token * factor)


@dataclass(slots=True)
class Context:
    """What all traced tensors of one run of a layer share."""

    tokens: int
    on_product: Callable[[Tensor, tuple[Term, ...]], None] | None = None  # called with every matrix product
    leaves: dict[str, Leaf] = field(default_factory=dict)

    def leaf(self, name: str, value: Tensor) -> Leaf:
        """A new component; a second one of the same name is numbered."""
        unique, number = name, 1
        while unique in self.leaves:
            number += 1
            unique = f"{name} ({number})"
        made = Leaf(unique, value.detach().reshape(-1, value.shape[-1]).clone())  # code may change its values in place
        self.leaves[unique] = made
        return made

    def start(self, name: str, value: Tensor) -> "Traced":
        return _traced(value, (Term(self.leaf(name, value)),), self)

    def fits(self, value: Any) -> bool:
        """Return True for a tensor [..., H] with a row for each token."""
        return (
            isinstance(value, Tensor)
            and value.dim() > 1
            and value.is_floating_point()
            and value.shape[:-1].numel() == self.tokens
        )


class Traced(Tensor):
    """A tensor [..., H] over the context's tokens with the terms that sum to it."""

    terms: tuple[Term, ...]
    context: Context

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            name, target = func.__name__, args[0] if args else None
            seen = tuple(args)
            if name in _IN_PLACE and isinstance(target, Tensor) and not isinstance(target, Traced):
                seen = (target.clone(), *args[1:])  # what a plain tensor held before traced ones were added to it
            result = func(*untraced(tuple(args)), **untraced(given))
            terms = _terms(name, seen, given, result) if isinstance(result, Tensor) else None
            suffixed = name.endswith("_") and not name.endswith("__")
            if isinstance(target, Traced) and (suffixed or name in _IN_PLACE or name in ("__setitem__", "__ipow__")):
                rows = plain(target).reshape(target.context.tokens, -1)
                target.terms = (Term(target.context.leaf("changed in place", rows)),) if terms is None else terms
                return target if isinstance(result, Tensor) else result
            if not isinstance(result, Tensor):
                return result
            context = next((arg.context for arg in (*args, *given.values()) if isinstance(arg, Traced)), None)
            return result if terms is None or context is None else _traced(result, terms, context)


def _traced(value: Tensor, terms: tuple[Term, ...], context: Context) -> Traced:
    made = value.as_subclass(Traced)
    made.terms, made.context = terms, context
    return made


def plain(value: Any) -> Any:
    """A traced tensor without its terms; anything else as it is."""
    if not isinstance(value, Traced):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def untraced(values: Any) -> Any:
    """The same nest of tuples, lists and dicts with plain tensors."""
    return tree_map(plain, values)


_Terms = tuple[Term, ...] | None
_KEEPING = {
    *("to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone", "detach"),
    *("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as"),
    "dropout",  # models are never in training mode
}
_ADDING = {
    **dict.fromkeys(("add", "__add__", "__radd__", "add_", "__iadd__"), 1.0),
    **dict.fromkeys(("sub", "__sub__", "subtract", "sub_", "__isub__"), -1.0),
}
_MULTIPLYING = {"mul", "__mul__", "__rmul__", "multiply", "mul_", "__imul__"}
_DIVIDING = {"div", "__truediv__", "true_divide", "divide", "div_", "__itruediv__"}
_PRODUCTS = {"matmul", "__matmul__", "mm"}
_IN_PLACE = {"add_", "__iadd__", "sub_", "__isub__", "mul_", "__imul__", "div_", "__itruediv__"}


def _terms(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor) -> _Terms:
    """The terms of an operation's result; None if the operation is not linear or does not go token by token."""
    first = args[0] if args else kwargs.get("input")
    context = next((arg.context for arg in (first, *args[1:]) if isinstance(arg, Traced)), None)
    if name in _KEEPING and isinstance(first, Traced) and result.numel() == first.numel():
        return first.terms  # in whatever shape: the order of the entries is the same
    if context is None or not context.fits(result):
        return None
    if name in _ADDING and len(args) == 2 and not kwargs:
        return _added(first, args[1], _ADDING[name], result, context)
    if name in ("rsub", "__rsub__") and len(args) == 2 and not kwargs:
        return _added(args[1], first, -1.0, result, context)
    if (name in _MULTIPLYING or name in _DIVIDING) and len(args) == 2 and not kwargs:
        return _scaled(first, args[1], name in _DIVIDING, context)
    if not isinstance(first, Traced):
        return None
    if name in ("neg", "__neg__"):
        return tuple(term.then(Step("factor", -1.0)) for term in first.terms)
    if name == "mean":
        last = _argument(args, kwargs, 1, "dim") in (-1, (-1,), [-1], first.dim() - 1)
        return tuple(term.then(Step("mean")) for term in first.terms) if last and result.shape[-1] == 1 else None
    if name == "linear":
        return _product(first, _argument(args, kwargs, 1, "weight"), _argument(args, kwargs, 2, "bias"), result)
    if name in _PRODUCTS and len(args) == 2:
        other = args[1]
        return _product(first, other.T, None, result) if other.dim() == 2 and not isinstance(other, Traced) else None
    if name in ("layer_norm", "rms_norm"):
        return _normed(name, first, args, kwargs)
    return None


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _added(first: Any, second: Any, sign: float, result: Tensor, context: Context) -> _Terms:
    """first + sign * second; what has no terms yet is a component of its own, or a constant."""
    found: list[Term] = []
    for value, factor in ((first, 1.0), (second, sign)):
        own = value.terms if isinstance(value, Traced) else _begun(value, result, context)
        if own is None:
            return None
        found += own if factor == 1.0 else [term.then(Step("factor", factor)) for term in own]
    return tuple(found)


def _begun(value: Any, result: Tensor, context: Context) -> _Terms:
    """A plain summand: a component of its own if it has a row for each token, a constant if it has one for all."""
    number, width = torch.as_tensor(value, device=result.device).detach(), result.shape[-1]
    if context.fits(number):
        return (Term(context.leaf("other", number.expand(*number.shape[:-1], width))),)
    if number.numel() > max(1, number.shape[-1] if number.dim() else 1):
        return None
    return (Term(context.leaf("constant", number.reshape(1, -1).expand(1, width))),)


def _scaled(first: Any, second: Any, dividing: bool, context: Context) -> _Terms:
    """Multiplied or divided by a number, a vector [H] or a factor for each token."""
    if isinstance(second, Traced) and (dividing or isinstance(first, Traced)):
        return None
    held, factor = (first, second) if isinstance(first, Traced) else (second, first)
    if not isinstance(factor, Tensor):
        return tuple(term.then(Step("factor", 1.0 / factor if dividing else float(factor))) for term in held.terms)
    by = 1.0 / factor.detach().float() if dividing else factor.detach().float()
    if by.dim() > 1 and by.shape[-1] == 1 and by.numel() == context.tokens:  # of one token too: batches differ in it
        return tuple(term.times(by.reshape(-1)) for term in held.terms)
    if by.numel() == 1:
        return tuple(term.then(Step("factor", float(by))) for term in held.terms)
    if by.shape[-1] == by.numel():
        own = by.reshape(-1).clone()  # which outlives the layer's weights
        return tuple(term.then(Step("factor", own)) for term in held.terms)
    return None


def _product(value: Traced, weight: Tensor, bias: Tensor | None, result: Tensor) -> _Terms:
    terms = tuple(term.then(Step("matrix", weight.detach())) for term in value.terms)
    if bias is not None:
        terms = (*terms, Term(value.context.leaf("constant", bias)))
    if value.context.on_product is not None:
        value.context.on_product(result, terms)
    return terms


def _normed(name: str, value: Traced, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Terms:
    """Functional layer or RMS norm over the last dimension, its statistics frozen."""
    weight = _argument(args, kwargs, 2, "weight")
    bias = _argument(args, kwargs, 3, "bias") if name == "layer_norm" else None
    eps = _argument(args, kwargs, 4, "eps", 1e-5) if name == "layer_norm" else _argument(args, kwargs, 3, "eps")
    inputs = plain(value).detach().float().reshape(value.context.tokens, -1)
    centred = name == "layer_norm"
    square = inputs.var(-1, correction=0) if centred else inputs.square().mean(-1)
    factor = (square + (torch.finfo(value.dtype).eps if eps is None else eps)).rsqrt()
    steps = [Step("centre")] if centred else []
    if weight is not None:
        steps.append(Step("factor", weight.detach().float().reshape(-1).clone()))
    terms = tuple(replace(term.times(factor), chain=(*term.chain, *steps)) for term in value.terms)
    return terms if bias is None else (*terms, Term(value.context.leaf("constant", bias)))


# --- one decoder layer -----------------------------------------------------------------------------------------------


class RanExpert(NamedTuple):
    """One expert's outputs [n, H] before its gate weights [n], for its tokens: rows [n]."""

    expert: int
    rows: Tensor
    weights: Tensor
    outputs: Tensor


class Logits(NamedTuple):
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

    def wrap_forward(self, unit: str, own: Forward) -> Forward:
        """The layer's own forward, traced."""

        def traced(*args: Any, **kwargs: Any) -> Any:
            output, trace = trace_unit(self.at.model, unit, self.at.moe_layers, own, args, kwargs)
            try:
                self.visit(unit, self.at.batch, trace)
            except CompressionError as error:
                self.fault = self.fault or (self.at.batch, str(error))
            return output

        return traced

    def on_layer_end(self, unit: str) -> None:
        if faults := [fault for fault in ranks().all_gather(self.fault) if fault is not None]:
            raise CompressionError(min(faults)[1])
