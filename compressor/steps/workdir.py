"""A run's work folder: it holds the output until that is complete, and a killed run is resumed from
it.

.OUT.moe-compressor/ beside OUT, or inside where OUT is an empty folder or a mount point
    lock            held by the run
    journal.json    the run's key and date, and the decision and result of each finished step
    kept/           tensors and plans that steps keep for a run that resumes after a kill
    step-N/         the checkpoint that step N has written: one file per decoder layer
    output/         the finished checkpoint, verified, gated and then renamed to OUT

A layer's file is written beside, flushed and renamed. Its header says which steps made it; one that
cannot be read, as after a loss of power, counts as none.
"""

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from compressor.checkpoint.reader import (
    DTYPE_BITS,
    INDEX_NAME,
    SINGLE_NAME,
    Checkpoint,
    TensorInfo,
    read_header,
)
from compressor.distributed import held, ranks
from compressor.errors import CompressionError
from compressor.files import (
    LOCK,
    OUTPUT,
    REPLACED,
    check_parent,
    clear,
    is_free,
    refuse_replacing,
    replace_folder,
    work_folder,
    wrap_full_disk,
    write_whole,
)
from compressor.model.remote_code import json_bytes
from compressor.prompt_date import prompt_date
from compressor.records import read_object
from compressor.steps.tensors import (
    MAX_SHARD_BYTES,
    Named,
    OutputJob,
    OutputTensor,
    Piece,
    refuse_overflow,
    tensor_bytes_view,
)

JOURNAL = "journal.json"
SMALL = 2**25  # bytes of a layer's file that is joined with others, which writes it a second time
SPARE_BYTES = 16 * 2**20  # config, tokenizer and index files
Advance = Callable[[str], None]
# tensors processed at once: checking one for NaN and copying another keep two cores busy
WRITERS = 2
STEPS = "steps"  # in a header's metadata: names of the steps that made the file


class Workdir:
    """The work folder of `out`, locked by this run and its other processes."""

    def __init__(self, out: Path, folder: Path) -> None:
        self.out = Path(os.path.abspath(out))
        self.folder = folder
        self.key = ""
        self.date = ""  # that chat templates are given
        self.steps = dict[int, dict[str, Any]]()

    def resume(self, key: str) -> None:
        """Resume the work of a run of this key; that of any other run is cleared away."""
        self.key = key
        self.date, self.steps = ranks().broadcast(self._journal)
        self._save()

    def _journal(self) -> tuple[str, dict[int, dict[str, Any]]]:
        # none, or a broken one
        with suppress(OSError, LookupError, TypeError, ValueError, CompressionError):
            content = read_object(self.folder / JOURNAL)
            if content["key"] == self.key:
                return str(content["date"]), {
                    int(number): entry for number, entry in content["steps"]
                }
        clear(self.folder)
        return prompt_date(), {}

    def record(self, number: int, entry: Mapping[str, Any]) -> None:
        """Record what step `number` decided, and in the end its result."""
        self.steps[number] = dict(entry)
        self._save()

    def _save(self) -> None:
        if ranks().is_first:
            content = {"key": self.key, "date": self.date, "steps": list(self.steps.items())}
            write_whole(self.folder / JOURNAL, json.dumps(content))

    def kept(self, number: int, name: str) -> Path:
        """Return the path of work of step `number` that a resumed run need not repeat."""
        return self.folder / "kept" / f"{number}-{name}"

    def checkpoint(self, number: int) -> Path:
        """Return the folder of the checkpoint that step `number` writes."""
        return self.folder / f"step-{number}"

    def drop_kept(self, number: int) -> None:
        """Remove the kept work of step `number`, which is no longer needed."""
        for path in (self.folder / "kept").glob(f"{number}-*") if ranks().is_first else ():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()

    @property
    def output(self) -> Path:
        return self.folder / OUTPUT


@contextmanager
def open_workdir(out: Path) -> Iterator[Workdir]:
    """Open the work folder of `out`, on storage that all processes see; the first of them holds its
    lock.

    An error clears it; after a kill, a run of the same key resumes from it. Raises
    `CompressionError` while another run holds it."""
    with wrap_full_disk(work_folder(out).parent), held(out) as folder:
        try:
            yield Workdir(out, folder)
        except Exception:
            if ranks().is_first:
                clear(folder)
            raise


def check_target(out: Path, overwrite: bool) -> None:
    """Refuse an output folder that exists, or one that `overwrite` must not replace because it is
    no checkpoint.

    What a run killed while publishing left is finished: a replaced output is put back, or a work
    folder dropped."""
    out = Path(os.path.abspath(out))
    check_parent(out)
    if is_free(out):
        return
    if not overwrite:
        raise CompressionError(f"{out} exists already; name another folder or pass --overwrite")
    refuse_replacing(out)


