"""The computation of an expert in any stock experts module, and callbacks from a running MoE layer.

It depends on fused parameters and flags, not on architectures. T tokens, K top-k, E experts, H
hidden, I intermediate."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear
from transformers.integrations.moe import _can_use_grouped_mm

from compressor.frozen import frozen
from compressor.model.moe_layer import MoeLayer

Parameters = dict[str, Tensor]
Change = Callable[[Tensor], Tensor]
UNCHANGED = nn.Identity()
ALIGNMENT = 16  # bytes that rows must be a multiple of in grouped products
CHUNK = 4096  # tokens that pass the experts at once, where each expert's output is kept


def width_of(experts: Any) -> int:
    """Return the neurons of each expert of an experts module."""
    return int(experts.down_proj.shape[1 if experts.is_transposed else 2])


def fills_rows(experts: Any, itemsize: int) -> bool:
    """Return True if rows of experts' matrices are multiples of 16 bytes, as stock transformers'
    default needs."""
    return all(size * itemsize % ALIGNMENT == 0 for size in experts.down_proj.shape[1:])


def parameter_names(experts: Any) -> tuple[str, ...]:
    """Return the names of the fused parameters [E, ...] of experts."""
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    biases = (f"{up}_bias", "down_proj_bias") if experts.has_bias else ()
    return (up, "down_proj", *biases)


def expert_parameters(experts: Any, expert: int | slice = slice(None)) -> Parameters:
    """Return one expert's slices of the fused parameters, or those of several: views, in the
    module's own layout."""
    return {name: getattr(experts, name)[expert] for name in parameter_names(experts)}


