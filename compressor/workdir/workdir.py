"""A run's work folder: what is made lies there until it is whole, and a run that was killed goes on from it.

.OUT.moe-compressor/
    lock            held by the run
    journal.json    the run's key, and what each finished step decided and what came of it
    kept/           tensors that steps keep for a run that goes on after a kill
    stage-N/        the checkpoint after the layerwise steps from step N on: one file per decoder layer
    output/         the finished checkpoint, verified, gated and then renamed to OUT
"""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.checkpoint.reader import INDEX_NAME, SINGLE_NAME, Checkpoint, TensorInfo, read_header
from compressor.distributed import ranks
from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.files import (
    LOCK,
    REPLACED,
    alone,
    check_parent,
    clear,
    full_disk_told,
    refuse_linked_folder,
    replace_folder,
    work_folder,
    write_whole,
)
from compressor.records import read_object
from compressor.replaceable import refuse_replacing
from compressor.surgery.tensors import (
    MAX_SHARD_BYTES,
    FileRange,
    OutputJob,
    OutputTensor,
    Piece,
    refuse_overflow,
    tensor_bytes_view,
)
from compressor.workdir.layer_files import LayerWriter, index_json, made_by, shards

JOURNAL = "journal.json"
SMALL = 2**25  # bytes of a layer's file that is joined with others, which writes it a second time
SPARE_BYTES = 16 * 2**20  # config, tokenizer and index files
Advance = Callable[[str], None]


class Workdir:
    """The work folder of `out`, held by this run and its other processes."""

    def __init__(self, out: Path, folder: Path) -> None:
        self.out, self.folder = Path(os.path.abspath(out)), folder
        self.key, self.steps = "", dict[int, dict[str, Any]]()
        self.written = list[str]()  # names of the stages of which all layer files are there

    def resume(self, key: str) -> None:
        """Go on with the work of a run of this key; that of any other run is cleared away."""
        self.key = key

        def journal() -> tuple[dict[int, Any], list[str]]:
            with suppress(OSError, LookupError, TypeError, ValueError, CompressionError):  # none, or a broken one
                content = read_object(self.folder / JOURNAL)
                if content.get("key") == key:
                    return {int(number): entry for number, entry in content["steps"]}, content["written"]
            clear(self.folder)
            return {}, []

        self.steps, self.written = here().broadcast(journal)
        self._save()

    def record(self, number: int, entry: Mapping[str, Any]) -> None:
        """Note what step `number` decided, and in the end what came of it."""
        self.steps[number] = dict(entry)
        self._save()

    def mark_written(self, folder: Path) -> None:
        """Note that all layer files of a stage are there."""
        self.written.append(folder.name)
        self._save()

    def _save(self) -> None:
        if here().is_first:
            content = {"key": self.key, "steps": [*self.steps.items()], "written": self.written}
            write_whole(self.folder / JOURNAL, json.dumps(content))

    def drop(self, stage: Path) -> None:
        """Remove a stage that a later one was made of."""
        if here().is_first:
            shutil.rmtree(stage, ignore_errors=True)

    def kept(self, number: int, name: str) -> Path:
        """Where step `number` keeps what a run that goes on need not make again."""
        return self.folder / "kept" / f"{number}-{name}"

    def stage(self, number: int) -> Path:
        """The checkpoint that the layerwise steps from `number` on make."""
        return self.folder / f"stage-{number}"

    def drop_kept(self, number: int) -> None:
        """Remove what step `number` has kept, which nobody needs any more."""
        for path in (self.folder / "kept").glob(f"{number}-*") if here().is_first else ():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()

    @property
    def output(self) -> Path:
        """The finished checkpoint before it has its place."""
        return self.folder / "output"


@contextmanager
def held(out: Path) -> Iterator[Workdir]:
    """The work folder of `out` on storage that all processes see, held by the first of them.

    A fault leaves nothing of it, a kill what a run of the same key goes on with. Raises `CompressionError` while
    another run holds it.
    """
    with full_disk_told(Path(os.path.abspath(out)).parent), ranks.held(out) as folder:
        try:
            yield Workdir(out, folder)
        except Exception:
            if here().is_first:
                clear(folder)
            raise


def check_target(out: Path, overwrite: bool) -> None:
    """Refuse an output folder that exists, or one that `overwrite` must not replace because it is no checkpoint.

    What a run killed while publishing left is finished: a replaced output is put back, or a work folder dropped.
    """
    out = Path(os.path.abspath(out))
    check_parent(out)
    refuse_linked_folder(folder := work_folder(out))
    if (folder / REPLACED).exists() or ((folder / JOURNAL).exists() and not (folder / "output").exists()):
        with suppress(CompressionError), alone(out):  # unless another run holds it; this puts a replaced output back
            if out.exists() and (folder / REPLACED).exists():
                clear(folder)  # killed after the last rename
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


