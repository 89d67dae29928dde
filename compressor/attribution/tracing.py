"""Tensors that know what they are the sum of, and one decoder layer run on them: its own forward
tells what adds up.

A `Traced` tensor carries the terms of a sum: components (leaves), each scaled token by token and
mapped linearly, by a chain of steps that act on each token alone. Rows are pulled back through such
a chain in float32. Operations that are linear keep the terms. The result of any other operation is
a plain tensor, a constant: so a norm's statistics are frozen at the values of the whole input,
LN(c) = c * gamma / RMS(z), as in "Understanding Cross-Layer Contributions to Mixture-of-Experts
Routing in LLMs" (ICLR 2026), and the terms stay an exact decomposition.

Modules with weight matrices (attention, MLPs, the experts) are components: they get plain tensors,
and their output begins a term. Modules without (norms, residual scalings) rescale terms. A router's
first matrix product with as many rows as experts gives the logits that are decomposed. T tokens, H
width before, H' width after a chain."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from compressor.frozen import frozen
from compressor.model.experts import Choices, moe_hooks
from compressor.model.moe_layer import MoeLayer
from compressor.model.streaming import Forward, LayerVisitor

STREAM = "stream"  # the leaf of a layer's input
HEAD_SIZES = ("v_head_dim", "head_v_dim", "head_dim")
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


# of a token's entries: a factor (a number or a vector [H]), or a matrix [H', H]
Step = Tensor | float
Chain = tuple[Step, ...]


def pull_sum(rows: Tensor, chains: Iterable[Chain]) -> Tensor:
    """[M, H'] -> [M, H]: rows whose products with a vector are those of `rows` with the sum of its
    images under some chains."""
    pulled = []
    for chain in chains:
        part = rows
        for step in reversed(chain):
            by = torch.as_tensor(step).float()
            part = part @ by if by.dim() == 2 else part * by
        pulled.append(part)
    return reduce(torch.add, pulled)


class Term(NamedTuple):
    """One summand: token factor * chain(component)."""

    leaf: str  # the component's name
    token: Tensor | float = 1.0  # [T, 1] factor of each token
    chain: Chain = ()


Terms = tuple[Term, ...]


@dataclass
class Context:
    """The state that all traced tensors of one run of a layer share."""

    tokens: int
    # values of components by name, [T, H], or [1, H] where they are the same for every token
    leaves: dict[str, Tensor] = field(default_factory=dict)
    # of traced tensors with matrices
    products: list[tuple[Tensor, Terms]] = field(default_factory=list)

    def begin(self, name: str, value: Tensor) -> Terms:
        """The one term of a new component; a second one of the same name is numbered."""
        unique = name
        count = 1
        while unique in self.leaves:
            count += 1
            unique = f"{name} ({count})"
        # a copy, since the model's code may change the values in place
        self.leaves[unique] = value.detach().reshape(-1, value.shape[-1]).clone()
        return (Term(unique),)

    def trace(self, value: Tensor, terms: Terms) -> "Traced":
        traced = value.as_subclass(Traced)
        traced.terms = terms
        traced.context = self
        return traced

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

    terms: Terms
    context: Context

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            plain_args = tree_map(plain, args)
            result = func(*plain_args, **tree_map(plain, kwargs))
        traced = [value for value in (*args, *kwargs.values()) if isinstance(value, Traced)]
        in_place = bool(args) and (result is plain_args[0] or func.__name__ == "__setitem__")
        if not traced or not (in_place or isinstance(result, Tensor)):
            return result
        context = traced[0].context
        name = func.__name__
        operation = OPERATIONS.get(name.rstrip("_"))  # add_ is add in place
        terms = None
        if name in RESHAPING:
            if isinstance(args[0], Traced) and result.numel() == args[0].numel():
                terms = args[0].terms
        elif operation is not None and context.fits(result):
            terms = operation(context, result, *args, **kwargs)
        if not in_place:
            return result if terms is None else context.trace(result, terms)
        target = args[0]
        if isinstance(target, Traced):
            target.terms = terms or context.begin("changed in place", plain(target))
        return target if isinstance(result, Tensor) else result


def plain(value: Any) -> Any:
    """Return a traced tensor without its terms; anything else unchanged."""
    if not isinstance(value, Traced):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def _then(terms: Terms, step: Step) -> Terms:
    return tuple(term._replace(chain=(*term.chain, step)) for term in terms)


def _sum(
    context: Context, result: Tensor, input: Any, other: Any, alpha: float = 1.0, sign: int = 1
) -> Terms | None:
    """Return the terms of input + sign * alpha * other."""
    first = _summand(context, result, input)
    second = _summand(context, result, other)
    if first is None or second is None:
        return None
    factor = sign * alpha
    return (*first, *(second if factor == 1 else _then(second, factor)))


def _summand(context: Context, result: Tensor, value: Any) -> Terms | None:
    """A summand's terms. A plain one begins a component: it has a row for each token, or is one
    constant for all."""
    if isinstance(value, Traced):
        return value.terms
    number = torch.as_tensor(value, device=result.device).detach()
    width = result.shape[-1]
    if context.fits(number):
        return context.begin("other", number.expand(*number.shape[:-1], width))
    if number.numel() != number.shape[-1:].numel():
        return None
    return context.begin("constant", number.reshape(1, -1).expand(1, width))


def _product(
    context: Context,
    result: Tensor,
    input: Any,
    other: Any,
    rounding_mode: str | None = None,
    inverse: bool = False,
) -> Terms | None:
    """Return terms times, or divided by, a number, a vector [H] or a factor for each token [T,
    1]."""
    traced, value = (input, other) if isinstance(input, Traced) else (other, input)
    if isinstance(value, Traced) or rounding_mode or (inverse and traced is other):
        return None
    factor = torch.as_tensor(value).detach().float()
    if inverse:
        factor = 1.0 / factor
    if factor.dim() > 1 and factor.shape[-1] == 1 and factor.numel() == context.tokens:
        by_token = factor.reshape(-1, 1)
        return tuple(term._replace(token=term.token * by_token) for term in traced.terms)
    if factor.numel() == 1:
        return _then(traced.terms, float(factor))
    if factor.numel() != factor.shape[-1]:
        return None
    return _then(traced.terms, factor.reshape(-1).clone())  # which outlives the layer's weights


def _mean(context: Context, result: Tensor, input: Traced, *dim: Any, **more: Any) -> Terms | None:
    if result.shape[-1] != 1:
        return None
    width = input.shape[-1]
    return _then(input.terms, torch.tensor(1 / width, device=result.device).expand(width, width))


def _linear(
    context: Context,
    result: Tensor,
    input: Traced,
    weight: Tensor,
    bias: Tensor | None = None,
    transposed: bool = False,
) -> Terms | None:
    if isinstance(weight, Traced) or weight.dim() != 2:
        return None
    terms = _then(input.terms, weight.T if transposed else weight.detach())
    if bias is not None:
        terms = (*terms, *context.begin("constant", bias))
    context.products.append((result, terms))
    return terms


def _layer_norm(
    context: Context,
    result: Tensor,
    input: Traced,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Terms:
    centred: Any = input.float() - input.float().mean(-1, keepdim=True)
    terms = _rms_norm(context, result, centred, shape, weight, eps)
    return terms if bias is None else (*terms, *context.begin("constant", bias))


def _rms_norm(
    context: Context,
    result: Tensor,
    input: Any,
    shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Terms:
    """Terms over the root of the norm's statistics, which are frozen, times its weight."""
    square = input.float().square().mean(-1, keepdim=True)
    normed = input * torch.rsqrt(square + (torch.finfo(input.dtype).eps if eps is None else eps))
    terms: Terms = (normed if weight is None else normed * weight).terms
    return terms


RESHAPING = {  # the order of the entries stays
    "to",
    "float",
    "double",
    "half",
    "bfloat16",
    "type",
    "type_as",
    "contiguous",
    "clone",
    "detach",
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "unsqueeze",
    "squeeze",
    "view_as",
    "reshape_as",
    "dropout",  # models are never in training mode
}
OPERATIONS: dict[str, Callable[..., Terms | None]] = {
    "add": _sum,
    "sub": partial(_sum, sign=-1),
    "mul": _product,
    "div": partial(_product, inverse=True),
    "mean": _mean,
    "linear": _linear,
    "matmul": partial(_linear, transposed=True),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
}


# --- one decoder layer
# -----------------------------------------------------------------------------------------------


class RoutedOutputs(NamedTuple):
    """One expert's outputs [n, H] before its gate weights [n], for its tokens: rows [n]."""

    expert: int
    rows: Tensor
    weights: Tensor
    outputs: Tensor


class Logits(NamedTuple):
    """A router's logits [T, E] with their terms, and the experts [T, K] that it chose."""

    value: Tensor
    terms: Terms
    chosen: Tensor


@frozen
class Heads:
    """Input [T, heads, size] of an attention's output projection, its weight [H, heads, size] and
    bias [H]."""

    inputs: Tensor
    weight: Tensor
    bias: Tensor | None = None


@dataclass
class LayerTrace:
    """One batch's pass through a decoder layer. Leaves are named by module; the input's is
    `STREAM`."""

    context: Context
    kinds: dict[str, str]  # of components by module
    terms: Terms = ()  # of the layer's output
    # by experts module; without terms: no product as wide
    logits: dict[str, Logits] = field(default_factory=dict)
    routed: dict[str, list[RoutedOutputs]] = field(default_factory=dict)
    heads: dict[str, Heads] = field(default_factory=dict)  # by attention module


def parts_of(decoder_layer: str, module: nn.Module, layers: Sequence[MoeLayer]) -> dict[str, str]:
    """The components of a decoder layer: its topmost modules with weight matrices that hold no
    router or experts.

    Returns the kind of each by its full name: attention, mlp, shared or expert. A bare linear
    module, as into and out of a latent space of the experts, is a step of a term and not a
    component."""
    experts = {layer.name for layer in layers}
    routers = {layer.router for layer in layers}
    parts: dict[str, str] = {}
    for name, child in module.named_modules(prefix=decoder_layer):
        inside = any(name.startswith(f"{part}.") for part in (*parts, *routers))
        around = any(inner.startswith(f"{name}.") for inner in (*experts, *routers))
        if name in experts:
            parts[name] = "expert"
        elif inside or around or name in (decoder_layer, *routers) or isinstance(child, nn.Linear):
            continue
        elif any(parameter.dim() > 1 for parameter in child.parameters()):
            # a token mixer takes masks, positions or a cache beside its input, an MLP none of them
            arguments = inspect.signature(type(child).forward).parameters.values()
            named = [argument for argument in arguments if argument.kind not in VARIADIC]
            if len(named) > 2:  # more than self and the hidden states
                parts[name] = "attention"
            else:
                parts[name] = "shared" if layers else "mlp"
    return parts


def router_width(layer: MoeLayer) -> int:
    """Rows of a router's last matrix: its experts, and the extra entries that it scores beside
    them."""
    extra = [tensor.extra for tensor in layer.tensors if tensor.key.startswith(f"{layer.router}.")]
    return layer.experts + max(extra, default=0)


def _watch_part(part: str, module: nn.Module, trace: LayerTrace, stack: ExitStack) -> None:
    """Give a component plain tensors and let its output begin a term, until the stack closes."""
    context = trace.context
    mixes: list[tuple[Heads, Tensor]] = []  # of linear modules that mix heads, with their output

    def mix(linear: nn.Linear, args: Any, output: Tensor) -> None:
        for name in HEAD_SIZES:
            size = getattr(module, name, None)
            is_size = isinstance(size, int) and size > 0 and linear.in_features % size == 0
            if is_size and context.fits(args[0]):
                inputs = args[0].reshape(context.tokens, -1, size)
                weight = linear.weight.unflatten(1, (-1, size))
                mixes.append((Heads(inputs, weight, linear.bias), output))
                return

    def begin(_: Any, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if not context.fits(first):
            return output
        if mixes:  # heads count one by one if the attention's output is its projection's, unchanged
            heads, projected = mixes[-1]
            if torch.equal(projected.flatten(), first.flatten()):
                trace.heads[part] = heads
        begun = context.trace(first, context.begin(part, first))
        return (begun, *output[1:]) if isinstance(output, tuple) else begun

    stack.enter_context(
        module.register_forward_pre_hook(
            lambda _, *inputs: tree_map(plain, inputs), with_kwargs=True
        )
    )
    stack.enter_context(module.register_forward_hook(begin))
    if trace.kinds[part] == "attention":
        for child in module.modules():
            if isinstance(child, nn.Linear):
                stack.enter_context(child.register_forward_hook(mix))


def _watch_layer(layer: MoeLayer, model: nn.Module, trace: LayerTrace, stack: ExitStack) -> None:
    """Keep the experts' outputs, the router's first matrix product with a column for each, and its
    choices."""
    width = router_width(layer)
    products = trace.context.products

    def keep(args: Any, kwargs: Any, output: Any) -> None:
        wide = [product for product in products if product[0].shape[-1] == width]
        value, terms = wide[0] if wide else (torch.empty(trace.context.tokens, width), ())
        logits = value.detach().reshape(-1, width)[:, : layer.experts].float()
        trace.logits[layer.name] = Logits(logits, terms, plain(output[2]).reshape(len(logits), -1))

    router = model.get_submodule(layer.router)
    stack.enter_context(router.register_forward_pre_hook(lambda *_: products.clear()))
    routed = trace.routed.setdefault(layer.name, [])

    def keep_outputs(choices: Choices, outputs: Tensor) -> None:
        ends = [0, *choices.ends.tolist()]
        for expert, rows in enumerate(map(slice, ends, ends[1:])):
            if rows.start < rows.stop:
                tokens = choices.tokens[rows]
                routed.append(RoutedOutputs(expert, tokens, choices.weights[rows], outputs[rows]))

    stack.enter_context(moe_hooks(model, layer, on_router=keep, on_expert_output=keep_outputs))


class TracedPass(LayerVisitor):
    """Traces every layer on every batch, and passes each trace to `visit`."""

    def visit(self, decoder_layer: str, batch: int, trace: LayerTrace) -> None:
        """Look at a layer's trace on a batch; may raise `CompressionError`."""
        raise NotImplementedError

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        """The layer's own forward, traced."""

        def traced(*args: Any, **kwargs: Any) -> Any:
            model = self.at.model
            layers = self.at.moe_layers
            hidden = args[0] if args else kwargs["hidden_states"]
            context = Context(hidden.shape[:-1].numel())
            module = model.get_submodule(decoder_layer)
            trace = LayerTrace(context, parts_of(decoder_layer, module, layers))
            start = context.trace(hidden, context.begin(STREAM, hidden))
            with ExitStack() as stack:
                for part in trace.kinds:
                    _watch_part(part, model.get_submodule(part), trace, stack)
                for layer in layers:
                    _watch_layer(layer, model, trace, stack)
                if args:
                    args = (start, *args[1:])
                else:
                    kwargs["hidden_states"] = start
                output = layer_forward(*args, **kwargs)
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Traced):
                trace.terms = first.terms
            self.visit(decoder_layer, self.at.batch, trace)
            return tree_map(plain, output)

        return traced
