"""Whether a stock MoE block computes the same once it is split, and with which scale of its parts' outputs.

Nothing is known of routers here: a block of the model's own config, with narrow experts and random weights, is run
beside its split one. The parts of an expert share its weight where the chosen weights, or those of all experts, are
normalised together, and have it each where they are not, so one of the two scales fits, or none. Where a bias is added
to the normalised weights to choose experts, it shrinks with them.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import CompressionError
from compressor.model.architecture import Architecture, MoeLayer, build_meta, with_fields
from compressor.model.experts import width_of
from compressor.steps.split.numbers import each_number
from compressor.steps.split.shape import SplitShape, value_at
from compressor.steps.split.tensors import Factors, split_layer

TOKENS = 512
PART = 8  # neurons of a part: enough for kernels that ask for aligned rows
ROUNDING = 1e-5  # of the largest output: what sums of the same float32 numbers in another order may differ by


@torch.no_grad()
def factors_of(architecture: Architecture, shape: SplitShape) -> Factors:
    """What the parts' outputs are multiplied by: S where they share an expert's weight, 1 where they do not.

    Raises `CompressionError` naming the family, the difference and where it is known the reason, if neither is exact.
    """
    config, path = architecture.config, shape.width_field

    def of_width(width: int) -> Any:
        return each_number(value_at(config, path), lambda _: width)

    narrow = with_fields(config, {path: of_width(PART * shape.parts)})
    split = with_fields(config, {**shape.fields, path: of_width(PART)})
    model, after = (build_meta(each, torch.float32) for each in (narrow, split))
    kinds = {_kind(model, layer): layer for layer in reversed(architecture.layers)}
    found = {_factors_of_block(architecture.family, model, after, layer, shape.parts) for layer in kinds.values()}
    if len(found) > 1:
        raise CompressionError(f"{architecture.family} cannot be split: its layers do not weigh experts alike")
    return found.pop()


def _kind(model: Any, layer: MoeLayer) -> tuple[Any, ...]:
    """What decides how a layer routes; of layers that are alike one is enough."""
    modules = (model.get_submodule(name) for name in (layer.block, layer.router))
    return (*map(type, modules), layer.top_k, layer.routing_groups, layer.chosen_groups, len(layer.tables))


def _factors_of_block(family: str, model: Any, after: Any, layer: MoeLayer, parts: int) -> Factors:
    generator = torch.Generator().manual_seed(0)
    block = copy.deepcopy(model.get_submodule(layer.block)).to_empty(device="cpu")
    _fill(block, layer, generator)
    experts = block.get_submodule(_inside(layer, layer.name))
    state = {f"{layer.block}.{key}": value for key, value in block.state_dict().items()}
    order = torch.stack([torch.randperm(width_of(experts), generator=generator) for _ in range(layer.experts)])
    hidden = torch.randn(1, TOKENS, _hidden_size(model), generator=generator)
    wanted, least = _output(block, layer, hidden), float("inf")
    largest = float(wanted.abs().max())
    for factors in _candidates(parts):
        other = copy.deepcopy(after.get_submodule(layer.block)).to_empty(device="cpu")
        _copy(other, state | split_layer(experts, state, layer, order, parts, factors), layer, block)
        least = min(least, float((_output(other, layer, hidden) - wanted).abs().max()) / largest)
        if least <= ROUNDING:
            return factors
    raise CompressionError(
        f"{family} cannot be split exactly: the outputs of its stock block differ by {least:.1g} of the "
        f"largest{_reason(experts, layer)}"
    )


def _candidates(parts: int) -> tuple[Factors, ...]:
    """The factors that routers are known to need, the plainest first; none of them is taken unless it is exact."""
    return tuple(Factors(output, selection) for selection in (1.0, 1 / parts) for output in (float(parts), 1.0))


def _reason(experts: Any, layer: MoeLayer) -> str:
    """Why a block cannot be split, as far as it tells."""
    if getattr(experts, "has_post_expert_norm", False):
        return ", for it normalises what each expert puts out"
    if layer.routing_groups > 1 and layer.experts_per_group > 1:
        return ", for it scores a group of experts by its two best, which become two parts of one"
    if any(tensor.extra for tensor in layer.tensors):
        return ", for its router weighs more than the routed experts, which are not split with them"
    return ""


def _inside(layer: MoeLayer, name: str) -> str:
    return name.removeprefix(f"{layer.block}.")


def _hidden_size(model: Any) -> int:
    return int(model.config.get_text_config().hidden_size)


def _fill(block: nn.Module, layer: MoeLayer, generator: torch.Generator) -> None:
    """Random weights that give logits and outputs of about 1, and tables of random experts."""
    tables = {_inside(layer, table) for table in layer.tables}
    for name, value in (*block.named_parameters(), *block.named_buffers()):
        noise = torch.randn(value.shape, generator=generator)
        if name in tables:
            value.copy_(torch.rand(len(value), layer.experts, generator=generator).argsort(-1)[:, : value.shape[1]])
        elif not value.is_floating_point():
            value.zero_()
        elif "bias" in name.rpartition(".")[2]:
            value.copy_(0.3 * noise)
        elif value.dim() < 2:
            value.copy_(1 + 0.1 * noise)
        else:
            value.copy_(noise / value.shape[-1] ** 0.5)


def _copy(block: nn.Module, made: dict[str, Tensor], layer: MoeLayer, first: nn.Module) -> None:
    """Fill a split block; raises `CompressionError` where a tensor has not the shape that the config asks for."""
    for name, value in block.named_buffers():
        value.copy_(first.get_buffer(name)) if value.shape == first.get_buffer(name).shape else value.zero_()
    for name, value in block.state_dict().items():
        given = made[f"{layer.block}.{name}"]
        if given.shape != value.shape:
            raise CompressionError(
                f"{layer.block}.{name} has shape {list(given.shape)} once it is split, the config asks for "
                f"{list(value.shape)}; this architecture cannot be split"
            )
        value.copy_(given)


def _output(block: Any, layer: MoeLayer, hidden: Tensor) -> Tensor:
    """What a block makes of tokens [1, T, H]; of one that is a whole decoder layer, its router and experts alone."""
    if layer.block == layer.unit:
        router, experts = (block.get_submodule(_inside(layer, name)) for name in (layer.router, layer.name))
        *_, weights, index = router(hidden[0])
        if weights.is_floating_point() == index.is_floating_point():
            raise CompressionError(f"{layer.router} hands on no experts and weights; this architecture cannot be split")
        pair = (weights, index) if weights.is_floating_point() else (index, weights)
        found = experts(hidden[0], pair[1], pair[0])
    else:
        asked = inspect.signature(block.forward).parameters
        rows = min((len(block.get_buffer(_inside(layer, table))) for table in layer.tables), default=TOKENS)
        ids = {"input_ids": torch.arange(TOKENS)[None] % rows} if "input_ids" in asked else {}
        found = block(hidden, **ids)
    return found if isinstance(found, Tensor) else found[0]
