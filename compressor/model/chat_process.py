"""The process that renders a chat template, which is a stranger's program: with limits on its time and memory.

`compressor/model/chat.py` starts it. The first line of standard input is the template with the special tokens that it
may name, and the seconds of a processor that it may take; each line after it is a conversation. Each answer is a line
of JSON with a text or a fault.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

SHARE = 0.01  # of the time that one conversation may take: so much on average, lest many slow ones take for ever
MEMORY = 2**30  # bytes beyond what the process needs without a template
MOST_LETTERS = 2**27  # of a rendered conversation


def main() -> None:
    """Answer line by line until standard input ends; the system ends a process that takes too long."""
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no answer
    _limit_memory()
    given = json.loads(sys.stdin.readline())
    kind = type("Chat", (PreTrainedTokenizerBase,), {"special_tokens_map": given["special_tokens"]})
    tokenizer, most = kind(chat_template=given["template"]), given["seconds"]
    left = most
    for line in sys.stdin:
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, left)
        answer = _answer(tokenizer, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        left = min(most, max(left - (time.process_time() - start), 0) + SHARE * most)
        print(answer, file=answers, flush=True)


def _answer(tokenizer: Any, line: str) -> str:
    """The line of JSON that answers one conversation."""
    try:
        request = json.loads(line)
        text = tokenizer.apply_chat_template(
            request["messages"], tokenize=False, add_generation_prompt=request["add_generation_prompt"]
        )
        if len(text) <= MOST_LETTERS:
            return json.dumps({"text": text})
        fault = f"it makes {len(text):,} letters of them"
    except MemoryError:
        fault = f"it needs more than {MEMORY / 2**30:g} GiB of memory"
    except Exception as error:  # a template raises what it likes
        fault = str(error)[:MOST_LETTERS] or type(error).__name__
    return json.dumps({"fault": fault})


def _limit_memory() -> None:
    """Bound the addresses of this process, where the system has such a limit and says what is in use (Linux)."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm", encoding="ascii") as stream:
            used = int(stream.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


if __name__ == "__main__":
    main()
