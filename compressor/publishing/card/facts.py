"""What is known of a compressed checkpoint: its record, its headers, its gate and its ONNX graph, each checked."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from compressor.checkpoint.headers import Size
from compressor.checkpoint.reader import INDEX_NAME, SINGLE_NAME, Checkpoint
from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.gates.report import belonging, find_gate
from compressor.gates.verdict import GateResult
from compressor.model.opened import open_model
from compressor.recipe.plan import CompressionPlan
from compressor.recipe.split import parts_of
from compressor.records import MOST_BYTES, read_object
from compressor.run_record import COMPRESSION

GRAPH, ONNX_RECORD = "model.onnx", "onnx_export.json"
ONNX_FOLDER = "onnx"
EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Graph:
    """An exported ONNX graph with the record of how it was verified."""

    place: str  # its folder in the repository, "" for the top
    record: Mapping[str, Any]
    nbytes: int  # of graph and weights


@dataclass(frozen=True, slots=True)
class Active:
    """Parameters without the experts that a token is not sent to."""

    before: int | None  # None where the original stores its tensors in another way
    after: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What a card may say of a checkpoint."""

    folder: Path
    record: Mapping[str, Any]
    plan: CompressionPlan
    config: Mapping[str, Any]
    before: Size
    after: Size
    active: Active | None
    dtypes: Mapping[str, int]  # stored elements by dtype; empty where only a graph lies
    gate: GateResult | None
    graph: Graph | None

    @property
    def only_graph(self) -> bool:
        """Whether there are no safetensors beside the ONNX graph."""
        return not self.dtypes

    @property
    def quantization(self) -> Mapping[str, Any]:
        """The config's entry on quantised weights; empty where they are plain numbers."""
        return entry_of(self.config, "quantization_config")

    @property
    def versions(self) -> Mapping[str, Any]:
        """Of the packages that made it."""
        return entry_of(self.record, "versions", self.plan.versions)


def entry_of(content: Mapping[str, Any], name: str, otherwise: Mapping[str, Any] = EMPTY) -> Mapping[str, Any]:
    """An object within JSON of a file that anybody may have edited."""
    found = content.get(name)
    return found if isinstance(found, Mapping) else otherwise


def read_facts(folder: Path, gate: GateResult | None = None) -> Facts:
    """Everything that a card says, from the files in `folder`; raises `CompressionError` where they disagree."""
    if not (folder / COMPRESSION).is_file():
        raise CompressionError(
            f"{folder} has no {COMPRESSION}, so nothing is known about how it was made; name an output of "
            "moe-compress, or write its README.md by hand"
        )
    record = read_object(folder / COMPRESSION, MOST_BYTES)
    plan = CompressionPlan.from_dict(_part(record, "plan", folder), f"{folder / COMPRESSION}, plan")
    if record.get("plan_digest") != plan.digest():
        raise CompressionError(f"{folder / COMPRESSION}: its plan_digest is not its plan's; restore the file")
    before, after = (_size(record, when, folder) for when in ("before", "after"))
    graph, has_weights = _find_graph(folder), any((folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME))
    if not has_weights and (graph is None or graph.place):
        raise CompressionError(f"{folder} has neither {SINGLE_NAME} nor {GRAPH}; name an output of moe-compress")
    return Facts(
        folder=folder,
        record=record,
        plan=plan,
        config=read_object(folder / "config.json"),
        before=before,
        after=after,
        active=_active_parameters(folder, plan, before, after) if has_weights else None,
        dtypes=_check_weights(folder, after) if has_weights else {},
        gate=find_gate(folder) if gate is None else belonging(folder, gate),
        graph=graph,
    )


def _part(record: Mapping[str, Any], name: str, folder: Path) -> Mapping[str, Any]:
    part = record.get(name)
    if not isinstance(part, Mapping):
        raise CompressionError(f"{folder / COMPRESSION} has no {name!r}; restore the file or compress again")
    return part


def _size(record: Mapping[str, Any], when: str, folder: Path) -> Size:
    parameters, nbytes = (_part(record, name, folder).get(when) for name in ("parameters", "bytes"))
    if not (isinstance(parameters, int) and isinstance(nbytes, int) and parameters > 0 and nbytes > 0):
        raise CompressionError(f"{folder / COMPRESSION} has no sizes {when!r}; restore the file or compress again")
    return Size(parameters, nbytes)


def _check_weights(folder: Path, recorded: Size) -> dict[str, int]:
    """Stored elements by dtype, which must be as many as the record says."""
    tensors = Checkpoint(folder).tensors.values()
    counted = Size.of(tensors)
    if counted != recorded:
        raise CompressionError(
            f"the weights in {folder} hold {counted.parameters} parameters in {counted.bytes} bytes, its "
            f"{COMPRESSION} says {recorded.parameters} in {recorded.bytes}; they do not belong together, compress again"
        )
    dtypes = Counter[str]()
    for tensor in tensors:
        dtypes[tensor.dtype] += tensor.parameters
    return dict(sorted(dtypes.items(), key=lambda entry: (-entry[1], entry[0])))


def _active_parameters(folder: Path, plan: CompressionPlan, before: Size, after: Size) -> Active | None:
    """Counted from headers by the stock model's layout; None where stored elements are not parameters of one expert."""
    try:
        model = open_model(ModelSource(str(folder), None, folder), device="cpu")
    except CompressionError:
        return None
    layout, towers = model.layout, {layer.unit.rstrip("0123456789") for layer in model.architecture.layers}
    if layout.quantized or not layout.regular or len(towers) > 1:
        return None
    expert, row = Counter[str](), Counter[str]()  # by layer: elements of one expert, and of its router row
    for name, role in layout.roles.items():
        info, found = model.checkpoint.tensors[name], row if role.is_router else expert
        if role.kind == "fused":
            found[role.layer] += info.parameters // info.shape[role.dim]
        elif role.kind == "expert" and role.expert == 0:
            found[role.layer] += info.parameters
    if set(expert) != {layer.module for layer in plan.layers}:
        return None  # layers that share their experts
    idle = sum((plan.experts - layer.top_k) * expert[layer.module] for layer in plan.layers)
    gone = sum((layer.experts - plan.experts) * expert[layer.module] for layer in plan.layers)
    parts = parts_of(plan.split)
    rows = sum((layer.experts // parts - plan.experts) * row[layer.module] for layer in plan.layers)
    same = plan.top_k is None and before.parameters - after.parameters == gone + rows
    return Active(before.parameters - gone - idle if same else None, after.parameters - idle)


def _find_graph(folder: Path) -> Graph | None:
    """The ONNX graph in the folder itself or in its `onnx`; None if there is none."""
    for place in ("", ONNX_FOLDER):
        where = folder / place
        if (where / GRAPH).is_file() and (where / ONNX_RECORD).is_file():
            files = [where / GRAPH, where / f"{GRAPH}.data"]
            return Graph(place, read_object(where / ONNX_RECORD), sum(f.stat().st_size for f in files if f.is_file()))
    return None
