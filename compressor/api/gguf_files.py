"""The Python API for GGUF files: the same with fewer experts, by an importance matrix or by a plan."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError
from compressor.files import alone
from compressor.gguf_files.blocks import find_blocks
from compressor.gguf_files.choosing import (
    NO_IMATRIX,
    Imatrix,
    compare_routers,
    fit_plan,
    imatrix_plan,
    read_imatrix,
    refuse_more_than_drop,
)
from compressor.gguf_files.header import Gguf, open_gguf
from compressor.gguf_files.writing import GgufSummary, carry_out, check_output
from compressor.progress import Progress, Silent
from compressor.recipe.steps_plan import Plan


def plan_gguf(
    model: str | Path,
    *,
    imatrix: str | Path | None,
    experts: int | None = None,
    ratio: float | None = None,
    strategy: str = "auto",
    protect: str | Sequence[Mapping[str, Any]] | None = None,
) -> Plan:
    """Plan which experts of a GGUF model stay, by an importance matrix of llama.cpp; nothing is written.

    `strategy` is `imatrix-energy` (which `auto` means) or `count-guided`; `protect` names experts that stay.
    """
    opened = open_gguf(model)
    return imatrix_plan(opened, find_blocks(opened), _read(imatrix, opened), experts, ratio, strategy, protect)


def _read(imatrix: str | Path | None, opened: Gguf) -> Imatrix:
    if imatrix is None:
        raise CompressionError(f"{NO_IMATRIX} {opened.first.path.name}")
    return read_imatrix(Path(imatrix))


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
    """Plan by an importance matrix and write the smaller GGUF model, in as many files as the source has.

    No weight is changed or quantised anew. The plan is kept in the metadata, as the last of `moe_compressor.plans`.
    """
    opened = open_gguf(model)
    check_output(Path(out), opened, overwrite)
    with alone(Path(out)):
        blocks = find_blocks(opened)
        plan = imatrix_plan(opened, blocks, _read(imatrix, opened), experts, ratio, strategy, protect)
        return carry_out(opened, blocks, plan, Path(out), overwrite, progress or Silent())


def apply_gguf(
    plan: Plan | str | Path,
    model: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> GgufSummary:
    """Carry out a plan that only drops on the GGUF file of its source, and write the smaller GGUF model.

    The plan may have been made on the checkpoint that the file was converted from; then layers, experts and top-k are
    checked, and routers are compared where that checkpoint is available.
    """
    loaded = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    refuse_more_than_drop(loaded)
    opened = open_gguf(model)
    check_output(Path(out), opened, overwrite)
    blocks = find_blocks(opened)
    fitted = fit_plan(loaded, opened, blocks)
    with alone(Path(out)):
        note = compare_routers(loaded.source, opened, blocks)
        return carry_out(opened, blocks, fitted, Path(out), overwrite, progress or Silent(), note)
