"""Reading ahead: the same results bit for bit, no copy before its time, the same refusals, and no thread left over."""

import gc
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.checkpoint.reader import Checkpoint
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model import loading
from compressor.model.loading import ReadAhead
from compressor.model.opened import OpenModel, open_model
from compressor.model.streaming import LayerVisitor, Pass, ReversePass
from tests import small, zoo
from tests.compressor.model.test_reverse import Gathering, loss
from tests.opened import batches, logits, opened


@dataclass
class LaggingDevice:
    """A device that copies only when somebody waits for it, so that whoever does not wait finds other values."""

    free: int = 2**40
    queue: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    handed_over: int = 0
    copies_in: threading.Thread | None = None

    def room(self) -> int:
        return self.free

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.copies_in = threading.current_thread()
        yield

    def copy(self, tensor: Tensor) -> Tensor:
        assert threading.current_thread() is self.copies_in
        self.log.append("copy")
        self.queue.append((torch.full(tensor.shape, 77, dtype=torch.uint8).to(tensor.dtype), tensor))
        return self.queue[-1][0]

    def mark(self) -> "Event":
        if threading.current_thread() is not self.copies_in:
            return Event(self, None)
        return Event(self, len(self.queue) + self.handed_over)

    def hand_over(self, done: "Event", tensors: Iterable[Tensor]) -> None:
        assert threading.current_thread() is not self.copies_in
        assert done.place is not None
        done.synchronize()
        self.log += ["hand over"] * len(list(tensors))


