"""Streamed, resumable, atomic writing of a sharded safetensors checkpoint.

Shards are laid out before the first byte is written, so every tensor has its place and no order of work changes the
result. All work happens in a hidden sibling of the output folder, with a journal of finished layers; the verified
result is renamed into place.
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from uuid import uuid4

from compressor.distributed.present import here
from compressor.errors import CompressionError
from compressor.files import full_disk_told, replace_folder, replacing
from compressor.locking import REPLACED, alone, check_parent, clear, refuse_linked_folder, work_folder
from compressor.replaceable import refuse_replacing
from compressor.surgery.tensors import OutputJob, Piece
from exporters.shards import Shard, begin_shard, index_json, lay_out, put

WRITERS = 2  # tensors in work at once
SPARE_BYTES = 16 * 2**20  # config, tokenizer and index files
MARKER = "moe-compressor-work.json"


class Work:
    """The hidden folder beside the output in which everything is made."""

    def __init__(self, out: Path, digest: str) -> None:
        self.folder = work_folder(out)
        self.content = self.folder / "output"
        self.digest = digest
        self.finished: set[str] = set()

    def open(self) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # no journal, or a broken one
            state = json.loads((self.folder / MARKER).read_text())
            if state["digest"] == self.digest and state["boot"] == _boot() and self.content.is_dir():
                self.finished = set(state["finished"])
                return
        shutil.rmtree(self.content, ignore_errors=True)
        self.content.mkdir(parents=True)
        self.save()

    def save(self) -> None:
        marker = self.folder / MARKER
        with replacing(marker, marker.with_suffix(".new")) as fresh:
            fresh.write_text(json.dumps({"digest": self.digest, "boot": _boot(), "finished": sorted(self.finished)}))


def _boot() -> str:
    """Changes with every start of the machine: a journal that outlived one may be ahead of the disk."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def discard(out: Path) -> None:
    """Remove what a failed run left in its work folder before any layer; what is resumable, or another's, stays."""
    folder = work_folder(out)
    if folder.is_dir() and not (folder / MARKER).exists():
        with suppress(CompressionError, OSError), alone(out):
            clear(folder)


def become(folder: Path, other: Path) -> None:
    """Let `other` take the place of an output in the making, as whose layers nothing then passes any more."""
    marker = folder.parent / MARKER
    with replacing(marker, marker.with_suffix(".new")) as fresh:
        fresh.write_text("{}")
    shutil.rmtree(folder)
    other.replace(folder)


def _tidy(out: Path) -> None:
    """Finish what a run killed while publishing left: put a replaced output back, or drop a finished work folder."""
    folder = work_folder(out)
    if (folder / MARKER).exists() and not ((folder / "output").exists() and out.exists()):
        with suppress(CompressionError), alone(out):  # which puts it back
            if out.exists() and not (folder / "output").exists():
                clear(folder)  # killed after the last rename


def check_target(out: Path, overwrite: bool) -> None:
    """Refuse an output folder that exists, or one that `overwrite` must not replace because it is no checkpoint."""
    out = Path(os.path.abspath(out))
    check_parent(out)
    refuse_linked_folder(work_folder(out))
    _tidy(out)
    if not (out.exists() or out.is_symlink()):
        return
    if not overwrite:
        raise CompressionError(f"{out} exists already; name another folder or pass --overwrite")
    refuse_replacing(out)


def check_space(out: Path, nbytes: int) -> None:
    """Refuse when the disk cannot hold the output beside what is already there."""
    reusable = sum(path.stat().st_blocks * 512 for path in work_folder(out).rglob("*") if path.is_file())
    out = Path(os.path.abspath(out))
    free = shutil.disk_usage(out.parent).free + reusable
    if free < nbytes + SPARE_BYTES:
        raise CompressionError(
            f"the output needs {(nbytes + SPARE_BYTES) / 1e9:.2f} GB, {out.parent} has {free / 1e9:.2f} GB "
            "free; free some space or write elsewhere"
        )


def write(
    job: OutputJob, out: Path, overwrite: bool = False, progress: Callable[[str, int], None] = lambda unit, nbytes: None
) -> None:
    """Write, verify and rename into place; an interrupted run of the same job goes on where it stopped.

    Raises `CompressionError` and leaves nothing behind when the input is bad, the disk full or the result not good.
    """
    out, first = Path(os.path.abspath(out)), here().is_first
    if first:
        check_target(out, overwrite)
        check_space(out, job.nbytes)
    with making(out, job.digest, overwrite) if first else nullcontext(Work(out, job.digest)) as work:
        _fill(job, work, progress)
        here().wait()
        job.finish(work.content)
        here().first_alone(lambda: job.verify(work.content))
        job.accept(work.content)
        here().wait()
    here().wait()


