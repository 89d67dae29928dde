"""A run's work folder: it holds the output until that is complete, and a killed run is resumed from
it.

.OUT.moe-compressor/ beside OUT, or inside where OUT is an empty folder or a mount point
    lock            held by the run
    journal.json    the run's key and date, and the decision and result of each finished step
    kept/N/         tensors and plans that step N keeps until the next step begins
    step-N/         the checkpoint that step N has written: one file per decoder layer
    output/         the finished checkpoint, verified, gated and then renamed to OUT

Every file is written beside and renamed once it is whole. The header of a file of tensors says what
made it; one that cannot be read, as after a loss of power, counts as none.
"""

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypeVar

from torch import Tensor

from compressor.checkpoint.reader import (
    DTYPE_BITS,
    INDEX_NAME,
    SINGLE_NAME,
    Checkpoint,
    Size,
    TensorInfo,
    header_bytes,
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
    json_object,
    refuse_replacing,
    replace_folder,
    replacing,
    work_folder,
    wrap_full_disk,
    write_whole,
)
from compressor.model.remote_code import json_bytes
from compressor.prompt_date import prompt_date
from compressor.steps.tensors import (
    MAX_SHARD_BYTES,
    Named,
    OutputJob,
    OutputTensor,
    Piece,
    refuse_overflow,
    tensor_bytes_view,
)
from compressor.tensor_cache import read_metadata

JOURNAL = "journal.json"
SMALL = 2**25  # bytes of a layer's file that is joined with others, which writes it a second time
SPARE_BYTES = 16 * 2**20  # config, tokenizer and index files
Advance = Callable[[str], None]
# tensors processed at once: checking one for NaN and copying another keep two cores busy
WRITERS = 2
REST = "rest.safetensors"  # a checkpoint's file of all that lies outside decoder layers
STEPS = "steps"  # in a header's metadata: names of the steps that made the file
Described = Sequence[TensorInfo | OutputTensor]
Item = TypeVar("Item")


class Workdir:
    """The work folder of `out`, locked by this run and its other processes."""

    def __init__(self, out: Path, folder: Path) -> None:
        self.out = Path(os.path.abspath(out))
        self.folder = folder
        self.output = folder / OUTPUT
        # key, date that chat templates are given, and the plan's entries of steps by number
        self.journal = dict[str, Any]()

    def resume(self, key: str) -> None:
        """Resume the work of a run of this key; that of any other run is cleared away."""

        def read() -> dict[str, Any]:
            journal = json_object(self.folder / JOURNAL)
            if journal.get("key") == key and isinstance(journal.get(STEPS), dict):
                return journal
            clear(self.folder)
            return {"key": key, "date": prompt_date(), STEPS: {}}

        self.journal = ranks().broadcast(read)
        self._save()

    def record(self, number: int, entry: Mapping[str, Any]) -> None:
        """Record what step `number` decided, and in the end its result."""
        self.journal[STEPS][str(number)] = entry
        self._save()

    def _save(self) -> None:
        if ranks().is_first:
            write_whole(self.folder / JOURNAL, json.dumps(self.journal))

    def recorded(self, number: int) -> Any:
        """Return what is recorded of a step; None if nothing is."""
        return self.journal[STEPS].get(str(number))

    def kept(self, number: int, name: str = "") -> Path:
        """Return the path of work of step `number` that a resumed run need not repeat."""
        return self.folder / "kept" / str(number) / name

    def checkpoint(self, number: int) -> Path:
        """Return the folder of the checkpoint that step `number` writes."""
        return self.folder / f"step-{number}"


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
    outputs: dict[str, list[OutputTensor]] = {name: [] for name in job.decoder_layers}
    for output in job.outputs:
        outputs[output.decoder_layer].append(output)
    with CheckpointWriter(folder, steps) as writer:
        for number, decoder_layer in enumerate(job.decoder_layers):
            is_own = number % ranks().size == ranks().rank
            if is_own and not writer.is_written(decoder_layer):
                writer.write(decoder_layer, outputs[decoder_layer], job.produce(decoder_layer))
            advance(decoder_layer or "embeddings and head")
    ranks().barrier()
    if ranks().is_first:
        for name, source in job.files.items():
            write_file(folder / name, source if isinstance(source, bytes) else source.read_bytes())
        file_of = {output.name: writer.path(output.decoder_layer).name for output in job.outputs}
        write_index(folder, file_of, Size.of(job.outputs))
    ranks().barrier()


