"""Tensors that know what they are the sum of: the stock forward itself tells how components add up.

A `Traced` tensor carries the terms of a sum: components (leaves), each scaled token by token and mapped linearly, by a
chain of steps that act on each token alone. Rows are pulled back through such a chain in float32.
Operations that are linear keep the terms. The result of any other operation is a plain tensor, a constant: so a
norm's statistics are frozen at the values of the whole input, LN(c) = c * gamma / RMS(z), as in "Understanding
Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs" (ICLR 2026), and the terms stay an exact
decomposition. T tokens, H width before, H' width after a chain.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


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
        """Return True if both are the same map."""
        if isinstance(self.by, Tensor) and isinstance(other.by, Tensor):
            return self.kind == other.kind and (self.by is other.by or torch.equal(self.by, other.by))
        return self.kind == other.kind and type(self.by) is type(other.by) and bool(self.by == other.by)


Chain = tuple[Step, ...]


def pull_sum(rows: Tensor, chains: Iterable[Chain]) -> Tensor:
    """[M, H'] -> [M, H]: rows pulled back through a sum of chains."""

    return torch.stack([reduce(lambda pulled, step: step.pull(pulled), reversed(chain), rows) for chain in chains]).sum(
        0
    )


def same_chains(first: Sequence[Chain], second: Sequence[Chain]) -> bool:
    """Return True if two sums of chains have the same steps."""
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
        """Scale each token by its factor in [T]."""
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
        """A component's own tensor, traced."""
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
