"""A GGUF model with fewer experts, planned by an importance matrix and written whole, each tensor a
copy of bytes."""

import json
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from compressor.checkpoint.reader import Size
from compressor.errors import CompressionError
from compressor.files import check_parent, lock_output, wrap_full_disk
from compressor.formatting import runs
from compressor.gguf_files.blocks import PLANS, find_blocks
from compressor.gguf_files.choosing import compare_routers, fit_plan, plan_gguf
from compressor.gguf_files.header import (
    ARRAY,
    MAGIC,
    NUMBERS,
    STRING,
    Gguf,
    Header,
    Value,
    has_magic,
    open_gguf,
    packed,
    padded,
    part_names,
)
from compressor.progress import Progress, Silent
from compressor.recipe.steps_plan import Plan
from compressor.run_record import versions

VERSION = "moe_compressor.version"
LABEL = "general.size_label"
Kept = Mapping[str, Sequence[int]]  # for each tensor that is cut, the experts that stay, ascending


@dataclass(frozen=True, slots=True)
class GgufSummary:
    """The outcome of cutting a GGUF model."""

    out: tuple[str, ...]  # the files, the first first
    architecture: str
    strategy: str
    experts_before: int
    experts_after: int
    before: Size
    after: Size
    seconds: float
    note: str  # how well the plan matches the file, where it was made on a checkpoint
    plan: Plan = field(repr=False)


def check_output(out: Path, model: Gguf, overwrite: bool) -> list[Path]:
    """The files that will be written; refuses one of the source's, or one that exists and is not to
    be replaced."""
    check_parent(out)
    paths = part_names(out, len(model.parts))
    for path in {out, *paths}:
        if any(path.exists() and path.samefile(part.path) for part in model.parts):
            raise CompressionError(f"{path} is the model itself; name another output")
    for path in filter(os.path.lexists, paths):
        if not overwrite:
            raise CompressionError(
                f"{path} exists already; name another output or pass --overwrite"
            )
        if path.is_symlink() or not has_magic(path):
            raise CompressionError(
                f"{path} is no GGUF file, so --overwrite will not replace it; name another output"
            )
    return paths


def apply_gguf(
    plan: Plan | str | Path,
    model: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> GgufSummary:
    """Carry out a plan that only drops on the GGUF file of its source, and write the smaller GGUF
    model, into as many files as it has; all or none.

    The plan may have been made on the checkpoint that the file was converted from; then layers,
    experts and top-k are checked, and routers are compared where that checkpoint is available. The
    first file, without which the others cannot be loaded, is put in place last."""
    start = time.monotonic()
    listener = progress or Silent()
    out = Path(out)
    loaded = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    opened = open_gguf(model)
    paths = check_output(out, opened, overwrite)
    blocks = find_blocks(opened)
    fitted = fit_plan(loaded, blocks)
    expert_plan = fitted.expert_plan
    groups = {layer.layer: layer.groups for layer in expert_plan.layers}
    kept = {}
    for name, number in blocks.block_of.items():
        kept[name] = [group.members[0] for group in groups[number]]
    # the metadata that changes: the number of experts, the label that repeats it, and the plans,
    # the latest last
    values = opened.first.values
    key = f"{blocks.arch}.expert_count"
    kind = values[key].kind
    added = {key: Value(kind, struct.pack(f"<{NUMBERS[kind]}", expert_plan.experts))}
    label = opened.first.text(LABEL)
    begins = f"{blocks.experts}x"
    if label.startswith(begins):
        label = f"{expert_plan.experts}x{label.removeprefix(begins)}"
        added[LABEL] = Value(STRING, packed(label))
    earlier = values[PLANS].raw if PLANS in values else struct.pack("<IQ", STRING, 0)
    count = int.from_bytes(earlier[4:12], "little")
    text = packed(json.dumps(fitted.to_dict(), separators=(",", ":")))
    added[PLANS] = Value(ARRAY, struct.pack("<IQ", STRING, count + 1) + earlier[12:] + text)
    added[VERSION] = Value(STRING, packed(versions()["moe-compressor"]))
    with wrap_full_disk(out.parent), lock_output(out) as work:
        note = compare_routers(loaded.source, opened)
        fresh = [work / path.name for path in paths]
        try:
            listener.start("writing", len(opened.tensors))
            for part, path in zip(opened.parts, fresh, strict=True):
                _write(part, kept, added if part is opened.first else {}, path, listener)
            check_output(out, opened, overwrite)
            if len(paths) > 1:
                # so that old and new parts are never loaded together
                paths[0].unlink(missing_ok=True)
            for number in reversed(range(len(paths))):
                fresh[number].replace(paths[number])
        finally:
            for path in fresh:
                path.unlink(missing_ok=True)
    tensors = opened.tensors.values()
    return GgufSummary(
        out=tuple(map(str, paths)),
        architecture=blocks.arch,
        strategy=fitted.strategy,
        experts_before=blocks.experts,
        experts_after=expert_plan.experts,
        before=Size.of(tensors),
        after=Size.of(blocks.cut(tensor, expert_plan.experts) for tensor in tensors),
        seconds=time.monotonic() - start,
        note=note,
        plan=fitted,
    )


def _write(
    part: Header, kept: Kept, added: Mapping[str, Value], path: Path, progress: Progress
) -> None:
    """Write one file: its header with the `added` values, then the bytes of the experts that are
    `kept`."""
    values = {**part.values, **added}
    entries = [MAGIC + struct.pack("<IQQ", part.version, len(part.tensors), len(values))]
    entries += [
        packed(key) + struct.pack("<I", value.kind) + value.raw for key, value in values.items()
    ]
    offset = 0
    for tensor in part.tensors:
        cut_tensor = tensor.with_experts(len(kept[tensor.name])) if tensor.name in kept else tensor
        sizes = cut_tensor.shape[::-1]
        facts = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, tensor.kind, offset)
        entries.append(packed(tensor.name) + facts)
        offset = padded(offset + cut_tensor.nbytes, part.alignment)
    source = np.memmap(part.path, np.uint8, mode="r")
    with path.open("wb") as target:
        target.write(b"".join(entries))
        for tensor in part.tensors:
            target.write(bytes(padded(target.tell(), part.alignment) - target.tell()))
            experts = kept.get(tensor.name)
            size = tensor.nbytes if experts is None else tensor.nbytes // tensor.shape[0]
            for first, last in runs([0] if experts is None else experts):  # neighbours together
                target.write(
                    source[tensor.begin + first * size : tensor.begin + (last + 1) * size].data
                )
            progress.advance(tensor.name)
        target.write(bytes(padded(target.tell(), part.alignment) - target.tell()))


def compress_gguf(
    model: str | Path,
    out: str | Path,
    *,
    imatrix: str | Path | None,
    experts: int | None = None,
    ratio: float | None = None,
    strategy: str = "auto",
    protect: str | Sequence[Mapping[str, Any]] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> GgufSummary:
    """Plan by an importance matrix and write the smaller GGUF model, in as many files as the source
    has.

    No weight is changed or quantised anew. The plan is kept in the metadata, as the last of
    `moe_compressor.plans`."""
    check_output(Path(out), open_gguf(model), overwrite)
    with lock_output(Path(out)):
        plan = plan_gguf(
            model,
            imatrix=imatrix,
            experts=experts,
            ratio=ratio,
            strategy=strategy,
            protect=protect,
        )
        return apply_gguf(plan, model, out, overwrite=overwrite, progress=progress)
