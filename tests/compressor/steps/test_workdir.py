"""The work folder: files of layers, going on after a kill at any moment, overwriting, locking, full disks."""

import errno
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from compressor.attribution.report import NAMES as ATTRIBUTION
from compressor.checkpoint.reader import DTYPE_BITS, TORCH_DTYPES, Checkpoint
from compressor.errors import CompressionError
from compressor.files import work_folder
from compressor.quality_gate.report import NAMES as GATE
from compressor.report.comparison_report import NAMES as COMPARISON
from compressor.report.page import MADE_BY
from compressor.steps import workdir
from compressor.steps.tensors import OutputJob, OutputTensor, Piece
from compressor.steps.workdir import header_of, shards
from tests.support.small import tree

UNITS = ("", "layers.0", "layers.1", "layers.2")
DTYPES = ("BF16", "F32", "U8", "F64")
FORK = multiprocessing.get_context("fork")  # a real process that can really be killed, without importing torch again


def content(name: str, nbytes: int) -> bytes:
    return random.Random(name).randbytes(nbytes)


def outputs(per_unit: int = 5) -> tuple[OutputTensor, ...]:
    return tuple(
        OutputTensor(f"{decoder_layer or 'head'}.t{number}", DTYPES[number % 4], (3 + number, 5), decoder_layer)
        for decoder_layer in UNITS
        for number in range(per_unit)
    )


def good(folder: Path) -> None:
    Checkpoint(folder)


TEMPLATE, RECORD = "additional_chat_templates/a.jinja", b'{"tool": "moe-compressor"}'
STEPS = ("0-prune",)
Before = Callable[[str, int], Any]


def a_job(
    before: Before = lambda decoder_layer, number: None,
    verify: Callable[[Path], None] = good,
    files: dict[str, bytes | Path] | None = None,
) -> OutputJob:
    """A job; `before` is called with a decoder layer and the number of the tensor that is about to be made."""
    made = outputs()

    def produce(decoder_layer: str) -> Iterable[tuple[str, Iterator[Piece]]]:
        for number, output in enumerate(output for output in made if output.decoder_layer == decoder_layer):
            before(decoder_layer, number)
            data = content(output.name, output.nbytes)
            yield output.name, iter([data[:7], memoryview(data)[7:]])

    beside = {"config.json": b"{}", TEMPLATE: b"[1]", "compression.json": RECORD} if files is None else files
    return OutputJob(made, UNITS, produce, beside, verify)


def write(job: OutputJob, out: Path, overwrite: bool = False, key: str = "one", shard_bytes: int = 300) -> None:
    """What a run of one stage does in its work folder."""
    with workdir.open_workdir(out) as work:
        workdir.check_target(out, overwrite)
        workdir.check_space(out, sum(output.nbytes for output in job.outputs))
        work.resume(key)
        stage = work.checkpoint(0)
        if not (stage / workdir.INDEX_NAME).exists():
            workdir.write_checkpoint(job, stage, STEPS, lambda detail: None)
        workdir.assemble(stage, work.output, shard_bytes)
        job.verify(work.output)
        workdir.publish(work, overwrite)


def units_made(out: Path) -> set[str]:
    """The units whose tensors are made when the output is written, which leaves no work folder."""
    made: list[str] = []
    write(a_job(lambda decoder_layer, _: made.append(decoder_layer)), out)
    assert not work_folder(out).exists()
    return set(made)


@st.composite
def some_outputs(draw: st.DrawFn) -> tuple[OutputTensor, ...]:
    dtypes = st.sampled_from(sorted(TORCH_DTYPES))
    kinds = draw(st.lists(st.tuples(dtypes, st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=12))
    return tuple(OutputTensor(f"t{n}.żółć", dtype, tuple(shape), "") for n, (dtype, shape) in enumerate(kinds))


@given(some_outputs())
def test_a_file_has_every_tensor_once_aligned_and_without_gaps(made: tuple[OutputTensor, ...]) -> None:
    header, places = header_of(made, STEPS)
    by_name = {output.name: output for output in made}
    assert places.keys() == by_name.keys()
    end = len(header)
    assert end % 8 == 0 and int.from_bytes(header[:8], "little") == end - 8
    for name, offset in sorted(places.items(), key=lambda place: (place[1], by_name[place[0]].nbytes)):
        assert offset == end and offset % (DTYPE_BITS[by_name[name].dtype] // 8) == 0
        end += by_name[name].nbytes
    assert end == len(header) + sum(output.nbytes for output in made)
    assert header_of(made, STEPS) == (header, places)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20), st.integers(1, 200), st.integers(0, 60))
