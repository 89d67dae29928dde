"""A tokenizer's chat template, rendered as transformers does it, in a process that cannot hang or flood this one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Self

SECONDS = 10.0  # of a processor's time for a conversation


class TemplateError(Exception):
    """Why a chat template gives no text."""


class ChatTemplate:
    """Renders conversations; its process starts with the first one, and ends with the block that it is used in."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def __bool__(self) -> bool:
        """Whether the tokenizer has one."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def render(self, messages: Sequence[Any], add_generation_prompt: bool = False) -> str:
        """The text that `tokenizer.apply_chat_template(messages, tokenize=False)` gives.

        Raises `TemplateError` where the template fails, or takes more time or memory than `chat_process` allows.
        """
        if self._process is None:
            self._process = _started()
            own = self._tokenizer
            self._ask(template=own.get_chat_template(), special_tokens=own.special_tokens_map, seconds=SECONDS)
        self._ask(messages=messages, add_generation_prompt=add_generation_prompt)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            late = self._process.wait() == -signal.SIGPROF
            ended = f"its process ended with status {self._process.returncode}"
            raise TemplateError(f"it takes more than {SECONDS:g} s of a processor" if late else ended)
        answer = json.loads(line)
        if "fault" in answer:
            raise TemplateError(answer["fault"])
        return str(answer["text"])

    def _ask(self, **content: Any) -> None:
        """Send a line; what JSON has no form for becomes the placeholder that transformers shows templates, too."""
        line = json.dumps(content, default=lambda value: f"<{type(value).__name__}>")
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def _started() -> "subprocess.Popen[str]":
    """The process, which imports what this one would import, and nothing from the working folder (-P)."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "compressor.model.chat_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="ascii",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