def file_of(unit: str) -> str:
    """The file of a decoder layer, or of all that lies outside the layers."""
    return f"{unit or 'rest'}.safetensors"


def write_stage(job: OutputJob, folder: Path, steps: Sequence[str], advance: Advance) -> None:
    """Write the files of a job that are not there yet; processes take turns. `steps` label those that make them."""
    if here().is_first:
        folder.mkdir(parents=True, exist_ok=True)
    here().barrier()
    by_unit: dict[str, list[OutputTensor]] = {unit: [] for unit in job.units}
    for output in job.outputs:
        by_unit[output.unit].append(output)
    with LayerWriter() as writer:
        for number, (unit, outputs) in enumerate(by_unit.items()):
            path = folder / file_of(unit)
            made = made_by(path)
            if here().takes_turn(number) and (made is None or made[: len(steps)] != tuple(steps)):
                writer.write(path, outputs, job.produce(unit), steps)
            advance(unit or "embeddings and head")
    here().barrier()
    if here().is_first:
        places = {output.name: file_of(output.unit) for output in job.outputs}
        write_file(folder / INDEX_NAME, index_json(places, job.outputs))
        for name, source in job.files.items():
            write_file(folder / name, source if isinstance(source, bytes) else source.read_bytes())
    here().barrier()


def put_tensors(folder: Path, tensors: Mapping[str, Tensor], step: str) -> None:
    """Write the layer files of a stage anew with other values for some tensors, by stored name, of the same dtype."""
    checkpoint = Checkpoint(folder)
    files = {checkpoint.tensors[name].file for name in tensors}
    with LayerWriter() as writer:
        for file in sorted(files):
            steps = made_by(folder / file) or ()
            if step in steps:
                continue
            infos = [info for info in checkpoint.tensors.values() if info.file == file]
            outputs, changed = [_output(info) for info in infos], _changed(folder, infos, tensors)
            writer.write(folder / file, outputs, changed, (*steps, step))


def _changed(
    folder: Path, infos: Sequence[TensorInfo], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Iterator[Piece]]]:
    for info in infos:
        value = tensors.get(info.name)
        stored: Piece = FileRange(folder / info.file, info.begin, info.nbytes)
        yield info.name, iter([stored if value is None else tensor_bytes_view(refuse_overflow(info.name, value))])


def _output(info: TensorInfo) -> OutputTensor:
    return OutputTensor(info.name, info.dtype, info.shape, info.file)


def assemble(stage: Path, output: Path, files: Mapping[str, bytes], max_shard_bytes: int | None = None) -> None:
    """Make the finished checkpoint of a stage's files, small ones joined, with config and tokenizer; `files` on top."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    found = [*dict.fromkeys(info.file for info in Checkpoint(stage).tensors.values())]
    layers = [[*read_header(stage / name).values()] for name in found]
    most = max_shard_bytes or math.inf  # of a part of a layer; one tensor may be larger
    parts = [[layer[n] for n in part] for layer in layers for part in shards([info.nbytes for info in layer], most)]
    groups = shards([sum(info.nbytes for info in part) for part in parts], max_shard_bytes or MAX_SHARD_BYTES, SMALL)
    whole = Counter(part[0].file for part in parts)
    places = dict[str, str]()
    with LayerWriter() as writer:
        for number, group in enumerate(groups, start=1):
            shard = SINGLE_NAME if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            infos = [info for part in group for info in parts[part]]
            places |= {info.name: shard for info in infos}
            if len(group) == 1 and whole[infos[0].file] == 1:
                try:
                    os.link(stage / infos[0].file, output / shard)
                except OSError:  # a file system without second names
                    shutil.copyfile(stage / infos[0].file, output / shard)
            else:
                sources = dict.fromkeys(info.file for info in infos)
                steps = dict.fromkeys(step for file in sources for step in made_by(stage / file) or ())
                writer.write(output / shard, [_output(info) for info in infos], _changed(stage, infos, {}), [*steps])
    if len(groups) > 1:
        write_file(output / INDEX_NAME, index_json(places, [_output(info) for part in parts for info in part]))
    for path in stage.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX_NAME:
            write_file(output / path.relative_to(stage), path.read_bytes())
    for name, content in files.items():
        write_file(output / name, content)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file and flush it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def publish(work: Workdir, overwrite: bool) -> None:
    """Rename the finished output into its place; what it replaces is deleted only afterwards, the work folder too."""
    check_target(work.out, overwrite)  # making takes a while, and the place may have been taken meanwhile
    replaced = work.folder / REPLACED
    shutil.rmtree(replaced, ignore_errors=True)
    replace_folder(work.output, work.out, replaced)
    directory = os.open(work.out.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    clear(work.folder, {LOCK})
