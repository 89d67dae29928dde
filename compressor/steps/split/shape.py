"""Finding the config of a split model by comparing meta builds, and checking that its stock blocks
compute the same.

Nothing is known of configs and routers here. Fields that set the experts' width and the top-k are
those whose change changes just that. A block of the model's own config, with narrow experts and
random weights, is run beside its split one. The parts of an expert share its weight where the
chosen weights, or those of all experts, are normalised together, and have it each where they are
not, so one of the two scales fits, or none. Where a bias is added to the normalised weights to
choose experts, it shrinks with them."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import product
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.architecture import (
    Architecture,
    build_meta,
    config_numbers,
    discover,
    experts_modules,
    with_fields,
)
from compressor.model.experts import ALIGNMENT, width_of
from compressor.model.moe_layer import MoeLayer
from compressor.steps.cutting import cut_keys
from compressor.steps.split.tensors import Factors, split_beside, split_experts

TOKENS = 512
PART = 8  # neurons of a part: enough for kernels that ask for aligned rows
ROUNDING = 1e-5  # of the largest output: reordering float32 sums may differ by as much

Fields = dict[str, Any]  # of a config, by dotted path


@frozen
class SplitShape:
    """The split model that the config alone defines; `fields` are the changed ones by dotted path,
    in order."""

    fields: Fields
    architecture: Architecture
    factors: Factors


def split_shape(architecture: Architecture, parts: int) -> SplitShape:
    """Find how a config asks for each expert in `parts` parts, and by which factors these compute
    the same.

    Raises `CompressionError` for a number of parts that the width cannot be divided by, where no
    field of the config sets the width, or the top-k, alone, and where no factors are exact."""
    config = architecture.config
    model = build_meta(config)
    for name, neurons in widths(model).items():
        if neurons % parts:
            row = ALIGNMENT // model.get_submodule(name).down_proj.itemsize
            numbers = range(2, min(neurons, 64) + 1)
            suitable = [str(number) for number in numbers if neurons % (number * row) == 0]
            remedy = f"none leaves rows of a multiple of {ALIGNMENT} bytes, so leave the split out"
            if suitable:
                remedy = f"give one of {', '.join(suitable)}"
            raise CompressionError(
                f"{name}: its experts' {neurons} neurons do not divide into {parts} equal parts; "
                f"{remedy}"
            )
    fields = _width_fields(config, model, parts, architecture.family)
    width_field = next(iter(fields))
    fields[architecture.count_field] = architecture.experts * parts
    expected = {layer.name: layer.top_k * parts for layer in architecture.layers}
    split_config = with_fields(config, fields)
    top_k, seen = top_k_fields(split_config, architecture, expected, lambda count: count * parts)
    fields |= top_k
    width = attrgetter(width_field)(config)
    narrow = {width_field: _each(width, lambda _: PART * parts)}
    narrow_split = {**fields, width_field: _each(width, lambda _: PART)}
    before = build_meta(with_fields(config, narrow), torch.float32)
    after = build_meta(with_fields(config, narrow_split), torch.float32)
    kinds: dict[tuple[Any, ...], MoeLayer] = {}  # layers that route alike: one of them is enough
    for layer in reversed(architecture.layers):
        block, router = (type(before.get_submodule(name)) for name in (layer.block, layer.router))
        kinds[
            block, router, layer.top_k, layer.routing_groups, layer.chosen_groups, len(layer.tables)
        ] = layer
    family = architecture.family
    factors = {_factors_of_block(family, before, after, layer, parts) for layer in kinds.values()}
    if len(factors) > 1:
        raise CompressionError(f"{family} cannot be split: its layers do not weigh experts alike")
    return SplitShape(fields, seen, factors.pop())


def widths(model: nn.Module) -> dict[str, int]:
    """Return the neurons of each expert, by experts module."""
    return {name: width_of(module) for name, module in experts_modules(model)}


def _each(value: Any, change: Callable[[int], int]) -> Any:
    """Return a config's number, or all numbers of its list, changed."""
    return [change(number) for number in value] if isinstance(value, list) else change(value)


def _candidates(
    config: Any, values: Iterable[int], order: Callable[[str], Any]
) -> list[tuple[str, Any]]:
    """The fields that hold one of these numbers, and what they hold: the first by this `order`,
    then by depth."""
    named = [
        (path, value)
        for path, value in config_numbers(config)
        if not {*values}.isdisjoint(value if isinstance(value, list) else [value])
    ]
    return sorted(named, key=lambda entry: (order(entry[0]), entry[0].count("."), entry[0]))


def top_k_fields(
    config: Any, architecture: Architecture, wanted: Mapping[str, int], change: Callable[[int], int]
) -> tuple[Fields, Architecture]:
    """Return the field that sets top-k with the value that `change` makes of it, and the resulting
    architecture.

    `config` may differ from the architecture's own in other fields; `wanted` is the top-k of each
    layer. Raises `CompressionError` where no field does."""
    counts = [layer.top_k for layer in architecture.layers]
    for path, value in _candidates(
        config, counts, lambda path: "per_tok" not in path and "top" not in path
    ):
        fields = {path: _each(value, change)}
        with suppress(CompressionError, ValueError, TypeError):
            seen = discover(with_fields(config, fields))
            if {layer.name: layer.top_k for layer in seen.layers} == wanted:
                return fields, seen
    raise CompressionError(
        f"{architecture.family}: no field of the config sets how many experts a token is routed "
        "to, so that cannot be changed"
    )