@dataclass
class Event:
    """What comes before `place` copies have been made, counted from the beginning; None: the computing until then."""

    device: LaggingDevice
    place: int | None

    def synchronize(self) -> None:
        if self.place is None:
            self.device.log.append("computed")
            return
        while self.device.handed_over < self.place:
            target, source = self.device.queue.pop(0)
            target.copy_(source)
            self.device.handed_over += 1


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no file were in the page cache: every layer is worth reading ahead."""
    monkeypatch.setattr(Checkpoint, "cached", lambda self, names: False)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("reading ahead")]


def gradients(model: OpenModel, parts: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
    gathering = Gathering(model)
    ReversePass(model, parts).run(loss, gathering)
    return gathering.found


def _given(found: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {key: value for key, value in found.items() if value is not None}


def never(self: ReadAhead, names: Iterable[str]) -> None:
    """In the place of `begin`: nothing is read ahead."""


@pytest.mark.parametrize("name", ["mixtral", "mixtral-tied", "gpt_oss", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("device", [None, "lagging"])
def test_passes_give_the_same_bits(
    name: str, device: str | None, tmp_path: Path, uncached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, model = opened(name, tmp_path)
    parts, reader = batches(stock, (2, 1)), model.partial.ahead
    begun, begin = list[int](), ReadAhead.begin
    with monkeypatch.context() as without:
        without.setattr(ReadAhead, "begin", never)
        expected, plain = logits(Pass(model, parts, to_end=True)), gradients(model, parts)
    if device:
        reader.copier = lagging = LaggingDevice()
    monkeypatch.setattr(ReadAhead, "begin", lambda self, names: begun.append(begin(self, names) or len(readers())))
    exact = {"rtol": 0.0, "atol": 0.0} if device is None else {"rtol": 1e-4, "atol": 1e-5}  # copies lie elsewhere
    torch.testing.assert_close(logits(Pass(model, parts, to_end=True)), expected, **exact)
    torch.testing.assert_close(_given(gradients(model, parts)), _given(plain), **exact)
    assert len(begun) == 3 * (len(model.architecture.units) - 1)
    assert readers() == []
    if device:
        assert lagging.log.count("hand over") == lagging.log.count("copy") > len(begun)
        assert lagging.log.count("computed") == len(begun)


def reading_to(device: LaggingDevice, checkpoint: Checkpoint) -> ReadAhead:
    reader = ReadAhead(checkpoint, torch.device("cpu"))
    reader.copier = device
    return reader


def test_copies_wait_for_the_computing_before(tmp_path: Path) -> None:
    _, model = opened("mixtral", tmp_path)
    checkpoint, device = model.checkpoint, LaggingDevice()
    reader = reading_to(device, checkpoint)
    names = [name for name in checkpoint if ".layers.1." in name]
    for _ in range(2):
        device.log.clear()
        reader.begin(names)
        first = reader.take(names[:3])
        assert device.log[0] == "computed"
        rest = reader.take(names[3:])
        assert device.log == ["computed"] + ["copy"] * len(names) + ["hand over"] * len(names)
        for name, tensor in (first | rest).items():
            assert torch.equal(tensor, checkpoint.read(name)), name
            assert tensor.data_ptr() != checkpoint.read(name).data_ptr()
    assert readers() == []


@pytest.mark.parametrize("device", [None, "lagging"])
@pytest.mark.parametrize("ahead_of_time", [True, False])
def test_a_fault_is_the_same_sentence(
    device: str | None, ahead_of_time: bool, tmp_path: Path, uncached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.save(tmp_path)
    damaged = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    small.edit_tensors(tmp_path, lambda tensors: tensors[damaged].view(-1)[3:4].fill_(torch.nan))
    model = open_model(locate(str(tmp_path)), "float32", "cpu")
    model.partial.ahead.copier = LaggingDevice() if device else None
    if not ahead_of_time:
        monkeypatch.setattr(ReadAhead, "begin", never)
    seen, units, ids = list[str](), model.architecture.units, torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(CompressionError, match=rf"tensor '{damaged}' in model\.safetensors holds NaN; repair"):
        seen.extend(Pass(model, [ids]).layers())
    assert seen == [units[0]] and readers() == []  # no sooner than its layer is wanted
    assert list(Pass(model, [ids], wanted=units[:1]).layers()) == [units[0]]  # the rest is not read


@pytest.mark.parametrize("how", ["close", "forget", "fail"])
def test_an_abandoned_pass_ends_its_thread(
    how: str, tmp_path: Path, uncached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = opened("mixtral", tmp_path)
    model.partial.load(model.partial.keys_under(model.architecture.units[0]))
    started, go_on, read = threading.Event(), threading.Event(), list[str]()

    def slowly(name: str, file: str, tensor: Tensor) -> None:
        if threading.current_thread() in readers():
            read.append(name)
            started.set()
            assert go_on.wait(60)

    class Failing(LayerVisitor):
        def before_layer(self, unit: str, replay: Any) -> None:
            assert started.wait(60) and len(readers()) == 1
            if how == "fail":
                raise ValueError("a visitor's own")

    stop = ReadAhead.stop

    def stopping(self: ReadAhead) -> None:
        if self._pool is not None:
            self._abandoned.set()
            go_on.set()
        stop(self)

    monkeypatch.setattr(loading, "refuse_nan", slowly)
    monkeypatch.setattr(ReadAhead, "stop", stopping)
    units = model.architecture.units
    passing = Pass(model, [torch.ones(1, 4, dtype=torch.long)]).layers(Failing())
    if how == "fail":
        with pytest.raises(ValueError, match="a visitor's own"):
            next(passing)
    else:
        assert next(passing) == units[0]
        if how == "close":
            passing.close()
    del passing
    gc.collect()
    assert readers() == [] and model.partial.ahead._pool is None
    assert len(read) == 1  # it does not read its layer to the end


def test_only_where_there_is_room_and_something_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = opened("mixtral", tmp_path)
    names, reader = list(model.checkpoint), model.partial.ahead
    size = sum(model.checkpoint.tensors[name].nbytes for name in names)
    cached, room = [False], [2 * size]
    monkeypatch.setattr(Checkpoint, "cached", lambda self, names: cached[0])
    monkeypatch.setattr(loading, "available", lambda: room[0])

    def begins(reader: ReadAhead) -> bool:
        reader.begin(names)
        begun = reader._pool is not None
        assert {name: tensor.sum() for name, tensor in reader.take(names).items()} == expected
        reader.stop()
        return begun

    expected = {name: tensor.sum() for name, tensor in model.checkpoint.read_all(names).items()}
    assert begins(reader)
    room[0] -= 1
    assert not begins(reader)
    room[0], cached[0] = 2 * size, True
    assert not begins(reader)
    device = LaggingDevice(free=2 * size)
    assert begins(reading_to(device, model.checkpoint))  # a copy is worth it, cached or not
    device.free -= 1
    assert not begins(reading_to(device, model.checkpoint))
    device.free += 1

    def full(tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(device, "copy", full)
    assert begins(reading_to(device, model.checkpoint))  # and is then read without haste


def test_whether_files_are_cached_is_asked_of_the_system(tmp_path: Path) -> None:
    zoo.save("mixtral", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.read_bytes()
    if not checkpoint.cached(checkpoint):
        pytest.skip("this file system does not tell")
    if os.statvfs(file).f_blocks and not _in_memory(tmp_path):
        assert any(_dropped(file) and not checkpoint.cached(checkpoint) for _ in range(100))  # it is but advice
    assert checkpoint.cached([])


def _dropped(file: Path) -> bool:
    """Ask the system to drop a file's pages, which it does unless something else holds them at that moment."""
    time.sleep(0.02)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _in_memory(folder: Path) -> bool:
    """Whether the folder lies in a tmpfs, of which nothing can be dropped."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return max((m for m in mounts if folder.is_relative_to(m[1])), key=lambda m: len(m[1]))[2] == "tmpfs"