def put_tensors(folder: Path, tensors: Mapping[str, Tensor], step: str) -> None:
    """Write layer files of a checkpoint anew, with other values of the same dtype, by name."""
    stored = Checkpoint(folder)
    with CheckpointWriter(folder) as writer:
        for file in sorted({stored.tensors[name].file for name in tensors}):
            steps = made_by(folder / file) or ()
            if step not in steps:
                infos = [info for info in stored.tensors.values() if info.file == file]
                writer.write_file(file, infos, _stored(stored, infos, tensors), (*steps, step))


def _stored(
    stored: Checkpoint, infos: Iterable[TensorInfo], changed: Mapping[str, Tensor]
) -> Named:
    for info in infos:
        value = changed.get(info.name)
        value = stored.read(info.name) if value is None else refuse_overflow(info.name, value)
        yield info.name, iter([tensor_bytes_view(value)])


def drop_tensors(folder: Path) -> None:
    """Free the space of decoder layers, whose tensors become holes in a checkpoint's files: names
    and shapes stay, by which a resumed run opens it.

    Opening also compares tensors that may be tied, which lie outside decoder layers.
    """
    for path in folder.glob("*.safetensors"):
        if path.name != REST:
            size = path.stat().st_size
            with path.open("rb") as stream:
                header = stream.read(header_bytes(path))
            with replacing(path, path.with_suffix(".new")) as fresh, fresh.open("wb") as target:
                target.write(header)
                target.truncate(size)
                target.flush()
                # renamed before it is on the disk, a power cut would leave it too short to open
                os.fsync(target.fileno())


