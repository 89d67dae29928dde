"""SHA256SUMS: digests of all files of an output, which `sha256sum -c` checks, too.

Comments hold the digest of the lines themselves, and a CRC-32 of each tensor, which says which one
is damaged."""

import hashlib
import re
import reprlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path, PurePosixPath

from compressor.checkpoint.reader import read_header, refuse_link
from compressor.entry_points import kind_of_file
from compressor.errors import CompressionError
from compressor.files import BESIDE, SUMS, TEMPLATES, WEIGHTS, file_digest, wrap_full_disk
from compressor.formatting import counted
from compressor.records import read_data

HEADING = "# SHA-256 of the lines below: "
OF_TENSORS = "# CRC-32 of its tensors: "
LINES = re.compile(rf"([0-9a-f]{{64}})  ([^\n\r]+)\n(?:{OF_TENSORS}((?:[0-9a-f]{{8}})+)\n)?")
MOST_BYTES = 2**23  # of the list
LATER = ("readme", "licen", "notice", "gate.", "recipe.")  # what people and other commands add


def digest_of(path: Path) -> tuple[str, list[tuple[str, str]]]:
    """Return a file's SHA-256 and each tensor's name and CRC-32 in the order of their bytes.

    It has no tensors unless it is a readable safetensors file. A file that has not changed since is
    not read again.
    """
    state = path.stat()
    return _digest_of(path, state.st_ino, state.st_size, state.st_mtime_ns)


@cache
def _digest_of(path: Path, *_: int) -> tuple[str, list[tuple[str, str]]]:
    infos = []
    if path.suffix == ".safetensors":
        with suppress(CompressionError):
            infos = sorted(
                read_header(path).values(), key=lambda info: (info.begin, info.end, info.name)
            )
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
    names = files_in(folder)
    lines = []
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: digest_of(folder / name), names)
        for name, (sha256, tensors) in zip(names, digests, strict=True):
            lines.append(f"{sha256}  {name}\n")
            if tensors:
                lines.append(f"{OF_TENSORS}{''.join(crc for _, crc in tensors)}\n")
    body = "".join(lines)
    with wrap_full_disk(folder):
        (folder / SUMS).write_text(
            f"{HEADING}{hashlib.sha256(body.encode()).hexdigest()}\n{body}", encoding="utf-8"
        )


def damaged_files(folder: Path) -> tuple[list[str], list[str]] | None:
    """Return a sentence for each file, or tensor, that is not what was written, and the names of
    files not listed.

    None where no digests are recorded. A file that loaders read has to be listed. A folder of the
    Hub's cache may lack files that no loader needs."""
    if not (folder / SUMS).is_file():
        return None
    heading, _, body = read_data(folder / SUMS, MOST_BYTES).partition(b"\n")
    if heading != f"{HEADING}{hashlib.sha256(body).hexdigest()}".encode():
        fault = f"{SUMS} is not what was written: its first line is not the digest of the others"
        return [fault], []
    recorded = dict[str, tuple[str, str]]()  # digest and checksums by name
    faults = []
    text = body.decode("utf-8", "replace")
    end = 0
    for match in LINES.finditer(text):
        sha256, name, checksums = match.groups(default="")
        is_outside = name.startswith("/") or ".." in PurePosixPath(name).parts
        if match.start() != end or name in recorded or is_outside:
            shown = reprlib.repr(name)
            faults.append(
                f"{SUMS} lists {shown} twice, outside the folder, or below a line of another form"
            )
        else:
            recorded[name] = sha256, checksums
        end = match.end()
    if end != len(text) or not recorded:
        faults.append(f"{SUMS} should have a line for each file, and no others")
    present = files_in(folder)
    unlisted = [name for name in present if name not in recorded]
    for name in unlisted:
        inner = name.removeprefix(f"{TEMPLATES}/")
        is_part = WEIGHTS.fullmatch(name) or BESIDE.fullmatch(inner)
        if "/" in name and inner == name:
            is_part = None  # in a folder that loaders don't read
        if is_part and not name.lower().startswith(LATER) and kind_of_file(name) is None:
            faults.append(f"{name} is not listed in {SUMS}")
    if folder.parent.name == "snapshots":
        recorded = {name: entry for name, entry in recorded.items() if name in present}
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda name: _fault(folder, name, *recorded[name]), recorded)
        return [*faults, *filter(None, found)], unlisted


def files_in(folder: Path) -> list[str]:
    """Return the relative names of a folder's files but the list's own; hidden ones are the Hub
    client's."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = (path.relative_to(folder).as_posix() for path in files)
    return [name for name in names if name != SUMS and not name.startswith(".")]


def _fault(folder: Path, name: str, sha256: str, checksums: str) -> str:
    """Return a sentence on a file that is missing or not what was written; empty if it is whole."""
    path = folder / name
    refuse_link(path, folder)
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