def check_space(out: Path, nbytes: int) -> None:
    """Refuse a disk that cannot hold the output beside what is already there."""
    work = work_folder(out)
    parent = work.parent
    reusable = sum(path.stat().st_blocks * 512 for path in work.rglob("*") if path.is_file())
    free = shutil.disk_usage(parent).free + reusable
    if free < nbytes + SPARE_BYTES:
        sizes = f"{(nbytes + SPARE_BYTES) / 1e9:.2f} GB, {parent} has {free / 1e9:.2f} GB free"
        raise CompressionError(f"the output needs {sizes}; free some space or write elsewhere")


def write_checkpoint(job: OutputJob, folder: Path, steps: Sequence[str], advance: Advance) -> None:
    """Write the files of a job that are not there yet; processes take turns. `steps` label those
    that make them."""
    if ranks().is_first:
        folder.mkdir(parents=True, exist_ok=True)
    ranks().barrier()
    files = {
        decoder_layer: f"{decoder_layer or 'rest'}.safetensors"
        for decoder_layer in job.decoder_layers
    }
    with LayerWriter() as writer:
        for number, (decoder_layer, file) in enumerate(files.items()):
            done = made_by(folder / file)
            is_done = done is not None and done[: len(steps)] == tuple(steps)
            if number % ranks().size == ranks().rank and not is_done:
                outputs = [
                    output for output in job.outputs if output.decoder_layer == decoder_layer
                ]
                writer.write(folder / file, outputs, job.produce(decoder_layer), steps)
            advance(decoder_layer or "embeddings and head")
    ranks().barrier()
    if ranks().is_first:
        for name, source in job.files.items():
            write_file(folder / name, source if isinstance(source, bytes) else source.read_bytes())
        write_index(folder, {output: files[output.decoder_layer] for output in job.outputs})
    ranks().barrier()


def put_tensors(folder: Path, tensors: Mapping[str, Tensor], step: str) -> None:
    """Write layer files of a checkpoint anew, with other values of the same dtype, by name."""
    stored = Checkpoint(folder)
    with LayerWriter() as writer:
        for file in sorted({stored.tensors[name].file for name in tensors}):
            steps = made_by(folder / file) or ()
            if step not in steps:
                infos = [info for info in stored.tensors.values() if info.file == file]
                writer.write(folder / file, infos, _changed(stored, infos, tensors), (*steps, step))


def _changed(
    stored: Checkpoint, infos: Iterable[TensorInfo], tensors: Mapping[str, Tensor]
) -> Named:
    for info in infos:
        value = tensors.get(info.name)
        value = stored.read(info.name) if value is None else refuse_overflow(info.name, value)
        yield info.name, iter([tensor_bytes_view(value)])


def assemble(checkpoint: Path, output: Path, max_shard_bytes: int | None) -> None:
    """Make the finished output of a checkpoint's files, small ones joined, with config and
    tokenizer."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    stored = Checkpoint(checkpoint)
    # the tensors of each file, in the order of the checkpoint's; one may be larger than a file
    parts = []
    sizes = []
    for name in dict.fromkeys(info.file for info in stored.tensors.values()):
        infos = [*read_header(checkpoint / name).values()]
        for numbers in shards([info.nbytes for info in infos], max_shard_bytes or math.inf):
            parts.append([infos[number] for number in numbers])
            sizes.append(sum(infos[number].nbytes for number in numbers))
    shard_files = []
    for numbers in shards(sizes, max_shard_bytes or MAX_SHARD_BYTES, SMALL):
        shard_files.append([info for number in numbers for info in parts[number]])
    file_of = dict[TensorInfo | OutputTensor, str]()
    with LayerWriter() as writer:
        for number, infos in enumerate(shard_files, start=1):
            shard = (
                f"model-{number:05d}-of-{len(shard_files):05d}.safetensors"
                if len(shard_files) > 1
                else SINGLE_NAME
            )
            file_of |= dict.fromkeys(infos, shard)
            sources = list(dict.fromkeys(info.file for info in infos))
            if len(sources) == 1 and len(infos) == len(read_header(checkpoint / sources[0])):
                try:
                    os.link(checkpoint / sources[0], output / shard)
                except OSError:  # a file system without second names
                    shutil.copyfile(checkpoint / sources[0], output / shard)
                continue
            steps = dict[str, None]()
            for source in sources:
                steps |= dict.fromkeys(made_by(checkpoint / source) or ())
            writer.write(output / shard, infos, _changed(stored, infos, {}), [*steps])
    if len(shard_files) > 1:
        write_index(output, file_of)
    for path in checkpoint.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX_NAME:
            write_file(output / path.relative_to(checkpoint), path.read_bytes())


def write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def publish(work: Workdir, overwrite: bool) -> None:
    """Rename the finished output into place; what it replaces, and the work folder, are deleted
    only afterwards."""
    check_target(work.out, overwrite)  # something may have been put there since the run began
    replaced = work.folder / REPLACED
    shutil.rmtree(replaced, ignore_errors=True)
    replace_folder(work.output, work.out, replaced)
    directory = os.open(work.folder.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    clear(work.folder, {LOCK})


def header_of(
    outputs: Sequence[TensorInfo | OutputTensor], steps: Sequence[str]
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file of these tensors, and where each begins.

    Wide dtypes come first, so that all are aligned.
    """
    metadata = {"format": "pt"}
    if steps:
        metadata[STEPS] = json.dumps(list(steps))
    entries: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    offsets = {}
    for output in sorted(outputs, key=lambda output: -DTYPE_BITS[output.dtype]):
        offsets[output.name] = position
        end = position + output.nbytes
        entries[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + parent for name, parent in offsets.items()}


