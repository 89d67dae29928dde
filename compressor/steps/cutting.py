"""Cutting a loaded decoder layer by its plan, keeping it on disk, and naming it as
`save_pretrained` would.

Output goes through the model where stored tensors cannot be mixed as they are: quantised experts
that are merged (the output is then plain), experts whose neurons are aligned first, and storage
that only transformers' reversible conversions understand.

Before experts are mixed, their neurons may be brought into one order: weight matching of Ainsworth
et al. 2023, arXiv:2209.04836, as MC-SMoE (Li et al. 2024, arXiv:2310.01334) uses it. An expert
whose intermediate neurons stand in another order computes the same, a mean over unlike orders does
not."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping

from compressor.checkpoint.quantized import wanted_dtype
from compressor.checkpoint.reader import TORCH_DTYPES, is_finite, refuse_nan
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.architecture import Architecture
from compressor.model.experts import (
    ExpertsView,
    Parameters,
    expert_parameters,
    parameter_names,
    projections,
)
from compressor.model.layout import Layout
from compressor.model.loading import PartialModel, load_converted, saved_names, set_tensor
from compressor.model.moe_layer import MoeLayer
from compressor.recipe.plan import ExpertPlan, Group, LayerPlan
from compressor.recipe.steps_plan import layer_from_dict, layer_to_dict
from compressor.steps.tensors import (
    Named,
    OutputTensor,
    Piece,
    distinct_rows,
    mix,
    mixed_rows,
    refuse_overflow,
    remap_table,
    tensor_bytes_view,
    tensor_output,
    weighted_members,
    widest,
)
from compressor.tensor_cache import load_tensors, read_metadata, save_tensors

Tensors = Mapping[str, Tensor]  # by state-dict key


@torch.no_grad()
def matching(experts: Any, head: int, member: int) -> Tensor:
    """Return the order p [I] of the member's neurons in which they fit the head's best: the same
    one every time.

    Maximises sum_i <gate_h[i], gate_m[p(i)]> + <up_h[i], up_m[p(i)]> + <down_h[:, i], down_m[:,
    p(i)]> with float32 products; biases do not count."""
    from scipy.optimize import linear_sum_assignment

    ours = projections(experts, head)
    theirs = projections(experts, member)
    gain = ours.up.float() @ theirs.up.float().T
    gain.addmm_(ours.down.float().T, theirs.down.float())
    if ours.gate is not None and theirs.gate is not None:
        gain.addmm_(ours.gate.float(), theirs.gate.float().T)
    cost = gain.neg_().cpu()  # maximise would cost one more copy [I, I]
    return torch.from_numpy(linear_sum_assignment(cost.numpy())[1]).to(gain.device)


def reordered(experts: Any, name: str, value: Tensor, order: Tensor) -> Tensor:
    """Return one parameter of an expert with its neurons in the order [I], or with some of them
    alone [n]."""
    if name == "down_proj_bias":
        return value
    if name == "down_proj":
        return value.index_select(0 if experts.is_transposed else 1, order)
    dim = value.dim() - 1 if experts.is_transposed else 0
    if not experts.has_gate:
        rows = order
    elif experts.is_concatenated:
        rows = torch.cat([order, order + value.shape[dim] // 2])
    else:
        rows = torch.stack([2 * order, 2 * order + 1], dim=1).flatten()
    return value.index_select(dim, rows)


def aligned_experts(experts: Any, groups: Sequence[Group]) -> ExpertsView:
    """Return the experts module with the neurons of the members of every group with a head in the
    head's order."""
    orders = {}
    for group in groups:
        for member in group.members:
            if group.head not in (None, member):
                orders[member] = matching(experts, group.head, member)
    return ExpertsView(
        experts,
        lambda name, expert, value: (
            reordered(experts, name, value, orders[expert]) if expert in orders else value
        ),
    )


@torch.no_grad()
def mixed_parameters(experts: Any, members: Iterable[tuple[int, float]]) -> Parameters:
    """sum(coefficient * member) of each parameter in float32; beside it, that of one member exists
    at a time."""
    shares = list(members)
    parameters = Parameters()
    for name in parameter_names(experts):
        parameters[name] = mix((getattr(experts, name)[expert], share) for expert, share in shares)
    return parameters


def merged_parameters(experts: Any, group: Group) -> Parameters:
    """Parameters of one merged expert in float32: scale * sum(coefficient * member), aligned to the
    head if any."""
    view = aligned_experts(experts, [group]) if group.aligned else experts
    return mixed_parameters(view, weighted_members(group))


