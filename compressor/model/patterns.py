"""Regular expressions of a quantization config, which transformers matches against names: none may take for ever."""

import math
from collections.abc import Iterator
from re import _constants, _parser, error  # type: ignore[attr-defined]
from typing import Any

from compressor.errors import CompressionError

PREFIXES = ("re:", "+:", "-:")  # how entries of quantization_config that are regular expressions begin
SPECIAL = set("*+?{|(")  # without one of these a matcher has no choice
REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
LETTERS = 32  # of a name: where a repeat may end; several share a name, so that not all its letters count
MOST_LETTERS = 10_000  # of a text
MOST_WAYS = 2**22  # for all patterns of a config to match a name: a fraction of a second


def refuse_slow_patterns(quantization: Any) -> None:
    """Raise `CompressionError` naming a text of a quantization config that as a pattern could backtrack for long.

    Which texts are patterns depends on the method, so all of them are taken for one.
    """
    left = MOST_WAYS
    for text in _texts(quantization):
        left -= ways(text) - 1
        if left <= 0:
            raise CompressionError(
                f"config.json: {text!r} in quantization_config could as a pattern take for ever to match; write it "
                "with full module names"
            )


def body_of(text: str) -> str:
    """A pattern without what says that it is one."""
    return text.partition(":")[2] if text.startswith(PREFIXES) else text


def ways(text: str) -> int:
    """About how many ways a matcher may try on a name before it gives up; 1 for what is no pattern."""
    body = body_of(text)
    if len(body) > MOST_LETTERS:
        return MOST_WAYS + 1
    if SPECIAL.isdisjoint(body):
        return 1
    return max(_parsed(body), _parsed(f"(?:{body})"))  # in a group, as transformers puts it, it may be another one


def _parsed(pattern: str) -> int:
    try:
        return _ways(_parser.parse(pattern))
    except (error, RecursionError, OverflowError):
        return 1


def _texts(node: Any) -> Iterator[str]:
    held = [node]
    while held:
        node = held.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict):
            held += [*node, *node.values()]
        elif isinstance(node, list):
            held += node


def _ways(parts: Any) -> int:
    """The product over what follows each other; a repeat of several ways is their power."""
    found = 1
    for kind, argument in parts:
        if kind is _constants.BRANCH:
            found *= _alternatives(argument[1])
            continue
        held = argument if isinstance(argument, tuple) else (argument,)
        inner, most = math.prod(_ways(each) for each in held if isinstance(each, _parser.SubPattern)), 1
        if kind in REPEATS:
            low, most = (min(int(count), LETTERS) for count in held[:2])
            found *= max(low, most - low + 1)
        found = min(found * inner**most, MOST_WAYS + 1)
    return found


def _alternatives(branches: Any) -> int:
    """The sum over alternatives, without those that another first letter rules out."""
    free, by_letter = 0, {"": 0}
    for branch in branches:
        if len(branch) and branch[0][0] is _constants.LITERAL:
            letter = chr(branch[0][1]).casefold()
            by_letter[letter] = by_letter.get(letter, 0) + _ways(branch)
        else:
            free += _ways(branch)
    return free + max(by_letter.values())