@frozen
class Choices:
    """The m = n K choices of n tokens, sorted by expert and then by token; making it asks the
    device for no number."""

    tokens: Tensor  # [m] of each choice
    places: Tensor  # [m] of each choice among all, flattened from [n, K]
    experts: Tensor  # [m] ascending
    weights: Tensor  # [m] gate weights; 0 of a choice that is not used
    ends: Tensor  # [E] int32, where the choices of each expert end; later ones have none

    @classmethod
    def of(cls, weights: Tensor, index: Tensor, experts: int) -> "Choices":
        """Sort the choices `index` [n, K] with their gate weights [n, K] among so many experts."""
        chosen, places = index.flatten().long().sort(stable=True)
        numbers = torch.arange(experts, device=chosen.device)
        ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
        return cls(places // index.shape[1], places, chosen, weights.flatten()[places], ends)

    def between(self, group: slice, begin: int, end: int, weights: Tensor) -> "Choices":
        """Return those of a group of experts, which are from `begin` to `end`, with experts counted
        from the first.

        Gate weights are taken out of `weights` [n, K] anew, so that gradients of each group pass
        back on their own."""
        mine = slice(begin, end)
        return Choices(
            self.tokens[mine],
            self.places[mine],
            self.experts[mine] - group.start,
            weights.flatten()[self.places[mine]],
            self.ends[group] - begin,
        )


def _project(
    experts: Any, parameters: Parameters, name: str, value: Tensor, choices: Choices | None
) -> Tensor:
    """Return the product of rows [m, I] and one expert's matrix, or of rows sorted by the `choices`
    and each expert's matrix.

    Where the grouped kernel does not take these sizes, or does not exist, stock transformers' loop
    over experts is used."""
    weight = parameters[name]
    bias = parameters.get(f"{name}_bias")
    if choices is None:
        return linear(value, weight.T if experts.is_transposed else weight, bias)
    weight = weight if experts.is_transposed else weight.mT
    aligned = all(size * weight.itemsize % ALIGNMENT == 0 for size in weight.shape[1:])
    if aligned and _can_use_grouped_mm(value, weight, choices.ends):
        product: Tensor = grouped_mm(value, weight, offs=choices.ends)
    else:
        product = torch.ops.transformers.grouped_mm_fallback(value, weight, choices.ends)
    return product if bias is None else product + bias[choices.experts]


def intermediate(
    experts: Any, parameters: Parameters, x: Tensor, choices: Choices | None = None
) -> Tensor:
    """Return the inputs of experts' down projections: tokens [T, H] -> [T, I].

    The parameters are one expert's, or [E, ...] with the `choices` that the rows of `x` are sorted
    by."""
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _project(experts, parameters, name, x, choices)
    activated: Tensor = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    return activated


def apply_expert(
    experts: Any,
    parameters: Parameters,
    x: Tensor,
    choices: Choices | None = None,
    change: Change = UNCHANGED,
) -> Tensor:
    """Return the outputs of experts before their gate weights: tokens [T, H] -> [T, H].

    The parameters are one expert's, or [E, ...] with the `choices` that the rows of `x` are sorted
    by. `change` is applied to what matrices are multiplied by."""
    inner = change(intermediate(experts, parameters, change(x), choices))
    output = _project(experts, parameters, "down_proj", inner, choices)
    if getattr(experts, "has_post_expert_norm", False):
        output = experts.post_expert_norm(output)
    return output


def apply_gated(experts: Any, parameters: Parameters, x: Tensor, choices: Choices) -> Tensor:
    """Return the outputs of experts times the gate weights of the `choices`: [m, H] -> [m, H],
    float32.

    Neurons are multiplied where they are fewer, and all of the output is a product of them."""
    gates = choices.weights[:, None]
    is_product = not (experts.has_bias or getattr(experts, "has_post_expert_norm", False))
    if not is_product or width_of(experts) >= x.shape[-1]:
        return apply_expert(experts, parameters, x, choices).float() * gates
    inner = intermediate(experts, parameters, x, choices)
    gated = (inner * gates).to(inner.dtype)
    return _project(experts, parameters, "down_proj", gated, choices).float()


class ExpertsView:
    """An experts module whose parameters pass through `change(name, expert, value)` at every
    reading of an expert.

    `expert_parameters` and `apply_expert` accept it in place of the module.
    """

    def __init__(self, experts: Any, change: Callable[[str, int, Tensor], Tensor]) -> None:
        self._experts = experts
        self._change = change

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        if name in parameter_names(self._experts):
            return _Slices(value, partial(self._change, name))
        return value


@frozen
class _Slices:
    whole: Tensor
    change: Callable[[int, Tensor], Tensor]

    def __getitem__(self, expert: int) -> Tensor:
        return self.change(expert, self.whole[expert])


@frozen
class Projections:
    """One expert in canonical layout: gate and up [I, H] (no gate: None), down [H, I]."""

    gate: Tensor | None
    up: Tensor
    down: Tensor


def matrix_of(experts: Any, name: str, value: Tensor, part: str) -> Tensor:
    """Return a view [out, in] of the gate, up or down matrix (`part`) in one expert's slice of a
    parameter."""
    matrix = value.T if experts.is_transposed else value
    if name != "gate_up_proj":
        return matrix
    half = 0 if part == "gate" else 1
    return matrix.chunk(2)[half] if experts.is_concatenated else matrix[half::2]


def projections(experts: Any, expert: int) -> Projections:
    """Return the canonical view of one expert's weight matrices, whatever the module's layout."""
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    fused = getattr(experts, name)[expert]
    gate = matrix_of(experts, name, fused, "gate") if experts.has_gate else None
    down = matrix_of(experts, "down_proj", experts.down_proj[expert], "down")
    return Projections(gate, matrix_of(experts, name, fused, "up"), down)


def routed(weights: Tensor, index: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert chosen in `index` [n, K] with a weight, and the rows and slots [m] of its
    choices."""
    used = weights.detach() != 0  # a skip expert comes as index 0 with weight 0
    for expert in index[used].unique().tolist():
        rows, slots = ((index == expert) & used).nonzero(as_tuple=True)
        yield expert, rows, slots


def split_choices(weights: Tensor, index: Tensor, experts: int) -> Iterator[Choices]:
    """Yield the choices of 4,096 tokens at a time; their `tokens` and `places` are those among all
    tokens."""
    top_k = index.shape[1]
    # a processor gains nothing by more, and has less memory
    size = CHUNK // 4 if index.device.type == "cpu" else CHUNK
    for begin in range(0, len(index), size):
        part = slice(begin, begin + size)
        choices = Choices.of(weights[part], index[part], experts)
        yield replace(choices, tokens=choices.tokens + begin, places=choices.places + begin * top_k)


Observe = Callable[[Choices, Tensor], None]


def observed_forward(
    experts: Any, hidden: Tensor, index: Tensor, weights: Tensor, observe: Observe
) -> Tensor:
    """Compute an experts module: hidden [T, H], index and weights [T, K] -> [T, H].

    `observe(choices, outputs)` gets the choices of up to 4,096 tokens and the experts' outputs [m,
    H] for them."""
    result = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    parameters = expert_parameters(experts)
    for choices in split_choices(weights, index, len(parameters["down_proj"])):
        outputs = apply_expert(experts, parameters, hidden.index_select(0, choices.tokens), choices)
        observe(choices, outputs)
        result.index_add_(0, choices.tokens, (outputs * choices.weights[:, None]).float())
    return result.to(hidden.dtype)


# (arguments, keyword arguments, output) of a module
Called = Callable[[tuple[Any, ...], dict[str, Any], Any], None]


@contextmanager
def moe_hooks(
    model: Any,
    layer: MoeLayer,
    *,
    on_router: Called | None = None,
    on_experts: Callable[[Tensor, Tensor, Tensor], None] | None = None,
    on_expert_output: Observe | None = None,
    on_output: Callable[[Tensor, Tensor], None] | None = None,
    on_block: Called | None = None,
    computing: bool = True,
) -> Iterator[None]:
    """Call back from an MoE layer of a live model while the block runs.

    Of one call of the layer the callbacks come in this order: `on_router` after the router,
    `on_experts` with hidden [T, H], index and weights [T, K] before the experts, `on_expert_output`
    as `observe` of `observed_forward`, `on_output` with hidden and output [T, H] of the experts,
    and `on_block` after the module that holds router and experts, before any other hook there.
    Without `computing` the experts output zeros: nothing after them is used."""
    router, experts, block = map(model.get_submodule, (layer.router, layer.name, layer.block))

    def inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        return [*args, *kwargs.values()][:3]

    with ExitStack() as hooks:
        if on_experts is not None:
            hooks.enter_context(
                experts.register_forward_pre_hook(
                    lambda _, *call: on_experts(*inputs(*call)), with_kwargs=True
                )
            )
        if on_expert_output is not None or not computing:
            hooks.callback(experts.__dict__.pop, "forward", None)
            if on_expert_output is not None:
                experts.forward = partial(observed_forward, experts, observe=on_expert_output)
            else:
                experts.forward = lambda *args, **kwargs: torch.zeros_like(inputs(args, kwargs)[0])
        if on_output is not None:
            hooks.enter_context(
                experts.register_forward_hook(
                    lambda _, args, kwargs, output: on_output(inputs(args, kwargs)[0], output),
                    with_kwargs=True,
                )
            )
        if on_router is not None:
            hooks.enter_context(
                router.register_forward_hook(lambda _, *call: on_router(*call), with_kwargs=True)
            )
        if on_block is not None:  # first of its hooks, as a pass may end a batch in another one
            hooks.enter_context(
                block.register_forward_hook(
                    lambda _, *call: on_block(*call), with_kwargs=True, prepend=True
                )
            )
        yield