def test_small_files_are_joined_in_order_and_large_ones_stay(sizes: list[int], most: int, small: int) -> None:
    groups = shards(range(len(sizes)), sizes, most, small)
    assert [number for group in groups for number in group] == [*range(len(sizes))]
    for group, after in zip(groups, [*groups[1:], []], strict=True):
        own = [sizes[number] for number in group]
        assert len(own) == 1 or (max(own) <= small and sum(own) <= most)
        if after and max(*own, sizes[after[0]]) <= small:
            assert sum(own) + sizes[after[0]] > most


def test_the_safetensors_library_reads_every_tensor_back(tmp_path: Path) -> None:
    job, out = a_job(), tmp_path / "out"
    write(job, out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {output.name for output in job.outputs}
    parameters, nbytes = (sum(getattr(output, size) for output in job.outputs) for size in ("parameters", "nbytes"))
    assert index["metadata"] == {"total_parameters": parameters, "total_size": nbytes}
    for output in job.outputs:
        with safe_open(str(out / index["weight_map"][output.name]), "pt") as shard:
            tensor = shard.get_tensor(output.name)
            assert shard.metadata() == {"format": "pt", "steps": '["0-prune"]'}
        assert tuple(tensor.shape) == output.shape and tensor.dtype == TORCH_DTYPES[output.dtype]
        assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == content(output.name, output.nbytes)
    found = sorted(path.name for path in out.glob("*.safetensors"))
    assert found == [f"model-{n:05d}-of-{len(found):05d}.safetensors" for n in range(1, len(found) + 1)]
    stored = [[output.nbytes for output in job.outputs if index["weight_map"][output.name] == file] for file in found]
    assert all(len(sizes) == 1 or sum(sizes) <= 300 for sizes in stored)
    assert len(found) > len(UNITS) and (out / TEMPLATE).read_bytes() == b"[1]"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    write(a_job(), tmp_path / "one", shard_bytes=10**9)  # one shard has the plain name, and no index
    assert sorted(tree(tmp_path / "one")) == [TEMPLATE, "compression.json", "config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("whole") / "out"
    write(a_job(), out)
    return tree(out)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_killed(work: Callable[[], Any]) -> None:
    process = FORK.Process(target=work)
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("decoder_layer", UNITS)
@pytest.mark.parametrize("number", [0, 3])
def test_killed_while_a_tensor_is_made(decoder_layer: str, number: int, tmp_path: Path, whole: dict[str, str]) -> None:
    out = tmp_path / "out"
    run_killed(lambda: write(a_job(lambda *at: die() if at == (decoder_layer, number) else None), out))
    assert not out.exists() and work_folder(out).is_dir()
    made, at = units_made(out), UNITS.index(decoder_layer)
    assert tree(out) == whole
    assert set(UNITS[at:]) <= made <= set(UNITS[max(0, at - 1) :])  # of the finished, one may wait for the disk


def shown(folder: Path) -> dict[str, str]:
    """The files of a folder that are not hidden, with their digests."""
    return {name: digest for name, digest in tree(folder).items() if not name.startswith(".")}


def before_calls(call: str, action: Callable[[int], None]) -> Callable[..., Any]:
    """A function of `os` that does something, with the number of the call, before each of its calls."""
    real, count = getattr(os, call), itertools.count(1)

    def acting(*arguments: Any, **named: Any) -> Any:
        action(next(count))
        return real(*arguments, **named)

    return acting


@pytest.mark.parametrize("exists", [False, pytest.param(True, marks=pytest.mark.full)], ids=["new", "empty"])
@pytest.mark.parametrize("call", ["replace", "pwrite", "fsync", "close", "open"])
def test_killed_before_any_system_call(
    call: str, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, str]
) -> None:
    numbers = list[int]()
    if exists:
        (tmp_path / "count").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, before_calls(call, numbers.append))
        write(a_job(), tmp_path / "count")
    total = numbers[-1]
    for fatal in sorted({1, total // 2, total} & {*numbers}):
        out = tmp_path / f"out-{fatal}"
        if exists:
            out.mkdir()

        def work(out: Path = out, fatal: int = fatal) -> None:
            setattr(os, call, before_calls(call, lambda number: die() if number == fatal else None))
            write(a_job(), out)

        run_killed(work)
        if (out / "config.json").exists():  # killed after the last rename
            assert shown(out) == whole
        write(a_job(), out, overwrite=True)
        assert tree(out) == whole and not work_folder(out).exists(), fatal


OTHERS = '{"key": "other", "steps": []}'


@pytest.mark.parametrize("journal", ["", "[]", OTHERS])
def test_a_broken_journal_and_anothers_are_not_resumed(journal: str, tmp_path: Path, whole: dict[str, str]) -> None:
    out = tmp_path / "out"
    run_killed(lambda: write(a_job(lambda u, n: die() if u == UNITS[3] else None), out))
    (work_folder(out) / workdir.JOURNAL).write_text(journal)
    assert units_made(out) == set(UNITS) and tree(out) == whole


def test_a_file_that_was_cut_short_is_made_again(tmp_path: Path, whole: dict[str, str]) -> None:
    """As a loss of power may leave it, which a process that is killed does not."""
    out = tmp_path / "out"
    run_killed(lambda: write(a_job(lambda u, n: die() if u == UNITS[3] else None), out))
    first = work_folder(out) / "step-0" / "rest.safetensors"
    first.write_bytes(first.read_bytes()[:-1])
    made = units_made(out)
    assert UNITS[0] in made and UNITS[1] not in made and tree(out) == whole


def test_a_fault_leaves_nothing(tmp_path: Path) -> None:
    def fault(decoder_layer: str, number: int) -> None:
        if decoder_layer == UNITS[2]:
            raise CompressionError("tensor 'x' in y holds NaN")

    def not_good(folder: Path) -> None:
        raise CompressionError("the written config is wrong")

    for job, message in ((a_job(fault), "holds NaN"), (a_job(verify=not_good), "config is wrong")):
        with pytest.raises(CompressionError, match=message):
            write(job, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


def test_too_small_a_disk_is_refused_before_anything_is_written_and_an_interrupted_run_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, work = shutil.disk_usage(tmp_path), work_folder(tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=workdir.SPARE_BYTES - 1_000_000))
    with pytest.raises(CompressionError, match=r"the output needs 0\.02 GB, .* has 0\.02 GB free; free some space"):
        write(a_job(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    work.mkdir()
    (work / "big").write_bytes(bytes(3_000_000))
    workdir.check_space(tmp_path / "out", 1_500_000)
    with pytest.raises(CompressionError, match="the output needs"):
        workdir.check_space(tmp_path / "out", 3_500_000)


@pytest.mark.parametrize(
    ("call", "code", "overwrite"),
    [
        ("pwrite", errno.ENOSPC, False),
        ("pwrite", errno.EDQUOT, True),
        ("fsync", errno.ENOSPC, True),
        ("fsync", errno.EIO, False),
        ("replace", errno.ENOSPC, True),
        ("replace", errno.EIO, False),
    ],
)
def test_a_disk_that_fails_at_any_call_leaves_what_was_there(
    call: str, code: int, overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    if overwrite:
        write(a_job(files={"config.json": b'{"old": 1}'}), out, key="old")
    before = tree(tmp_path)
    message = "Input/output error" if code == errno.EIO else "is full; free some space and run"
    for fatal in range(1, 8):
        numbers = [0]

        def fail(number: int, fatal: int = fatal, numbers: list[int] = numbers) -> None:
            numbers.append(number)
            if number == fatal:
                raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, before_calls(call, fail))
            told = ""
            try:
                write(a_job(), out, overwrite)
            except (CompressionError, OSError) as error:
                told = str(error)
        if not told:
            assert numbers[-1] < fatal
            break
        assert message in told
        assert tree(tmp_path) == before, fatal
        assert not work_folder(out).exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_existing_output_is_refused_and_overwrite_replaces_checkpoints_and_empty_folders_only(
    overwrite: bool, tmp_path: Path, whole: dict[str, str]
) -> None:
    said = "is not a checkpoint folder, so --overwrite will not" if overwrite else "exists already; name another folder"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "diary").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "out" if overwrite else "nowhere")
    if overwrite:
        (tmp_path / "out").mkdir()
        for _ in range(2):
            write(a_job(), tmp_path / "out", overwrite=True)
            assert tree(tmp_path / "out") == whole
    before = tree(tmp_path)
    for name in ("folder", "file", "link"):
        with pytest.raises(CompressionError, match=said):
            write(a_job(), tmp_path / name, overwrite)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("strays", "told"),
    [
        *(
            ([name], name.split("/")[0])
            for name in ("diary.txt", "taxes.json", "train.py", "notes/diary.txt", ".git/HEAD")
        ),
        (["a.txt", "b.txt", "c.txt", "onnx/notes.txt"], "a.txt, b.txt, c.txt and 1 more"),
    ],
)
def test_overwrite_keeps_what_is_no_part_of_a_checkpoint(
    own: bool, strays: list[str], told: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write(a_job(files={"config.json": b"{}", **({"compression.json": RECORD} if own else {})}), out)
    if own:
        (out / "onnx").mkdir()
        (out / "onnx" / "onnx_export.json").write_bytes(RECORD)
    for stray in strays:
        (out / stray).parent.mkdir(exist_ok=True)
        (out / stray).write_text("dear diary")
    before = tree(tmp_path)
    expected = told if own else f"{told.split(',')[0]}"
    with pytest.raises(CompressionError, match=f"holds {expected}.*no part of a checkpoint, .* --overwrite"):
        write(a_job(), out, overwrite=True)
    assert tree(tmp_path) == before


def test_overwrite_replaces_what_commands_add_and_checkpoint_files(tmp_path: Path, whole: dict[str, str]) -> None:
    added = {
        **dict.fromkeys((*GATE, *ATTRIBUTION, *COMPARISON, "onnx/onnx_export.json"), "{}"),
        "plan.wiki.json": '{"format": "moe-compressor-plan/1"}',
        "page.html": f"<!DOCTYPE html>... {MADE_BY} out; plan 12.",
        "terms.txt": "carried from the source",
        ".cache/huggingface/.gitignore": "*",
        "compression.json": '{"tool": "moe-compressor", "files": ["terms.txt"]}',
    }
    usual = (
        "generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
        "vocab.json merges.txt tokenizer.model chat_template.jinja preprocessor_config.json README.md LICENSE "
        "LICENSE.txt USE_POLICY.md .gitattributes modeling_deepseek.py pytorch_model-00001-of-00002.bin recipe.yaml"
    )
    for own, strays in ((True, added), (False, dict.fromkeys(usual.split(), ""))):
        out = tmp_path / f"out {own}"
        write(a_job(files={"config.json": b"{}", **({"compression.json": RECORD} if own else {})}), out)
        for name, text in strays.items():
            (out / name).parent.mkdir(exist_ok=True, parents=True)
            (out / name).write_text(text)
        write(a_job(), out, overwrite=True)
        assert tree(out) == whole
    for files in ({}, {"compression.json": "{}"}, {"onnx_export.json": "null"}):
        out = tmp_path / f"app {len(list(tmp_path.iterdir()))}"
        out.mkdir()
        for name, text in {"config.json": '{"port": 80}', **files}.items():
            (out / name).write_text(text)
        with pytest.raises(CompressionError, match="is not a checkpoint folder, so --overwrite will not replace it"):
            write(a_job(), out, overwrite=True)


def test_an_output_that_comes_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for overwrite, said in ((False, "exists already"), (True, "is not a checkpoint folder")):
        with pytest.raises(CompressionError, match=said):
            write(a_job(verify=lambda _: (out.mkdir(), (out / "diary.txt").touch())[1]), out, overwrite)
        assert list(tree(tmp_path)) == ["out/diary.txt"]
        shutil.rmtree(out)


def test_a_parent_that_is_none_or_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for parent in (tmp_path / "gone", tmp_path / "file"):
        with pytest.raises(CompressionError, match="is not a folder; create it or name another output folder"):
            write(a_job(), parent / "out")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CompressionError, match="cannot be written to"):
        write(a_job(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


OLD: dict[str, bytes | Path] = {"config.json": b'{"old": 1}'}


@pytest.mark.parametrize("after", [0, 1, 2])
def test_killed_between_the_renames(after: int, tmp_path: Path, whole: dict[str, str]) -> None:
    out = tmp_path / "out"
    write(a_job(files=OLD), out, key="old")
    old, real, renames = tree(out), os.replace, [0]

    def killing(source: Any, target: Any) -> None:
        is_output = out in (Path(source), Path(target))
        if is_output and renames[0] == after:
            die()
        renames[0] += is_output
        real(source, target)
        if renames[0] == 2 and after == 2:
            die()

    def work() -> None:
        os.replace = killing
        write(a_job(), out, True)

    run_killed(work)
    assert out.exists() == (after != 1)
    if after == 2:
        assert tree(out) == whole
    with pytest.raises(CompressionError, match="exists already"):  # the old output is back, or the new one is there
        workdir.check_target(out, False)
    assert tree(out) == (whole if after == 2 else old)
    write(a_job(), out, overwrite=True)
    assert tree(out) == whole and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_run_added_is_not_taken_over(tmp_path: Path, whole: dict[str, str]) -> None:
    def add(folder: Path) -> None:
        (folder / "gate.json").touch()
        (folder / "onnx").mkdir()
        die()

    out = tmp_path / "out"
    run_killed(lambda: write(a_job(verify=add), out))
    write(a_job(), out)
    assert tree(out) == whole


def forbid_siblings(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system say that nothing may be written beside `out`, as it never does to root."""
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != out.parent and real(path, mode))


def test_an_empty_folder_is_filled_and_nothing_is_made_beside_it(tmp_path: Path, whole: dict[str, str]) -> None:
    out = tmp_path / "out"
    out.mkdir(0o750)
    (out / "lost+found").mkdir()
    before, seen = out.stat(), list[list[str]]()

    def look(folder: Path) -> None:
        seen.append(sorted(os.listdir(tmp_path)))
        assert out in folder.parents and not (out / "config.json").exists()

    write(a_job(verify=look), out)
    assert shown(out) == whole and seen == [["out"]] == [os.listdir(tmp_path)]
    assert (out.stat().st_ino, out.stat().st_mode) == (before.st_ino, before.st_mode)
    with pytest.raises(CompressionError, match="exists already"):
        write(a_job(), out)


@pytest.mark.parametrize("overwrite", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_folder_that_cannot_be_renamed_is_whole_or_without_config_at_every_moment(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at each rename, and in the repair that follows; the next run ends with the same bytes."""
    out, once = tmp_path / "out", partial(write, shard_bytes=10**6)
    once(a_job(), out)
    whole = tree(out)
    forbid_siblings(out, monkeypatch)

    def ends(fatal: int) -> bool:
        def work() -> None:
            os.replace = before_calls("replace", lambda number: die() if number == fatal else None)
            once(a_job(), out, overwrite)

        process = FORK.Process(target=work)
        process.start()
        process.join(30)
        return process.exitcode == 0

    for fatal in range(1, 1000):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        old = dict[str, str]()
        if overwrite:
            once(a_job(files={"config.json": b'{"old": 1}', "vocab.json": b"{}"}), out, key="old")
            old = shown(out)
        is_last = ends(fatal)
        assert not (out / "config.json").exists() or shown(out) in (old, whole), fatal
        ends(2)
        assert not (out / "config.json").exists() or shown(out) in (old, whole), fatal
        once(a_job(), out, overwrite=True)
        assert tree(out) == whole and os.listdir(tmp_path) == ["out"], fatal
        if is_last:
            break
    assert 10 < fatal < 999


@pytest.mark.parametrize("inside", ["", "lock", "output", "moe-compressor-work.json", "output/config.json"])
def test_nothing_is_written_through_a_link(inside: str, tmp_path: Path) -> None:
    """A link in the place of the work folder, or in it, as someone may leave in a folder that many write to."""
    work, aim = work_folder(tmp_path / "out"), tmp_path / "aim"
    if inside in ("", "output"):
        aim.mkdir()
        (aim / "diary.txt").write_text("dear diary")
    else:
        aim.write_text("dear diary")
    (work / inside).parent.mkdir(parents=True, exist_ok=True)
    (work / inside).symlink_to(aim)
    before = tree(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(CompressionError, match="is a link, and nothing is written through one; remove it"):
            write(a_job(), tmp_path / "out", overwrite)
        assert tree(tmp_path) == before and (work / inside).is_symlink()


@pytest.mark.parametrize("kind", ["tmpfs", "bind"])
def test_a_mount_point_is_filled_and_replaced(kind: str, tmp_path: Path, whole: dict[str, str]) -> None:
    out, inside = tmp_path / "out", tmp_path / "inside"
    out.mkdir()
    inside.mkdir()
    how = ("-t", "tmpfs", "none") if kind == "tmpfs" else ("--bind", str(inside))
    if subprocess.run(["mount", *how, str(out)], capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    try:
        write(a_job(files={"config.json": b'{"old": 1}', "vocab.json": b"{}"}), out, key="old")
        write(a_job(), out, overwrite=True)
        assert tree(out) == whole and sorted(os.listdir(tmp_path)) == ["inside", "out"]
    finally:
        subprocess.run(["umount", str(out)], check=True)
