"""Comparison of an output with its base, tensor by tensor, as its record says it was made.

The writing job is made once more from the base and the recorded plan. A tensor has to hold the
bytes that the job yields, unless a step changes tensors of its kind. Of a model without a record,
each layer's experts are found by the rows of its router."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, field, replace
from pathlib import Path

import torch
from torch import Tensor

from compressor.checkpoint.digests import damaged_files
from compressor.checkpoint.reader import CONFIG, TORCH_DTYPES
from compressor.checkpoint.source import ModelSource, find_model
from compressor.document.blocks import Block, Facts, Table, Text, Toned
from compressor.errors import CompressionError
from compressor.formatting import first_of, listed, short
from compressor.frozen import frozen
from compressor.model.constant_experts import SUFFIX, declared
from compressor.model.opened import OpenModel, open_model, open_substituted
from compressor.pipeline.outcome import read_plan
from compressor.recipe.plan import LAYER_FACTS, ExpertPlan, Group, LayerPlan
from compressor.recipe.recipe import MONE, recipe_of_plan
from compressor.recipe.steps_plan import Plan
from compressor.records import Json, read_object
from compressor.run_record import COMPRESSION
from compressor.steps.constants.step import kept_job
from compressor.steps.job import make_job, stored_partial, untouched
from compressor.steps.tensors import OutputJob, Piece

WEIGHTS = "weights"  # tensors of experts
ROUTERS = "routers"
FORMAT = "format"  # how tensors are stored
OTHERS = "others"  # tensors that are no experts' and no routers'
CHUNK = 2**22  # numbers that are compared in float64 at once
UNLIKE = 0.1  # difference of cosines that rounding or training of a router's rows stays below
NOT_COMPARED = {
    "transformers_version",
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
}
# fields of config.json that a new format sets
OF_FORMAT = {"quantization_config", "dtype", "torch_dtype"}
SHOWN = 20  # faults, and changed tensors, on the terminal


@frozen
class OutputVerification:
    """A folder compared with its recorded digests, and with its base where that is named."""

    folder: str
    digests: bool  # the folder records them
    faults: tuple[str, ...]
    unlisted: tuple[str, ...] = ()  # files of which no digest is recorded
    base: str | None = None
    same: int = 0  # tensors that hold the expected bytes
    # ||output - base|| / ||base|| by tensor
    changed: Mapping[str, float | None] = field(default_factory=dict)
    # of the base, by layer, if none are recorded
    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.faults

    def to_dict(self) -> Json:
        """Return JSON types."""
        return {**asdict(self), "passed": self.passed}

    def blocks(self) -> list[Block]:
        """Return faults, counts and the largest changes."""
        blocks: list[Block] = [Text(Toned(fault, "bad", "! ")) for fault in self.faults[:SHOWN]]
        facts = {
            "digests": "compared" if self.digests else "none are recorded",
            "faults": str(len(self.faults)),
        }
        if self.unlisted:
            facts["files without a digest"] = first_of(self.unlisted)
        if self.base is not None:
            facts["tensors with the base's bytes"] = str(self.same)
            facts["tensors that steps changed"] = str(len(self.changed))
        for layer, experts in self.experts.items():
            facts[layer] = f"the base's experts {listed(experts)}"
        blocks.append(Facts(tuple(facts.items())))
        largest = sorted(self.changed.items(), key=lambda entry: -(entry[1] or 0))[:SHOWN]
        if largest:
            rows = tuple((name, short(change)) for name, change in largest)
            blocks.append(Table("Largest changes", ("tensor", "relative change"), rows))
        return blocks


def verify_digests(folder: Path) -> OutputVerification:
    """Compare the files of a folder with their recorded digests."""
    compared = damaged_files(folder)
    faults, unlisted = compared or ([], [])
    return OutputVerification(str(folder), compared is not None, tuple(faults), tuple(unlisted))


def verify_against_base(
    folder: Path, base: str, digests: OutputVerification | None = None
) -> OutputVerification:
    """Compare a folder with its digests, unless it has been, and then with the model it was made
    from.

    Raises `CompressionError` for a base that it was not made from.
    """
    result = digests or verify_digests(folder)
    if not result.passed:
        return result
    model = open_model(find_model(base), device="cpu")
    is_substituted = declared(read_object(folder / CONFIG))
    opening = open_substituted if is_substituted else open_model
    output = opening(ModelSource.of(folder), device="cpu")
    is_recorded = (folder / COMPRESSION).is_file()
    comparison = _Comparison(output)
    found: dict[str, tuple[int, ...]] = {}
    if is_recorded:
        plan = read_plan(folder)
        if plan.source.fingerprint != model.fingerprint:
            raise _other_model(folder, base, f"it was made from {plan.source.label}")
        model, experts, comparison.may_change = _as_planned(model, plan)
        comparison.check_routers(model, experts)
    else:
        experts = _found(model, output)
        found = {layer.module: tuple(layer.slots()) for layer in experts.layers}
    fused = {name for name, role in model.layout.roles.items() if role.kind == "fused"}
    is_renamed = (
        not fused <= output.checkpoint.tensors.keys() and FORMAT not in comparison.may_change
    )
    is_plain = model.layout.quantized and not output.layout.quantized
    through = stored_partial(model) if is_plain or is_renamed else None
    job = (
        kept_job(model, experts)
        if experts.has_constants
        else make_job(model, experts, through=through)
    )
    comparison.compare(job)
    comparison.compare_dequantized(model, experts)
    comparison.compare_files(job, is_recorded)
    faults = tuple(comparison.faults)
    return replace(
        result,
        faults=faults,
        base=base,
        same=comparison.same,
        changed=comparison.changed,
        experts=found,
    )


def _other_model(folder: Path, base: str, reason: str) -> CompressionError:
    return CompressionError(
        f"{folder} was not made from {base}: {reason}; name its base with --base"
    )


def _as_planned(model: OpenModel, plan: Plan) -> tuple[OpenModel, ExpertPlan, set[str]]:
    """Return the base as the plan's steps saw it, split or with another top-k, what became of its
    experts, and what steps may change: WEIGHTS of experts, ROUTERS, OTHERS and the FORMAT."""
    experts = plan.expert_plan
    kinds = set[str]() if experts.is_drop else {WEIGHTS, ROUTERS}
    for options, entry in zip(recipe_of_plan(plan).steps, plan.steps, strict=True):
        if entry.expert_plan is not None:
            model = options.step().view(model, entry.expert_plan)
        if options.format not in (None, MONE):
            kinds.add(FORMAT)
        if options.rewrites:
            kinds |= {WEIGHTS, ROUTERS}
            # of distillation, which may train all of a model; a correction refits experts alone
            if options.in_place and getattr(options, "train", "all") != "experts":
                kinds.add(OTHERS)
        elif options.in_place:
            kinds.add(ROUTERS)
    return model, experts if experts.layers else untouched(model), kinds


def _found(model: OpenModel, output: OpenModel) -> ExpertPlan:
    """Return the plan by which an output without a record was pruned, found by the rows of its
    routers."""
    layers = []
    for layer in model.architecture.layers:
        cosines, nearest = _likeness(model, output, layer.name).max(1)
        experts = nearest.tolist()
        if float(cosines.min()) < 1 - UNLIKE or len({*experts}) < len(experts):
            reason = f"rows of the router of {layer.name} are like none of its experts'"
            raise _other_model(output.source.folder, model.source.name, reason)
        facts = {name: getattr(layer, name) for name in LAYER_FACTS}
        groups = tuple(map(Group.single, experts))
        layers.append(LayerPlan(layer.name, layer.index, groups=groups, **facts))
    return ExpertPlan.of(layers)


def _likeness(model: OpenModel, output: OpenModel, layer: str) -> Tensor:
    """Return the cosines of an output's router rows and the base's: [N, E]."""
    sides = []
    for side in (output, model):
        routers = {
            name: role
            for name, role in side.layout.roles.items()
            if role.is_router and role.layer == layer
        }
        name = max(routers, key=lambda name: side.checkpoint.tensors[name].nbytes, default=None)
        if name is None:
            raise _other_model(output.source.folder, model.source.name, f"{layer} is not in both")
        role = routers[name]
        rows = side.checkpoint.read(name).movedim(role.dim, 0)
        rows = rows[: len(rows) - role.extra]
        sides.append(torch.nn.functional.normalize(rows.flatten(1).double()))
    if sides[0].shape[1] != sides[1].shape[1]:
        raise _other_model(output.source.folder, model.source.name, f"{layer} has another width")
    return sides[0] @ sides[1].T


class _Comparison:
    """An output's tensors against those that a job makes of the base."""

    def __init__(self, output: OpenModel) -> None:
        self.output = output
        self.stored = getattr(output.checkpoint, "stored", output.checkpoint.tensors)
        self.may_change = set[str]()
        self.same = 0
        self.changed = dict[str, float | None]()
        self.faults = list[str]()
        self.compared = set[str]()
        self.unmatched = dict[str, None]()  # decoder layers with tensors in another format

    def check_routers(self, model: OpenModel, experts: ExpertPlan) -> None:
        """Refuse routers of which a row is like another expert's, and less like that of its own
        expert."""
        if model.is_split or experts.has_constants:
            return
        modules = experts.by_module
        for layer in self.output.architecture.layers:
            likeness = _likeness(model, self.output, layer.name)
            for row, group in zip(likeness, modules[layer.name].groups, strict=True):
                if float(row.max() - row[list(group.members)].max()) > UNLIKE:
                    self.faults.append(f"{layer.router}: its rows are not in the experts' order")
                    break

    def compare(self, job: OutputJob) -> None:
        """Compare all tensors of the job, by name and bytes."""
        expected = {output.name: output for output in job.outputs}
        is_other_format = FORMAT in self.may_change
        for decoder_layer in job.decoder_layers:
            for name, pieces in job.produce(decoder_layer):
                info = self.stored.get(name)
                wanted = expected[name]
                if info is not None and (info.dtype, info.shape) == (wanted.dtype, wanted.shape):
                    self.compared.add(name)
                    self._record(
                        name,
                        relative_change(pieces, self.output.checkpoint.read(name)),
                        self._kind(name),
                    )
                elif is_other_format and not (info is not None and info.is_plain):
                    self.unmatched[decoder_layer] = None
                else:
                    what = "is missing" if info is None else f"is {info.dtype} {list(info.shape)}"
                    self.faults.append(
                        f"{name} {what}, the base gives {wanted.dtype} {list(wanted.shape)}"
                    )
        for name in () if is_other_format else sorted(self.stored.keys() - expected.keys()):
            if not name.endswith(SUFFIX):
                self.faults.append(f"{self._place(name)} is not made of any tensor of the base")

    def compare_dequantized(self, model: OpenModel, experts: ExpertPlan) -> None:
        """Compare what is stored in another format once both sides are dequantised, a decoder layer
        at a time."""
        if not self.unmatched:
            return
        plain = stored_partial(model)
        dequantized = self.output.partial.computing_in(plain.dtype, plain.device)
        packed = make_job(self.output, untouched(self.output), through=dequantized)
        job = make_job(model, experts, through=plain)
        dtypes = {output.name: TORCH_DTYPES[output.dtype] for output in packed.outputs}
        wanted = {output.name: TORCH_DTYPES[output.dtype] for output in job.outputs}
        for decoder_layer in self.unmatched:
            values = {
                name: _joined(pieces, dtypes[name])
                for name, pieces in packed.produce(decoder_layer)
                if name not in self.compared
            }
            for name, pieces in job.produce(decoder_layer):
                if name in values:
                    self._record(
                        name, relative_change(pieces, values[name].to(wanted[name])), FORMAT
                    )

    def _record(self, name: str, change: float | None, kind: str) -> None:
        if change == 0:
            self.same += 1
        elif kind in self.may_change:
            self.changed[name] = change
        else:
            self.faults.append(
                f"{self._place(name)} differs from the base, and no step changes it "
                f"({short(change)})"
            )

    def _place(self, name: str) -> str:
        return f"{self.stored[name].file}: tensor {name}"

    def _kind(self, name: str) -> str:
        """Return the kind of a tensor; those of multi-token-prediction heads count as experts."""
        role = self.output.layout.roles.get(name)
        routers = tuple(f"{layer.router}." for layer in self.output.architecture.layers)
        if role is None or (role.kind != "plain" and not role.is_router):
            return WEIGHTS
        key = self.output.partial.keys.targets.get(name, name)
        return ROUTERS if role.is_router or key.startswith(routers) else OTHERS

    def compare_files(self, job: OutputJob, is_recorded: bool) -> None:
        """Compare the config, and for a recorded output the files that are copied."""
        folder = self.output.source.folder
        ignored = OF_FORMAT if FORMAT in self.may_change else set[str]()
        for name, content in job.files.items():
            path = folder / name
            expected = content if isinstance(content, bytes) else content.read_bytes()
            if name == CONFIG:
                differing = {
                    *_differences(json.loads(expected), read_object(path), is_recorded)
                } - ignored
                self.faults += [
                    f"{name}: {entry} is not what base and plan give" for entry in sorted(differing)
                ]
            elif is_recorded and not (path.is_file() and path.read_bytes() == expected):
                self.faults.append(f"{name} is not the base's")