def _outside(model: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the tensors beside the experts."""
    inside = tuple(f"{name}." for name, _ in experts_modules(model))
    return {
        key: value.shape for key, value in model.state_dict().items() if not key.startswith(inside)
    }


def _width_fields(config: Any, model: nn.Module, parts: int, family: str) -> Fields:
    """The field that sets the experts' width, and one that keeps shared experts whole where it
    counts them by it."""
    before = widths(model)
    outside = _outside(model)
    expected = {name: width // parts for name, width in before.items()}

    def changed_by(fields: Fields) -> list[str] | None:
        """Return the tensors beside the experts that these fields change, too; None for another
        width."""
        try:
            built = build_meta(with_fields(config, fields))
        except (CompressionError, ValueError, TypeError):
            return None
        if widths(built) != expected:
            return None
        after = _outside(built)
        return [key for key in {**outside, **after} if outside.get(key) != after.get(key)]

    reason = "no field of the config sets the width of its experts"
    for path, value in _candidates(
        config, before.values(), lambda path: ("intermediate" not in path, "vision" in path)
    ):
        fields = {path: _each(value, lambda width: width // parts)}
        changed = changed_by(fields)
        if changed is None:
            continue
        if not changed:
            return fields
        for shared, count in config_numbers(config):
            more = {**fields, shared: _each(count, lambda number: number * parts)}
            if "shared" in shared and changed_by(more) == []:
                return more
        reason = (
            f"{path} sets the width of {changed[0].rpartition('.')[0]} as well as that of "
            "the experts"
        )
    raise CompressionError(f"{family} cannot be split: {reason}")


@torch.no_grad()
def _factors_of_block(family: str, model: Any, after: Any, layer: MoeLayer, parts: int) -> Factors:
    """Return the parts' output factor: S where they share an expert's weight, 1 where not.

    Refuses what neither fits.
    """
    generator = torch.Generator().manual_seed(0)
    inside = len(f"{layer.block}.")
    block = copy.deepcopy(model.get_submodule(layer.block)).to_empty(device="cpu")
    # random weights that give logits and outputs of about 1, and tables of random experts
    for name, value in (*block.named_parameters(), *block.named_buffers()):
        noise = torch.randn(value.shape, generator=generator)
        if f"{layer.block}.{name}" in layer.tables:
            shuffled = torch.rand(len(value), layer.experts, generator=generator).argsort(-1)
            value.copy_(shuffled[:, : value.shape[1]])
        elif not value.is_floating_point():
            value.zero_()
        elif "bias" in name.rpartition(".")[2]:
            value.copy_(0.3 * noise)
        elif value.dim() < 2:
            value.copy_(1 + 0.1 * noise)
        else:
            value.copy_(noise / value.shape[-1] ** 0.5)
    experts = block.get_submodule(layer.name[inside:])
    state = {f"{layer.block}.{key}": value for key, value in block.state_dict().items()}
    orders = [torch.randperm(width_of(experts), generator=generator) for _ in range(layer.experts)]
    hidden_size = int(model.config.get_text_config().hidden_size)
    hidden = torch.randn(1, TOKENS, hidden_size, generator=generator)
    expected = _output(block, layer, hidden)
    least = math.inf
    # the factors that routers are known to need, the plainest first
    for selection, output in product((1.0, 1 / parts), (float(parts), 1.0)):
        factors = Factors(parts, output, selection)
        split = {**state, **split_experts(experts, layer, torch.stack(orders), factors)}
        for key in cut_keys(layer):
            if not key.startswith(f"{layer.name}."):
                split[key] = split_beside(key, state[key], layer, factors)
        other = copy.deepcopy(after.get_submodule(layer.block)).to_empty(device="cpu")
        for name, value in other.named_buffers():
            whole = block.get_buffer(name)
            value.copy_(whole) if value.shape == whole.shape else value.zero_()
        with suppress(RuntimeError):  # a tensor has not the shape that the config asks for
            other.load_state_dict({key[inside:]: value for key, value in split.items()})
            difference = (_output(other, layer, hidden) - expected).abs().max()
            least = min(least, float(difference / expected.abs().max()))
        if least <= ROUNDING:
            return factors
    reason = ""
    if getattr(experts, "has_post_expert_norm", False):
        reason = ", for it normalises each expert's output"
    elif layer.routing_groups > 1 and layer.experts_per_group > 1:
        reason = ", for it scores a group of experts by its two best, which become two parts of one"
    elif any(tensor.extra for tensor in layer.tensors):
        reason = (
            ", for its router weighs more than the routed experts, which are not split with them"
        )
    raise CompressionError(
        f"{family} cannot be split exactly: the outputs of its stock block differ by {least:.1g} "
        f"of the largest{reason}"
    )


def _output(block: Any, layer: MoeLayer, hidden: Tensor) -> Tensor:
    """Run a block on tokens [1, T, H]; of one that is a whole decoder layer, its router and experts
    alone."""
    inside = len(f"{layer.block}.")
    if layer.block == layer.decoder_layer:
        *_, weights, index = block.get_submodule(layer.router[inside:])(hidden[0])
        if index.is_floating_point():
            weights, index = index, weights
        output = block.get_submodule(layer.name[inside:])(hidden[0], index, weights)
    else:
        rows = min(
            (len(block.get_buffer(table[inside:])) for table in layer.tables), default=TOKENS
        )
        more = {}
        if "input_ids" in inspect.signature(block.forward).parameters:
            more["input_ids"] = torch.arange(TOKENS)[None] % rows
        output = block(hidden, **more)
    return output if isinstance(output, Tensor) else output[0]
