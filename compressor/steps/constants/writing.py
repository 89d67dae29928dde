"""MoNE: constants for what is dropped, as vLLM serves them (arXiv:2507.00390).

Every tensor that stays is a copy of the stored bytes, quantised ones included, unless it was refitted. Experts keep
their numbers. A constant is `<experts prefix>.<id>.approx_value` [H], and config.json lists them by decoder layer.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.reader import DTYPE_NAMES, Checkpoint
from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.model.constant_experts import FIELD, SUFFIX, declared
from compressor.model.layout import expert_prefixes
from compressor.model.opened import OpenModel
from compressor.model.verification import check_carried
from compressor.recipe.plan import CompressionPlan
from compressor.surgery.configuration import config_with
from compressor.surgery.conversion import changed_unit
from compressor.surgery.job import carried_files, stored_partial
from compressor.surgery.tensors import (
    OutputJob,
    OutputTensor,
    Piece,
    Portion,
    refuse_overflow,
    stored_unit,
    tensor_bytes_view,
)

Constants = Mapping[str, Tensor]  # by experts module: [D, H] of the experts that go, ascending
Refitted = Callable[[MoeLayer], Mapping[str, Tensor]]  # by state-dict key; of an experts module the kept ones [N, ...]


def make_job(
    model: OpenModel,
    plan: CompressionPlan,
    constants: Constants,
    refitted: Refitted | None = None,
    check: Callable[[Path], None] = lambda folder: None,
) -> OutputJob:
    """The job of writing a plan with its constants.

    `refitted` gives the tensors of a layer that a correction has changed. `check` sees the written folder.
    """
    checkpoint, layers = model.checkpoint, model.architecture.layers
    gone = {entry.module: frozenset(entry.constants) for entry in plan.layers}
    copies = [
        OutputTensor(name, info.dtype, info.shape, role.unit, ((Portion(name, None, 1.0),),))
        for name, role in model.layout.roles.items()
        if (info := checkpoint.tensors[name]) and not _goes(model, name, gone)
    ]
    values = {
        f"{prefixes[expert]}{SUFFIX}": (layer.unit, refuse_overflow(f"{prefixes[expert]}{SUFFIX}", value))
        for layer in layers
        if (prefixes := expert_prefixes(model.layout, layer)) and layer.name in constants
        for expert, value in zip(sorted(gone[layer.name]), constants[layer.name], strict=True)
    }
    made = [OutputTensor(name, DTYPE_NAMES[v.dtype], tuple(v.shape), unit) for name, (unit, v) in values.items()]
    units = ("", *model.architecture.units)
    order = {unit: position for position, unit in enumerate(units)}
    outputs = sorted([*copies, *made], key=lambda output: order[output.unit])
    config, zeroed = config_with(checkpoint.raw_config, model.architecture, model.layout, {})
    config[FIELD] = {str(entry.layer): list(entry.constants) for entry in plan.layers if entry.constants}
    config_bytes = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    carried = carried_files(model.source.folder)
    return OutputJob(
        outputs=tuple(outputs),
        units=units,
        produce=bind(_unit, model, copies, {name: value for name, (_, value) in values.items()}, made, gone, refitted),
        files={**carried, "config.json": config_bytes},
        verify=bind(_verify, model=model, outputs=outputs, listed=declared(config), check=check),
        zeroed=tuple(zeroed),
    )


def _goes(model: OpenModel, name: str, gone: Mapping[str, frozenset[int]]) -> bool:
    """Whether a stored tensor is of an expert that goes; a router keeps all that it has."""
    role = model.layout.roles[name]
    return role.kind == "expert" and not role.is_router and role.expert in gone.get(role.layer, ())


def _unit(
    model: OpenModel,
    copies: list[OutputTensor],
    values: Mapping[str, Tensor],
    made: list[OutputTensor],
    gone: Mapping[str, frozenset[int]],
    refitted: Refitted | None,
    unit: str,
) -> Iterator[tuple[str, Iterator[Piece]]]:
    """Names and bytes of a unit's tensors: copies, what was refitted, and constants."""
    layers = [layer for layer in model.architecture.layers if layer.unit == unit and gone.get(layer.name)]
    own = {output.name for output in copies if output.unit == unit}
    changed = set[str]()
    if refitted is not None and layers:
        names = {layer.name for layer in layers}
        changed = {name for name in own if model.layout.roles[name].layer in names}
        yield from _changed(model, {layer.name: refitted(layer) for layer in layers}, gone, changed, unit)
    yield from stored_unit(model.checkpoint, [output for output in copies if output.name not in changed], unit)
    for output in made:
        if output.unit == unit:
            yield output.name, iter([tensor_bytes_view(values[output.name])])


def _changed(
    model: OpenModel,
    tensors: Mapping[str, Mapping[str, Tensor]],
    gone: Mapping[str, frozenset[int]],
    wanted: set[str],
    unit: str,
) -> Iterator[tuple[str, Iterator[Piece]]]:
    """The refitted tensors of a unit by their stored names: experts are put back at their own numbers first."""
    partial = stored_partial(model)

    def change(layer: MoeLayer) -> dict[str, Tensor]:
        kept = [expert for expert in range(layer.experts) if expert not in gone[layer.name]]
        found = {}
        for key, value in tensors.get(layer.name, {}).items():
            found[key] = value
            if key.startswith(f"{layer.name}."):
                found[key] = value.new_zeros(layer.experts, *value.shape[1:])
                found[key][kept] = value
            refuse_overflow(key, found[key].to(partial.dtype))
        return found

    for name, pieces in changed_unit(partial, model.architecture, partial.model, change, unit):
        if name in wanted:
            yield name, pieces


def _verify(
    folder: Path,
    model: OpenModel,
    outputs: list[OutputTensor],
    listed: Mapping[int, Any],
    check: Callable[[Path], None],
) -> None:
    """Check the written names, dtypes, shapes and list of constants, and have `check` compute with them.

    Stock transformers has no view of this format to compare with.
    """
    written = Checkpoint(folder)
    if declared(written.raw_config) != listed:
        raise CompressionError(f"the written config says another {FIELD} than the plan; please report this model")
    for output in outputs:
        info = written.tensors.get(output.name)
        if info is None or (info.dtype, info.shape) != (output.dtype, output.shape):
            raise CompressionError(f"the written tensor {output.name!r} is not as planned; please report this model")
    if more := sorted(written.tensors.keys() - {output.name for output in outputs}):
        raise CompressionError(f"the written tensor {more[0]!r} was not planned; please report this model")
    check_carried(folder, model.source.folder)
    if any(
        torch.is_floating_point(written.read(name)) and not torch.isfinite(written.read(name)).all()
        for name in written.tensors
        if name.endswith(SUFFIX)
    ):
        raise CompressionError("a written constant is not finite; calibrate with --dtype float32")
    check(folder)
