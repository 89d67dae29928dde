"""SHA256SUMS: digests of all files of an output, which `sha256sum -c` checks, too.

Comments hold the digest of the lines themselves, and a CRC-32 of each tensor, which says which one is damaged.
"""

import hashlib
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path

from compressor.checkpoint.reader import read_header
from compressor.errors import CompressionError
from compressor.files import SUMS, file_digest, wrap_full_disk
from compressor.formatting import counted

HEADING = "# SHA-256 of the lines below: "
OF_TENSORS = "# CRC-32 of its tensors: "
LINES = re.compile(rf"([0-9a-f]{{64}})  (.+)\n(?:{OF_TENSORS}(.+)\n)?")


def digest_of(path: Path) -> tuple[str, list[tuple[str, str]]]:
    """Return a file's SHA-256, read once, and each tensor's name and CRC-32 in the order of their bytes.

    It has no tensors unless it is a readable safetensors file.
    """
    infos = []
    if path.suffix == ".safetensors":
        with suppress(CompressionError):
            infos = sorted(read_header(path).values(), key=lambda info: (info.begin, info.end, info.name))
    if not infos:
        return file_digest(path), []
    tensors = []
    with (
        path.open("rb") as stream,
        mmap(stream.fileno(), 0, access=ACCESS_READ) as content,
        memoryview(content) as view,
    ):
        whole = hashlib.sha256(view[: infos[0].begin])
        for info in infos:  # which fill the file
            whole.update(view[info.begin : info.end])
            tensors.append((info.name, f"{zlib.crc32(view[info.begin : info.end]):08x}"))
    return whole.hexdigest(), tensors


def write_digests(folder: Path) -> None:
    """Write the digests of all files in a finished folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    lines = []
    with ThreadPoolExecutor() as pool:
        for path, (sha256, tensors) in zip(paths, pool.map(digest_of, paths), strict=True):
            lines.append(f"{sha256}  {path.relative_to(folder).as_posix()}\n")
            if tensors:
                lines.append(f"{OF_TENSORS}{''.join(crc for _, crc in tensors)}\n")
    body = "".join(lines)
    with wrap_full_disk(folder):
        (folder / SUMS).write_text(f"{HEADING}{hashlib.sha256(body.encode()).hexdigest()}\n{body}", encoding="utf-8")


def damaged_files(folder: Path) -> list[str] | None:
    """Return a sentence for each file, or tensor, that is not what was written; None where no digests are recorded.

    A folder of the Hub's cache may lack files that no loader needs.
    """
    if not (folder / SUMS).is_file():
        return None
    heading, _, body = (folder / SUMS).read_bytes().partition(b"\n")
    if heading != f"{HEADING}{hashlib.sha256(body).hexdigest()}".encode():
        return [f"{SUMS} is not what was written: its first line is not the digest of the others"]
    recorded = {name: (sha256, checksums) for sha256, name, checksums in LINES.findall(body.decode())}
    if folder.parent.name == "snapshots":
        recorded = {name: entry for name, entry in recorded.items() if (folder / name).is_file()}
    with ThreadPoolExecutor() as pool:
        faults = pool.map(lambda name: _fault(folder / name, name, *recorded[name]), recorded)
        return [fault for fault in faults if fault]


def _fault(path: Path, name: str, sha256: str, checksums: str) -> str:
    """Return a sentence on a file that is missing or not what was written; empty if it is whole."""
    if not path.is_file():
        return f"{name} is missing"
    if file_digest(path) == sha256:
        return ""
    _, tensors = digest_of(path)
    wrong = []
    if 8 * len(tensors) == len(checksums):
        for position, (tensor, crc) in enumerate(tensors):
            if crc != checksums[8 * position : 8 * position + 8]:
                wrong.append(tensor)
    where = f", in tensor {wrong[0]}" if wrong else ", in its header" if checksums else ""
    others = f" and {counted(len(wrong) - 1, 'other')}" if len(wrong) > 1 else ""
    return f"{name} is not what was written{where}{others}"
