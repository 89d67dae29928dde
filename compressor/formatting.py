"""Formatting for reports: names shown as they are written, without folders or tokens, short lists,
counts and sizes."""

import difflib
import math
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence

from compressor.errors import CompressionError, without_tokens

MOST_LETTERS = 300  # of a name; what is longer is no name
# how a path begins that is no Hub id
FOLDER = re.compile(r"[/~\\]|\.{1,2}[/\\]|[A-Za-z]:[\\/]|file:")
FILE = re.compile(r"[^/\\]+\.(txt|jsonl?|parquet)(#.*)?")  # how the path of a text file ends
NOT_TEXT = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufdd0-\ufdef\ufffe\uffff]"
)
STEP = r"[^=,:/\\]*[/\\]"  # a folder within a path
# of an argument, up to the last name: a path from somewhere, or one that ends like a text file
PATH = re.compile(
    rf"(?<![^=,:])(?:(?:~[^=,:/\\]*|\.{{1,2}}|[A-Za-z]:|file:)?[/\\](?:{STEP})*"
    rf"|(?:{STEP})+(?=[^=,:/\\]+\.(?:txt|jsonl?|parquet)\b))"
)
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?)b?|b)?", re.I)  # of bytes


def readable(text: object) -> str:
    """Return text without what neither HTML nor XML can hold, or what turns the direction of the
    text after it.

    Lone surrogates, which names of files may hold and UTF-8 cannot, are written as their numbers.
    """
    return NOT_TEXT.sub("\ufffd", str(text).encode("utf-8", "backslashreplace").decode())


def one_line(text: str, most: int | None = MOST_LETTERS) -> str:
    """Return text on one line, of printable characters, without tokens; cut off where it is too
    long for a name."""
    printable = "".join(letter if letter.isprintable() else " " for letter in without_tokens(text))
    line = " ".join(printable.split())
    return line if most is None or len(line) <= most else f"{line[:most]} ..."


def label(name: str) -> str:
    """Return a model, a data set or a file by its name, without the folders of a machine; a Hub id
    stays whole."""
    line = one_line(name)
    parts = [part for part in re.split(r"[/\\]", line) if part]
    return parts[-1] if parts and (FOLDER.match(line) or FILE.fullmatch(parts[-1])) else line


def without_paths(command: str) -> str:
    """Command lines in which paths are names: './data/a.txt' and '/home/me/a.txt' become
    'a.txt'."""
    lines = list[str]()
    for line in command.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line)
        except ValueError:  # a quotation without an end
            words = line.split()
        names = [PATH.sub("", one_line(word, None)) for word in words]
        lines.append(shlex.join(names))
    return "\n".join(lines)


def ranges(numbers: Iterable[int], dash: str = "-", comma: str = ",", none: str = "-") -> str:
    """[0, 1, 2, 5] -> '0-2,5'."""
    return (
        comma.join(
            str(first) if first == last else f"{first}{dash}{last}" for first, last in runs(numbers)
        )
        or none
    )


def listed(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 7] -> '0-2, 7'; 'none' for no number."""
    return ranges(numbers, comma=", ", none="none")


def first_of(items: Sequence[object], most: int = 12) -> str:
    """Return the first items, separated by spaces, and the number of the others; '-' for none."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return " ".join(map(str, items[:most])) + more or "-"


def span(numbers: Iterable[int]) -> str:
    """Return the least and the greatest: '8 to 16', or '16' where all are the same."""
    ordered = sorted(set(numbers))
    return f"{ordered[0]} to {ordered[-1]}" if len(ordered) > 1 else str(ordered[0])


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run: [0, 1, 2, 5] -> [(0, 2), (5, 5)]."""
    spans = list[tuple[int, int]]()
    for number in sorted(numbers):
        start = spans.pop()[0] if spans and spans[-1][1] == number - 1 else number
        spans.append((start, number))
    return spans


def distinct(names: Iterable[str]) -> list[str]:
    """Return each name, numbered where it would come again: ['a', 'b', 'a'] -> ['a', 'b',
    'a-2']."""
    unique = dict[str, None]()
    for plain_name in names:
        name = plain_name
        number = 1
        while name in unique:
            number += 1
            name = f"{plain_name}-{number}"
        unique[name] = None
    return list(unique)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'reep', ['reap'] -> "did you mean 'reap'? "; nothing where no known name is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def known_names(name: str, known: Collection[str]) -> str:
    """'reep', ['reap', 'ream'] -> "did you mean 'reap'? known are reap, ream"."""
    return f"{did_you_mean(name, known)}known are {', '.join(known) or 'none'}"


def counted(count: int, thing: str) -> str:
    """1, 'layer' -> '1 layer'; 2000, 'layer' -> '2,000 layers'."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def joined(words: Sequence[str], last: str = "and") -> str:
    """['a', 'b', 'c'] -> 'a, b and c'."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def short(value: object, digits: int = 3) -> str:
    """Return a figure for a sentence or a cell, with `digits` digits or all before the point; a
    dash for none."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.{digits}g}"


def setting(value: object, is_inner: bool = False) -> str:
    """Return a setting in words: a mapping as 'name value, name value', in brackets within
    another."""
    if isinstance(value, Mapping):
        words = ", ".join(f"{name} {setting(inner, True)}" for name, inner in value.items())
        return f"({words or 'none'})" if is_inner else words or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(setting(inner, True) for inner in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def human_bytes(count: float) -> str:
    """1234567 -> '1.23 MB'."""
    return _scaled(count, (" B", " kB", " MB", " GB", " TB"))


def human_count(count: float) -> str:
    """1234567 -> '1.23M'."""
    return _scaled(count, ("", "k", "M", "B", "T"))


def read_bytes(text: str, option: str) -> int:
    """'16GB' -> 16000000000, '2.5GiB' -> 2684354560; a plain number is bytes."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise CompressionError(
            f"{option} {text!r} is no size; write 16GB, 500MB, 2.5GiB or a number of bytes"
        )
    number, prefix, binary = match.groups(default="")
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))


def _scaled(count: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}{units[-1]}"


def share(part: float, whole: float) -> str:
    """1, 8 -> '12.5%'."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def percent(value: object) -> str:
    """0.125 -> '12.5%', 0.0125 -> '1.25%'; a dash for none."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return f"{100 * value:.2f}%" if value < 0.1 else f"{100 * value:.1f}%"


def common_prefix(one: str, other: str) -> int:
    """Return how many letters two texts begin with alike."""
    length = 0
    while one[length : length + 1] == other[length : length + 1] != "":
        length += 1
    return length
