"""Reading ahead: a thread reads the next layer's stored tensors while this layer computes.

On the CPU the pages of the files are brought into the page cache and checked: what `take` hands out are views of the
mapped files, so no memory is taken for a second layer. For a CUDA device the thread copies them through two pinned
buffers on a stream of their own, so that the device holds one layer and its successor as it is stored.
"""

import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.reader import Checkpoint, refuse_nan
from compressor.memory import available

STAGE = 2**25  # bytes of each of the two pinned buffers
SHARE = 2  # how many times what is read ahead must be free


class Cuda:
    """What copying asks of a CUDA device, each call at the place where the order of streams is decided."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def room(self) -> int:
        """Bytes of the device that can still be allocated."""
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(torch.cuda.mem_get_info(self.device)[0]) + held

    def copying(self) -> AbstractContextManager[Any]:
        """Makes the copying stream this thread's own."""
        return torch.cuda.stream(self.stream)

    def pinned(self, size: int) -> Tensor:
        """Page-locked bytes of the host."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def empty(self, like: Tensor) -> Tensor:
        """An uninitialised tensor of the device, from the memory of this thread's stream."""
        return torch.empty(like.shape, dtype=like.dtype, device=self.device)

    def copy(self, target: Tensor, staged: Tensor) -> None:
        """Begin to copy pinned bytes to the device."""
        target.copy_(staged, non_blocking=True)

    def mark(self) -> Any:
        """An event behind all that this thread's stream has been given so far."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def hand_over(self, done: Any, tensors: Iterable[Tensor]) -> None:
        """Let this thread's stream use tensors once `done` has come; freed, they stay its own until it is through."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(done)
        for tensor in tensors:
            tensor.record_stream(stream)


class Staging:
    """Copies tensors to the device by way of two pinned buffers: one is filled while the other is copied from."""

    def __init__(self, cuda: Any, size: int = STAGE) -> None:
        self.cuda, self.size = cuda, size
        self.buffers = [cuda.pinned(size) for _ in range(2)]
        self.copied: list[Any] = [None, None]  # behind the last copy out of each
        self.turn = self.used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """The tensor on the device, once the copying stream has come so far."""
        target: Tensor = self.cuda.empty(tensor)
        if tensor.numel():
            source, sink = (value.reshape(-1).view(torch.uint8) for value in (tensor, target))
            begin = 0
            while begin < len(source):
                if self.used == self.size:
                    self._turn()
                end = min(len(source), begin + self.size - self.used)
                staged = self.buffers[self.turn][self.used : self.used + end - begin]
                staged.copy_(source[begin:end])
                self.cuda.copy(sink[begin:end], staged)
                self.used, begin = self.used + end - begin, end
        return target

    def _turn(self) -> None:
        """Go on with the other buffer, once nothing is copied from it any more."""
        self.copied[self.turn] = self.cuda.mark()
        self.turn, self.used = 1 - self.turn, 0
        if self.copied[self.turn] is not None:
            self.copied[self.turn].synchronize()


class ReadAhead:
    """Reads a checkpoint's tensors, those that were announced ahead of time; each is checked for NaN once."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, cuda: Any = None) -> None:
        self.checkpoint, self.device, self.cuda = checkpoint, device, cuda
        self.checked = set[str]()
        self.staging: Staging | None = None
        self._work: _Work | None = None

    def begin(self, names: Iterable[str]) -> None:
        """Have a thread read these tensors, where that is worth it; what was announced before is forgotten.

        It is not where room is short, or where they are to stay views of files that the page cache holds already.
        """
        self.stop()
        wanted = list(names)
        if not wanted or (self.stage() is None and self.checkpoint.cached(wanted)):
            return
        if self._has_room(sum(self.checkpoint.tensors[name].nbytes for name in wanted)):
            self._work = _Work(self, wanted)

    def take(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names, as views of files or on the device; raises `CompressionError` for NaN.

        What was read ahead is waited for and given away; the rest is read now.
        """
        wanted, found = list(names), dict[str, Tensor]()
        if self._work is not None and not self._work.names.isdisjoint(wanted):
            found = self._work.take(wanted)
        read = self.checkpoint.read_all([name for name in wanted if name not in found])
        self.check(read)
        return found | read

    def stop(self) -> None:
        """End the thread, if there is one, and forget what it has read."""
        if self._work is not None:
            self._work.end()
            self._work = None

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `CompressionError` naming a tensor that holds a NaN."""
        for name, tensor in tensors.items():
            if name not in self.checked:
                refuse_nan(name, self.checkpoint.tensors[name].file, tensor)
                self.checked.add(name)

    def stage(self) -> Staging | None:
        """The way to a CUDA device; None where tensors stay views of their files."""
        if self.staging is None and (self.cuda is not None or self.device.type == "cuda"):
            self.cuda = self.cuda or Cuda(self.device)
            self.staging = Staging(self.cuda)
        return self.staging

    def _has_room(self, size: int) -> bool:
        rooms = [available(), None if self.stage() is None else self.cuda.room()]
        return all(room is None or room >= SHARE * size for room in rooms)


class _Work:
    """One layer's tensors, read by a thread that ends by itself when it has read them."""

    def __init__(self, reader: ReadAhead, names: list[str]) -> None:
        self.reader, self.names = reader, set(names)
        self.staging = reader.stage()
        self.found: dict[str, Tensor] = {}
        self.fault: BaseException | None = None
        self.begun: Any = None if self.staging is None else self.staging.cuda.mark()  # all that has been computed
        self.done: Any = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(names,), name="reading ahead")
        self.thread.start()

    def take(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Wait for the thread and give those of the names away that it has read; raises what it met."""
        self.thread.join()
        if self.fault is not None:
            raise self.fault
        taken = {name: self.found.pop(name) for name in names if name in self.found}
        if self.staging is not None and taken:
            self.staging.cuda.hand_over(self.done, taken.values())
        return taken

    def end(self) -> None:
        """End the thread; its faults are nobody's any more."""
        self.ended.set()
        self.thread.join()
        self.found.clear()

    def _run(self, names: list[str]) -> None:
        try:
            if self.staging is None:
                self._touch(self.reader.checkpoint.read_all(names))
            else:
                with self.staging.cuda.copying():
                    self._copy(self.staging, self.reader.checkpoint.read_all(names))
        except torch.OutOfMemoryError:
            self.found = {}  # `take` reads what is missing when its place has become free
        except BaseException as error:
            self.fault = error

    def _touch(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if self.ended.is_set():
                return
            file = self.reader.checkpoint.tensors[name].file
            refuse_nan(name, file, tensor)  # checked or not: it is what brings every page in
            self.reader.checked.add(name)
            self.found[name] = tensor

    def _copy(self, staging: Staging, tensors: dict[str, Tensor]) -> None:
        """Check and copy; not before the device has done what it was given until this began, and so freed that room."""
        self.begun.synchronize()
        found = dict[str, Tensor]()
        for name, tensor in tensors.items():
            if self.ended.is_set():
                return
            self.reader.check({name: tensor})
            found[name] = staging.copy(tensor)
        self.done = staging.cuda.mark()
        self.found = found