def _differences(expected: Json, actual: Json, is_recorded: bool) -> Iterator[str]:
    """Yield the dotted names of fields that differ; without a record, of those that both have."""
    names = (
        expected.keys() | actual.keys()
        if is_recorded
        else (expected.keys() & actual.keys()) - NOT_COMPARED
    )
    for name in names:
        ours = expected.get(name)
        theirs = actual.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from (f"{name}.{inner}" for inner in _differences(ours, theirs, is_recorded))
        elif ours != theirs:
            yield name


def relative_change(pieces: Iterable[Piece], value: Tensor) -> float | None:
    """Return ||value - expected|| / ||expected|| over the bytes of the expected tensor, in order; 0
    if all are equal.

    None if they differ in no number, as -0 and 0 do, or the expected ones are all 0.
    """
    actual = value.detach().reshape(-1)
    expected = _joined(pieces, actual.dtype)
    if torch.equal(expected.view(torch.uint8), actual.view(torch.uint8)):
        return 0.0
    squares = total = 0.0
    for ours, theirs in zip(expected.split(CHUNK), actual.split(CHUNK), strict=True):
        total += float(ours.double().square().sum())
        squares += float((theirs.double() - ours.double()).square().sum())
    return (squares / total) ** 0.5 if total > 0 and squares > 0 else None


def _joined(pieces: Iterable[Piece], dtype: torch.dtype) -> Tensor:
    """Return the tensor [n] of these bytes, in order."""
    content = bytearray().join(pieces)
    return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
