"""Moments of a run by the interpreter's audit events: file operations are counted, or something happens at one of them.

Test support. An event is heard just before the operation that it announces, such as `os.rename` or `shutil.rmtree`;
`os.fsync` and `os.pwrite`, which the interpreter doesn't announce, are announced without a path.
"""

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

UNANNOUNCED = ("fsync", "pwrite")
Listener = Callable[[str, tuple[Any, ...]], None]
_listeners = list[Listener]()


@cache
def _listen() -> None:
    """Add the one hook of this process; hooks stay for good."""

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        for listener in tuple(_listeners):
            listener(event, arguments)

    sys.addaudithook(heard)
    for name in UNANNOUNCED:
        setattr(os, name, _announced(name, getattr(os, name)))


def _announced(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        sys.audit(f"os.{name}", "")
        return function(*arguments)

    return call


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    _listen()
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@dataclass(frozen=True)
class Moment:
    """The nth time that an operation is about to be done with a path in which the pattern is found.

    Or just after it: when the next operation of any kind is about to be done.
    """

    event: str = "os.rename"
    pattern: str = ""
    nth: int = 1
    is_after: bool = False


def _path(event: str, arguments: tuple[Any, ...]) -> str:
    """Return the path that an operation makes or changes: of a rename, the new one."""
    path = arguments[1] if event == "os.rename" else arguments[0]
    return os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""


@contextmanager
def happening(moment: Moment, action: Callable[[], object]) -> Iterator[None]:
    """Do something once at a moment, such as raise what Ctrl-C raises."""
    count = 0
    is_next = False

    def listener(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count, is_next
        if is_next:
            is_next = False
            action()
        if event == moment.event and re.search(moment.pattern, _path(event, arguments)):
            count += 1
            if count == moment.nth:
                is_next = moment.is_after
                if not moment.is_after:
                    action()

    with listening(listener):
        yield


@contextmanager
def paths_of(event: str, pattern: str = "") -> Iterator[list[Path]]:
    """Yield a list of the paths that an operation is done with from now on."""
    paths = list[Path]()

    def listener(heard: str, arguments: tuple[Any, ...]) -> None:
        if heard == event and re.search(pattern, _path(event, arguments)):
            paths.append(Path(_path(event, arguments)))

    with listening(listener):
        yield paths


@contextmanager
def at_every(event: str, action: Callable[[], object]) -> Iterator[None]:
    """Do something just before every such operation."""

    def listener(heard: str, arguments: tuple[Any, ...]) -> None:
        if heard == event:
            action()

    with listening(listener):
        yield


def fill_disk() -> None:
    """Fail as the operating system does where no space is left."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def press_ctrl_c() -> None:
    """Interrupt as Ctrl-C does."""
    raise KeyboardInterrupt
