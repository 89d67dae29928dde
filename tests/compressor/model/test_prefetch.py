"""Reading ahead: the same results bit for bit, no copy before its time, the same refusals, and no thread left over."""

import gc
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.loading import ReadAhead
from compressor.model.opened import OpenModel, open_model
from compressor.model.streaming import LayerVisitor, Pass, ReversePass
from tests.compressor.model.test_reverse import Gathering, loss
from tests.support import small
from tests.support.opened_models import batches, logits, opened


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


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("reading ahead")]


def gradients(model: OpenModel, parts: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
    gathering = Gathering(model)
    ReversePass(model, parts).run(loss, gathering)
    return gathering.found


def _given(found: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {key: value for key, value in found.items() if value is not None}


@pytest.mark.parametrize("name", ["mixtral", "mixtral-tied", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_passes_give_the_same_numbers(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock, (2, 1))
    expected, plain = logits(Pass(model, parts, to_end=True)), gradients(model, parts)
    model.partial.ahead.copier = lagging = LaggingDevice()
    close = {"rtol": 1e-4, "atol": 1e-5}  # copies lie elsewhere
    torch.testing.assert_close(logits(Pass(model, parts, to_end=True)), expected, **close)
    torch.testing.assert_close(_given(gradients(model, parts)), _given(plain), **close)
    begun = 3 * (len(model.architecture.decoder_layers) - 1)
    assert readers() == []
    assert lagging.log.count("hand over") == lagging.log.count("copy") > begun
    assert lagging.log.count("computed") == begun


@pytest.mark.parametrize("device", [None, "lagging"])
def test_a_fault_is_the_same_sentence(device: str | None, tmp_path: Path) -> None:
    small.save(tmp_path)
    damaged = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    small.edit_tensors(tmp_path, lambda tensors: tensors[damaged].view(-1)[3:4].fill_(torch.nan))
    model = open_model(locate(str(tmp_path)), "float32", "cpu")
    model.partial.ahead.copier = LaggingDevice() if device else None
    seen, layer_names, ids = list[str](), model.architecture.decoder_layers, torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(CompressionError, match=rf"tensor '{damaged}' in model\.safetensors holds NaN; repair"):
        seen.extend(Pass(model, [ids]).layers())
    assert seen == [layer_names[0]] and readers() == []  # no sooner than its layer is wanted
    assert list(Pass(model, [ids], wanted=layer_names[:1]).layers()) == [layer_names[0]]  # the rest is not read


@pytest.mark.parametrize("how", ["close", "forget", "fail"])
def test_an_abandoned_pass_ends_its_thread(how: str, tmp_path: Path) -> None:
    _, model = opened("mixtral", tmp_path)
    model.partial.ahead.copier = LaggingDevice()

    class Failing(LayerVisitor):
        def before_layer(self, decoder_layer: str, replay: Any) -> None:
            assert len(readers()) == 1
            if how == "fail":
                raise ValueError("a visitor's own")

    passing = Pass(model, [torch.ones(1, 4, dtype=torch.long)]).layers(Failing())
    if how == "fail":
        with pytest.raises(ValueError, match="a visitor's own"):
            next(passing)
    else:
        assert next(passing) == model.architecture.decoder_layers[0]
        if how == "close":
            passing.close()
    del passing
    gc.collect()
    assert readers() == []


class FullDevice(LaggingDevice):
    """A device that looks free and has no memory left."""

    def copy(self, tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no more")


def test_only_where_there_is_room(tmp_path: Path) -> None:
    _, model = opened("mixtral", tmp_path)
    names = list(model.checkpoint.tensors)
    size = sum(model.checkpoint.tensors[name].nbytes for name in names)
    expected = {name: tensor.sum() for name, tensor in model.checkpoint.read_all(names).items()}

    def begins(device: LaggingDevice | None) -> bool:
        reader = ReadAhead(model.checkpoint, torch.device("cpu"))
        reader.copier = device
        reader.begin(names)
        begun = readers() != []
        assert {name: tensor.sum() for name, tensor in reader.take(names).items()} == expected
        reader.stop()
        return begun

    assert not begins(None)
    device = LaggingDevice(free=2 * size)
    assert begins(device)
    device.free -= 1
    assert not begins(device)
    device.free += 1

    assert begins(FullDevice())  # and is then read without haste