def made_by(path: Path) -> tuple[str, ...] | None:
    """Return the steps that made a file; None if it is not there, or cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return tuple(json.loads((file.metadata() or {}).get(STEPS, "[]")))
    except (OSError, SafetensorError, ValueError):
        return None


class LayerWriter:
    """Writes files one after another; the disk flushes one while the next is computed."""

    def __init__(self) -> None:
        self._flusher = ThreadPoolExecutor(1)
        self._flushed: Future[None] | None = None

    def __enter__(self) -> "LayerWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self._flusher.shutdown(cancel_futures=True)

    def flush(self) -> None:
        """Wait until the last file is on the disk."""
        if self._flushed is not None:
            self._flushed.result()

    def write(
        self,
        path: Path,
        outputs: Sequence[TensorInfo | OutputTensor],
        produced: Named,
        steps: Sequence[str],
        behind: bool = False,
    ) -> None:
        """Write exactly these `outputs` from the tensors `produced`, whose bytes a thread takes if
        `behind`."""
        before = self._flushed
        if behind:
            tensors = list(produced)
            self._flushed = self._flusher.submit(
                lambda: self._fill(path, outputs, iter(tensors), steps)()
            )
        else:
            self._flushed = self._flusher.submit(self._fill(path, outputs, produced, steps))
        if before is not None:  # at most one file waits for the disk
            before.result()

    def _fill(
        self,
        path: Path,
        outputs: Sequence[TensorInfo | OutputTensor],
        produced: Named,
        steps: Sequence[str],
    ) -> Callable[[], None]:
        """Write a file beside its place, and return what flushes it and puts it there."""
        header, offsets = header_of(outputs, steps)
        sizes = {output.name: output.nbytes for output in outputs}
        fresh = path.with_name(f"{path.name}.new")
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)

        def flush() -> None:
            try:
                os.fsync(file)
            finally:
                os.close(file)
            fresh.replace(path)

        try:
            os.pwrite(file, header, 0)
            with ThreadPoolExecutor(WRITERS) as pool:
                running = deque[Future[None]]()
                for name, content in produced:
                    assert name in offsets, (
                        f"tensor {name!r} was made and has no place in the output"
                    )
                    offset = offsets.pop(name)
                    running.append(
                        pool.submit(_write_tensor, content, file, offset, sizes[name], name)
                    )
                    if len(running) > WRITERS:
                        running.popleft().result()
                for task in running:
                    task.result()
            assert not offsets, f"tensor {min(offsets)!r} of the output was not made"
        except BaseException:
            os.close(file)
            fresh.unlink(missing_ok=True)
            raise
        return flush


def _write_tensor(content: Iterator[Piece], file: int, offset: int, nbytes: int, name: str) -> None:
    end = offset + nbytes
    for piece in content:
        offset = put(piece, file, offset)
    assert offset == end, f"tensor {name!r} came out {end - offset} bytes short"


def put(piece: Piece, target: int, offset: int) -> int:
    """Write bytes at an offset of an open file; returns where they end."""
    view = memoryview(piece)
    while view:  # a call writes 2 GiB at most
        written = os.pwrite(target, view, offset)
        view = view[written:]
        offset += written
    return offset


def shards(sizes: Sequence[int], most: float, small: float = math.inf) -> list[list[int]]:
    """Return the numbers of what goes into one file: in order, up to `most` bytes.

    What is larger than `small` stays alone.
    """
    groups = list[list[int]]()
    filled = 0
    for number, nbytes in enumerate(sizes):
        alone = nbytes > small or not groups or sizes[groups[-1][-1]] > small
        if alone or filled + nbytes > most:
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += nbytes
    return groups


def write_index(folder: Path, files: Mapping[TensorInfo | OutputTensor, str]) -> None:
    """Write the index file, which maps tensors to files for loaders."""
    metadata = {
        "total_parameters": sum(output.parameters for output in files),
        "total_size": sum(output.nbytes for output in files),
    }
    weight_map = dict(sorted((output.name, file) for output, file in files.items()))
    fresh = folder / f"{INDEX_NAME}.new"
    write_file(fresh, json_bytes({"metadata": metadata, "weight_map": weight_map}))
    fresh.replace(folder / INDEX_NAME)
