"""A checkpoint as an ONNX graph for ONNX Runtime, written only when it has been shown to compute
the same.

What is looked up before an export, its options and the packages that it needs, loads no torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from compressor.document.blocks import Block
from compressor.extras import require
from compressor.files import GRAPH
from compressor.progress import Progress, Silent
from exporters.onnx.options import PACKAGES as PACKAGES
from exporters.onnx.options import RECORD, ExportOptions
from exporters.onnx.published import check_export as check_export
from exporters.onnx.published import loading_blocks

if TYPE_CHECKING:
    from exporters.onnx.writing import ExportSummary

Options = ExportOptions  # under this name the registry finds an exporter's options
FILES = (GRAPH, RECORD)  # by which an export is known


def require_packages() -> None:
    """Refuse an export for which a package is missing."""
    require("onnx", "onnxscript", "onnxruntime")


def export(
    folder: Path,
    out: Path,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
) -> "ExportSummary":
    """Export the checkpoint in `folder` to the new folder `out`: graph, weights, configs,
    tokenizer, and a record of the verification."""
    require_packages()
    from exporters.onnx.writing import write_export

    return write_export(Path(folder), Path(out), options or ExportOptions(), progress or Silent())


def read_summary(out: Path) -> "ExportSummary":
    """Return what `export` returned, from the record that it left in `out`."""
    from exporters.onnx.writing import summary_of

    return summary_of(out)


def card_blocks(folder: Path, place: str, repo_id: str) -> list[Block]:
    """Return what the model card says of the export, which lies in `place` of the repository."""
    return [*loading_blocks(place, repo_id), *read_summary(folder).describe()]
