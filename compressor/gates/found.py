"""A gate's result that lies beside the weights it judged, or was handed in for them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError
from compressor.evaluation.store import REPORT
from compressor.files import file_digest
from compressor.gates.report import read_gate
from compressor.gates.verdict import GateResult


def find_gate(folder: Path) -> GateResult | None:
    """The gate's result beside the weights, if it is about these very files."""
    if not (folder / REPORT).is_file():
        return None
    result = read_gate(folder / REPORT)
    identity = result.compressed_identity
    known = isinstance(identity.get("weights"), list) and isinstance(identity.get("files"), Mapping)
    return result if known and differing(folder, identity) is None else None


def read_gate_of(folder: Path, path: Path | None) -> GateResult | None:
    """The gate in a file, refused if it names other files than these; without a path, the one beside the weights."""
    return find_gate(folder) if path is None else _belonging(folder, read_gate(path))


def _belonging(folder: Path, gate: GateResult) -> GateResult:
    """A result that was handed in; refused if it names other files than these."""
    if (name := differing(folder, gate.compressed_identity)) is not None:
        raise CompressionError(
            f"the gate's result is of another model than {folder}: {name} is not the same; run the gate again on this "
            "folder"
        )
    return gate


def differing(folder: Path, identity: Mapping[str, Any]) -> str | None:
    """The first file that is not what the identity says; None if all are, or it names none.

    Times of change are left aside: a copied or downloaded model is the same model.
    """
    weights, files = identity.get("weights"), identity.get("files")
    for entry in weights if isinstance(weights, list) else []:
        name, size = str(entry[0]), entry[1]
        if not _inside(folder, name) or (folder / name).stat().st_size != size:
            return name
    for name, digest in files.items() if isinstance(files, Mapping) else ():
        if not _inside(folder, name) or file_digest(folder / name) != digest:
            return str(name)
    return None


def _inside(folder: Path, name: str) -> bool:
    return Path(name).name == name and (folder / name).is_file()