def cut_router(name: str, value: Tensor, dim: int, layer: MoeLayer, plan: LayerPlan) -> Tensor:
    """Return a router's tensor cut by the plan, with equal rows made distinct where a token may get
    some of them only.

    It may where some of an expert's parts go, or where the top-k is no multiple of them.
    """
    rows = mixed_rows(name, value, dim, plan, True)
    count = len(plan.groups)
    is_divided = count < layer.experts or layer.top_k % layer.parts
    return distinct_rows(rows, dim, count) if is_divided else rows


@torch.no_grad()
def cut_layers(
    model: Any, layers: Sequence[MoeLayer], plans: Mapping[str, LayerPlan]
) -> Parameters:
    """Return the tensors that the plans change in these loaded layers of `model`, by state-dict
    key."""
    state = model.state_dict()
    cut = Parameters()
    for layer in layers:
        plan = plans[layer.name]
        if any(group.aligned for group in plan.groups):
            # one merged expert at a time is in float32
            experts = model.get_submodule(layer.name)
            for name in parameter_names(experts):
                rows = getattr(experts, name)[: len(plan.groups)]
                cut[f"{layer.name}.{name}"] = torch.empty_like(rows)
            for slot, group in enumerate(plan.groups):
                if group.untouched:
                    parameters = expert_parameters(experts, group.members[0])
                else:
                    parameters = merged_parameters(experts, group)
                for name, value in parameters.items():
                    key = f"{layer.name}.{name}"
                    cut[key][slot] = value
                    if not group.untouched:
                        refuse_overflow(key, cut[key][slot])
        for tensor in layer.tensors:
            key = tensor.key
            dim = tensor.dim
            if key.startswith(f"{layer.name}."):
                if key not in cut:
                    cut[key] = mixed_rows(key, state[key], dim, plan, False)
            else:
                cut[key] = cut_router(key, state[key], dim, layer, plan)
        for table in layer.tables:
            remapped = remap_table(state[table].cpu(), plan.remap())
            cut[table] = remapped.to(state[table].device)
    return cut


def cut_keys(layer: MoeLayer) -> list[str]:
    """State-dict keys of the tensors of a layer that count experts, which cutting changes."""
    return [*(tensor.key for tensor in layer.tensors), *layer.tables]


@dataclass(frozen=True)
class CutFiles:
    """Cut and corrected tensors of finished layers, a file each, so that an interrupted run need
    not repeat them.

    A file that cannot be read, as after a loss of power, counts as none: its layer is made anew.
    """

    folder: Path

    def of_head(self, number: int) -> "CutFiles":
        """Return the files of the multi-token-prediction head of this number."""
        return CutFiles(self.folder / f"head-{number}")

    def _path(self, layer: MoeLayer) -> Path:
        return self.folder / f"{layer.name}.safetensors"

    def save(self, plan: LayerPlan, layer: MoeLayer, tensors: Tensors) -> None:
        """Write a layer's tensors with its plan atomically."""
        save_tensors(self._path(layer), tensors, layer_to_dict(plan))

    def flush(self) -> None:
        """Wait until everything saved is on the disk."""

    def plan(self, layer: MoeLayer) -> LayerPlan | None:
        """Return the plan of a finished layer; None if it is not there."""
        facts = read_metadata(self._path(layer))
        return None if facts is None else layer_from_dict(facts)

    def tensors(self, layer: MoeLayer) -> Parameters:
        """Return the tensors of a finished layer; none if it is not there."""
        return {} if self.plan(layer) is None else load_tensors(self._path(layer))


def through_model(layout: Layout, plan: ExpertPlan, refitted: bool) -> bool:
    """Return True if the output is made through the model, as stored tensors cannot be picked or
    mixed."""
    stored_as_is = layout.regular and not plan.reorders and not refitted
    return not stored_as_is or (layout.quantized and not plan.is_drop)


def cut_or_kept(
    partial: PartialModel, plan: ExpertPlan, files: CutFiles | None, layer: MoeLayer
) -> Tensors:
    """Return a layer's cut tensors by state-dict key; from `files` if it was cut already, and else
    it is loaded."""
    if files is None:
        partial.load([*partial.keys_under(layer.name), *cut_keys(layer)])
        return cut_layers(partial.model, [layer], plan.by_module)
    kept = files.tensors(layer)
    if not kept:
        raise CompressionError(
            f"{layer.name}: its corrected tensors can no longer be read from the work folder; run "
            "the command again"
        )
    for key, value in kept.items():  # in float32, and refitted
        refuse_overflow(key, value.to(wanted_dtype(partial.model, key)))
    return kept