@contextmanager
def making(out: Path, digest: str | None = None, overwrite: bool = False) -> Iterator[Work]:
    """The work folder of `out`, held alone, whose content becomes `out` in the end and of which a fault leaves nothing.

    A kill leaves what is there to a run with the same digest; without a digest nothing is left or gone on with.
    """
    work = Work(out, digest or f"never the same: {uuid4()}")
    try:
        with full_disk_told(out.parent), alone(out):
            try:
                work.open()
                yield work
                check_target(out, overwrite)  # making takes a while, and `out` may have come or changed meanwhile
                _publish(work, out)
            except BaseException as error:
                if digest is None or isinstance(error, Exception):
                    clear(work.folder)
                raise
            clear(work.folder)
    except OSError as error:
        raise CompressionError(f"writing {out} failed: {error.strerror or error}") from error


def _fill(job: OutputJob, work: Work, progress: Callable[[str, int], None]) -> None:
    shards = lay_out(job.outputs, job.max_shard_bytes)
    place = {name: (shard.name, offset) for shard in shards for name, offset in shard.offsets.items()}
    files: dict[str, int] = {}
    with ExitStack() as stack:
        if here().is_first:
            clear(work.content, {shard.name for shard in shards})  # a killed run may have added what this one does not
            _open_shards(shards, work, files, stack)
        work.finished = set(here().told(lambda: sorted(work.finished)))
        if not here().is_first:
            _open_shards(shards, work, files, stack)
        flusher = stack.enter_context(ThreadPoolExecutor(1))  # which ends before its files are closed
        flushes: list[Future[None]] = []
        for units in _rounds(job.units, work.finished):
            for number, unit in enumerate(units):
                expected = {output.name: output.nbytes for output in job.outputs if output.unit == unit}
                if unit not in work.finished and here().takes_turn(number):
                    places = {name: (files[place[name][0]], place[name][1]) for name in expected}
                    _write_unit(job, unit, expected, places)
                    touched = {files[place[name][0]] for name in expected}
                    flushes.append(flusher.submit(_flush, touched))  # the disk works meanwhile, the end need not wait
            here().wait()
            if here().is_first and not work.finished.issuperset(units):
                work.finished.update(units)
                work.save()
            for unit in units:
                progress(unit, sum(output.nbytes for output in job.outputs if output.unit == unit))
        for flush in flushes:
            flush.result()
        _flush(files.values())
        here().wait()
    if not here().is_first:
        return
    if len(shards) > 1:
        _write_file(work.content / "model.safetensors.index.json", index_json(job, shards))
    for file_name, source in job.files.items():
        _write_file(work.content / file_name, source if isinstance(source, bytes) else source.read_bytes())


def _open_shards(shards: Sequence[Shard], work: Work, files: dict[str, int], stack: ExitStack) -> None:
    """Open the files of all shards; the first rank begins them."""
    for shard in shards:
        files[shard.name] = os.open(work.content / shard.name, os.O_RDWR | os.O_CREAT, 0o644)
        stack.callback(os.close, files[shard.name])
        if here().is_first:
            begin_shard(files[shard.name], shard)


def _rounds(units: Sequence[str], finished: Collection[str]) -> Iterator[list[str]]:
    """Units that are written at once, one by each rank; those that are finished, alone."""
    left = [unit for unit in units if unit not in finished]
    yield from ([unit] for unit in units if unit in finished)
    yield from (left[begin : begin + here().size] for begin in range(0, len(left), here().size))


def _flush(files: Iterable[int]) -> None:
    for file in files:
        os.fsync(file)


def _write_unit(job: OutputJob, unit: str, sizes: dict[str, int], place: dict[str, tuple[int, int]]) -> None:
    """Write one layer's tensors, `WRITERS` at a time: checking one for NaN and copying another keep two cores busy."""
    missing = set(sizes)
    with ThreadPoolExecutor(WRITERS) as pool:
        running: deque[Future[None]] = deque()
        for name, content in job.produce(unit):
            if name not in missing:
                raise CompressionError(
                    f"tensor {name!r} was made but has no place in the output; please report this model"
                )
            missing.discard(name)
            running.append(pool.submit(_write_tensor, content, *place[name], sizes[name], name))
            if len(running) > WRITERS:
                running.popleft().result()
        for task in running:
            task.result()
    if missing:
        raise CompressionError(f"tensor {min(missing)!r} of the output was not made; please report this model")


def _write_tensor(content: Iterator[Piece], file: int, offset: int, nbytes: int, name: str) -> None:
    written = 0
    for piece in content:
        written += put(piece, file, offset + written)
    if written != nbytes:
        raise CompressionError(
            f"tensor {name!r} came out with {written} bytes instead of {nbytes}; please report this model"
        )


def _write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _publish(work: Work, out: Path) -> None:
    """Rename the finished folder into place; one that it replaces is deleted only afterwards."""
    replaced = work.folder / REPLACED
    shutil.rmtree(replaced, ignore_errors=True)
    replace_folder(work.content, out, replaced)
    directory = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
