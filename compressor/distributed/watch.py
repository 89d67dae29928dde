"""Who is still alive: each rank gives a sign every second, and the fault of one ends all with one sentence.

A rank that is stuck in an exchange with a dead one is told by the broken connection. One that computes is told by the
thread here, which raises the fault in the main thread, and ends the process where that does not help.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

from compressor.distributed.faults import AGAIN, EndedError, LostRankError
from compressor.distributed.present import Ranks

BEAT = 1.0  # seconds between signs of life
PATIENCE = 30.0  # without one a rank counts as dead
GRACE = 10.0  # for the main thread to end by itself
FAILED = "failed"


class Watch(threading.Thread):
    """The signs of life of all ranks, in a store of torch.distributed that this thread alone uses."""

    def __init__(self, ranks: Ranks, store: Any, patience: float = PATIENCE) -> None:
        super().__init__(daemon=True)
        self.ranks, self.store, self.patience = ranks, store, patience
        self.fault: dict[str, Any] | None = None  # what was told first: by which rank, on which machine, the sentence
        self.ended, self.lock = threading.Event(), threading.Lock()
        self.leaving = False  # the main thread is telling its own fault
        self.main = threading.main_thread().ident
        handlers = {signal.SIGUSR1: self._interrupt, signal.SIGTERM: self._stopped} if _in_main() else {}
        self.before = {number: signal.signal(number, handler) for number, handler in handlers.items()}

    def tell(self, sentence: str, mendable: bool = False) -> dict[str, Any]:
        """Tell all of a fault, and whether a user can mend it; returns the one that was told first, maybe another's."""
        if self.fault is not None:
            return self.fault
        own = {"rank": self.ranks.rank, "host": socket.gethostname(), "sentence": sentence, "mendable": mendable}
        try:
            with self.lock:
                told = self.store.compare_set(FAILED, "", json.dumps(own))
            self.fault = dict(json.loads(told))
        except RuntimeError:  # whoever held the store is gone, and what it said with it
            self.fault = self.fault or own
        return self.fault

    def linger(self) -> None:
        """Wait until all others know of the fault, or have had time to: one of them may need this rank's store."""
        deadline = time.monotonic() + 2 * BEAT
        names = [f"knows/{rank}" for rank in range(self.ranks.size) if rank != self.ranks.rank]
        while time.monotonic() < deadline:
            try:
                with self.lock:
                    if self.store.check(names):
                        return
            except RuntimeError:
                return
            time.sleep(BEAT / 10)

    def heard(self) -> str | None:
        """The sentence of another rank's fault that a user can mend, if one comes while the connection breaks."""
        deadline = time.monotonic() + 2 * BEAT
        while self.fault is None and time.monotonic() < deadline:
            time.sleep(BEAT / 10)
        return str(self.fault["sentence"]) if self.fault is not None and self.fault["mendable"] else None

    def stop(self) -> None:
        """Look no more."""
        self.ended.set()
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def run(self) -> None:
        seen = {rank: (b"", time.monotonic()) for rank in range(self.ranks.size) if rank != self.ranks.rank}
        beat = 0
        while not self.ended.wait(BEAT):
            beat += 1
            try:
                with self.lock:
                    self.store.set(f"beat/{self.ranks.rank}", str(beat))
                    told = self.store.check([FAILED]) and self.store.get(FAILED)
                    beats = self.store.multi_get([f"beat/{rank}" for rank in seen])
                    if told:
                        self.store.set(f"knows/{self.ranks.rank}", "1")
            except RuntimeError:
                sentence = f"the first rank, or what started it, is gone; {AGAIN}"
                return self._end({"rank": 0, "host": "", "sentence": sentence, "mendable": False})
            if told:
                return self._end(dict(json.loads(told)))
            now = time.monotonic()
            seen = {r: (b, now if b != seen[r][0] else seen[r][1]) for r, b in zip(seen, beats, strict=True)}
            if silent := [rank for rank, (_, last) in seen.items() if now - last > self.patience]:
                return self._end(self.tell(f"rank {silent[0]} gives no sign of life any more; {AGAIN}"))

    def _end(self, fault: dict[str, Any]) -> None:
        """Raise the fault in the main thread; end the process if that does not end by itself."""
        self.fault = self.fault or fault
        if self.ended.is_set() or (self.fault["rank"] == self.ranks.rank and self.fault is not fault):
            return
        if self.before and self.main is not None:
            signal.pthread_kill(self.main, signal.SIGUSR1)
        if not self.ended.wait(GRACE):
            if self.speaks(self.fault):
                print(f"Error: {self.fault['sentence']}", file=sys.stderr, flush=True)
            os._exit(2)

    def speaks(self, fault: dict[str, Any]) -> bool:
        """Whether this rank prints a fault: the one that told it, and one for each other machine."""
        elsewhere = fault["host"] != socket.gethostname()
        return bool(fault["rank"] == self.ranks.rank or (elsewhere and self.ranks.local == 0))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.leaving or self.fault is None:
            return
        raise (EndedError if self.fault["mendable"] else LostRankError)(self.fault["sentence"])

    def _stopped(self, number: int, frame: FrameType | None) -> None:
        """The launcher ends the others, too, where one was killed."""
        if self.leaving:
            return
        raise LostRankError(f"rank {self.ranks.rank} was stopped, as launchers do when another rank is gone; {AGAIN}")


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()