def _checked_bytes(name: str, tensor: Tensor) -> Iterator[Piece]:
    refuse_nan(name, "the converted model", tensor)
    yield tensor_bytes_view(tensor)


def _rounded(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = value.to(dtype)
    return refuse_overflow(name, rounded) if rounded is not value and is_finite(value) else rounded


@frozen
class Conversion:
    """Output made by loading `partial` decoder layer by decoder layer; "" is the rest of the model.

    Its tensors have the names and shapes in which stock `save_pretrained` would write the model
    `small`. Those in `own` have the dtype that base and plan give, which is not the partial
    model's."""

    partial: PartialModel
    architecture: Architecture
    small: Any
    own: Mapping[str, OutputTensor] = field(default_factory=dict)
    computing: torch.dtype = torch.float32  # in which `cut` computed

    def _keys_of(self, decoder_layer: str) -> list[str]:
        others = (
            ()
            if decoder_layer
            else tuple(f"{other}." for other in self.architecture.decoder_layers)
        )
        keys = self.partial.keys_under(decoder_layer)
        return [key for key in keys if not key.startswith(others) and key not in self.partial.tied]

    def outputs(self, decoder_layers: Sequence[str]) -> list[OutputTensor]:
        """Return the tensors of these decoder layers in the output."""
        state = self.small.state_dict()
        outputs = []
        for decoder_layer in decoder_layers:
            keys = [key for key in self._keys_of(decoder_layer) if key in state]
            tensors = {key: state[key].to(self._dtype(key)) for key in keys}
            for name, tensor in saved_names(self.small, tensors):
                output = tensor_output(name, tensor, decoder_layer)
                outputs.append(replace(output, dtype=self.own.get(name, output).dtype))
        return outputs

    def _dtype(self, key: str) -> torch.dtype:
        """Return the dtype in which an entry is written: the widest of its stored tensors, if they
        are plain."""
        checkpoint = self.partial.checkpoint
        stored = [checkpoint.tensors[name] for name in self.partial.keys.sources.get(key, ())]
        if stored and all(info.is_plain for info in stored):
            return TORCH_DTYPES[widest(stored)]
        return wanted_dtype(self.small, key)

    def _as_stored(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor in its own dtype: with all digits where nothing but a rounding has
        changed it."""
        own = self.own[name]
        dtype = TORCH_DTYPES[own.dtype]
        if own.content is not None and own.shape == tuple(tensor.shape):
            stored = torch.frombuffer(bytearray().join(own.content()), dtype=dtype).view(own.shape)
            if torch.equal(stored.to(self.computing).to(tensor.dtype), tensor.cpu()):
                return stored
        return _rounded(name, tensor, dtype)

    def read(self, path: Path, keys: Iterable[str]) -> Parameters:
        """Return tensors by state-dict key from a file that `produce` has filled."""
        load_converted(
            self.small, load_tensors(path), "cpu", get_model_conversion_mapping(self.small)
        )
        state = self.small.state_dict()
        tensors = {key: state[key].detach() for key in keys}
        for key, value in state.items():
            if not value.is_meta:
                set_tensor(self.small, key, value.to("meta"))
        return tensors

    def produce(self, cut: Callable[[MoeLayer], Tensors], decoder_layer: str) -> Named:
        """Apply `cut` to a decoder layer's MoE layers, load the rest, and yield the result.

        Tensors that were loaded before stay so.
        """
        keys = self._keys_of(decoder_layer)
        state = self.partial.model.state_dict()
        fresh = [key for key in keys if state[key].is_meta]
        tensors = Parameters()
        for layer in self.architecture.layers:
            for key, value in cut(layer).items() if layer.decoder_layer == decoder_layer else ():
                tensors[key] = value.to(wanted_dtype(self.partial.model, key))
        self.partial.load(key for key in keys if key not in tensors)
        state = self.partial.model.state_dict()
        tensors = {key: state[key] for key in keys if key not in tensors} | tensors
        tensors = {key: _rounded(key, value, self._dtype(key)) for key, value in tensors.items()}
        for name, tensor in saved_names(self.small, tensors):
            yield (
                name,
                _checked_bytes(name, self._as_stored(name, tensor) if name in self.own else tensor),
            )
        for key in fresh:
            self.partial.release(key.rpartition(".")[0])