def assemble(checkpoint: Path, output: Path, max_shard_bytes: int | None) -> None:
    """Make the finished output of a checkpoint's files, small ones joined, with config and
    tokenizer."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    stored = Checkpoint(checkpoint)
    # the tensors of each file, in the order of the checkpoint's; one may be larger than a file
    parts = list[list[TensorInfo]]()
    headers = dict[str, dict[str, TensorInfo]]()
    for info in stored.tensors.values():
        if info.file not in headers:
            header = headers[info.file] = read_header(checkpoint / info.file)
            infos = [*header.values()]
            parts += shards(infos, [info.nbytes for info in infos], max_shard_bytes or math.inf)
    sizes = [Size.of(infos).bytes for infos in parts]
    joined = shards(parts, sizes, max_shard_bytes or MAX_SHARD_BYTES, SMALL)
    file_of = dict[str, str]()
    with CheckpointWriter(output) as writer:
        for number, group in enumerate(joined, start=1):
            shard = SINGLE_NAME
            if len(joined) > 1:
                shard = f"model-{number:05d}-of-{len(joined):05d}.safetensors"
            infos = [*chain.from_iterable(group)]
            file_of |= {info.name: shard for info in infos}
            first, *others = dict.fromkeys(info.file for info in infos)
            if not others and len(infos) == len(headers[first]):
                try:
                    os.link(checkpoint / first, output / shard)
                except OSError:  # a file system without second names
                    shutil.copyfile(checkpoint / first, output / shard)
                continue
            steps = dict[str, None]()
            for source in (first, *others):
                steps |= dict.fromkeys(made_by(checkpoint / source) or ())
            writer.write_file(shard, infos, _stored(stored, infos, {}), [*steps])
    if len(joined) > 1:
        write_index(output, file_of, Size.of(chain.from_iterable(parts)))
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


def header_of(outputs: Described, steps: Sequence[str]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file of these tensors, and where each begins.

    Wide dtypes come first, so that all are aligned.
    """
    metadata = {"format": "pt"}
    if steps:
        metadata[STEPS] = json.dumps(list(steps))
    entries: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    begins = {}
    for output in sorted(outputs, key=lambda output: -DTYPE_BITS[output.dtype]):
        begins[output.name] = position
        position += output.nbytes
        entries[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [begins[output.name], position],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def made_by(path: Path) -> tuple[str, ...] | None:
    """Return the steps that made a file; None if it is not there, or cannot be read."""
    steps = read_metadata(path, STEPS, "[]")
    return None if steps is None else tuple(steps)


class CheckpointWriter:
    """Writes the files of a checkpoint, one for each decoder layer, which a loop over layers or a
    pass through the model hands it; the disk flushes one while the next is computed."""

    def __init__(self, folder: Path, steps: Sequence[str] = ()) -> None:
        self.folder = folder
        self.steps = tuple(steps)  # that make the files
        self._flusher = ThreadPoolExecutor(1)
        self._flushed: Future[None] | None = None

    def __enter__(self) -> Self:
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

    def path(self, decoder_layer: str) -> Path:
        """Return the file of a decoder layer, or of the rest of the model."""
        return self.folder / (f"{decoder_layer}.safetensors" if decoder_layer else REST)

    def is_written(self, decoder_layer: str) -> bool:
        """Return True if these steps have made a decoder layer's file, and it can be read."""
        steps = made_by(self.path(decoder_layer))
        return steps is not None and steps[: len(self.steps)] == self.steps

    def write(
        self, decoder_layer: str, outputs: Described, produced: Named, behind: bool = False
    ) -> None:
        """Write the file of a decoder layer, as `write_file` does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write_file(self.path(decoder_layer).name, outputs, produced, self.steps, behind)

    def write_file(
        self,
        name: str,
        outputs: Described,
        produced: Named,
        steps: Sequence[str],
        behind: bool = False,
    ) -> None:
        """Write exactly these `outputs` from the tensors `produced`, whose bytes a thread takes if
        `behind`."""
        before = self._flushed
        fill = partial(_fill, self.folder / name, outputs, steps)
        if behind:
            tensors = list(produced)
            self._flushed = self._flusher.submit(lambda: fill(iter(tensors))())
        else:
            self._flushed = self._flusher.submit(fill(produced))
        if before is not None:  # at most one file waits for the disk
            before.result()


def _fill(
    path: Path, outputs: Described, steps: Sequence[str], produced: Named
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

    def write_tensor(name: str, content: Iterator[Piece], offset: int) -> None:
        end = offset + sizes[name]
        for piece in content:
            offset = put(piece, file, offset)
        assert offset == end, f"tensor {name!r} came out {end - offset} bytes short"

    try:
        os.pwrite(file, header, 0)
        with ThreadPoolExecutor(WRITERS) as pool:
            running = deque[Future[None]]()
            for name, content in produced:
                assert name in offsets, f"tensor {name!r} was made and has no place in the output"
                running.append(pool.submit(write_tensor, name, content, offsets.pop(name)))
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


def put(piece: Piece, target: int, offset: int) -> int:
    """Write bytes at an offset of an open file; returns where they end."""
    view = memoryview(piece)
    while view:  # a call writes 2 GiB at most
        written = os.pwrite(target, view, offset)
        view = view[written:]
        offset += written
    return offset


def shards(
    items: Sequence[Item], sizes: Sequence[int], most: float, small: float = math.inf
) -> list[list[Item]]:
    """Return the items that go into each file: in order, up to `most` bytes.

    What is larger than `small` stays alone.
    """
    groups = list[list[Item]]()
    filled = 0
    last = 0  # size of the item before
    for item, nbytes in zip(items, sizes, strict=True):
        if not groups or max(last, nbytes) > small or filled + nbytes > most:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += nbytes
        last = nbytes
    return groups


def write_index(folder: Path, file_of: Mapping[str, str], size: Size) -> None:
    """Write the index file, which maps tensors to files for loaders."""
    metadata = {"total_parameters": size.parameters, "total_size": size.bytes}
    content = {"metadata": metadata, "weight_map": dict(sorted(file_of.items()))}
    with replacing(folder / INDEX_NAME, folder / f"{INDEX_NAME}.new") as fresh:
        write_file(fresh, json_bytes(content))
