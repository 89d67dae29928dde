"""The date that chat templates are given: one for a plan, a baseline, a run, and what is kept of
their answers."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

from compressor.errors import CompressionError, wrap_faults

FUNCTION = "strftime_now"  # by which a template asks for the date
# of strftime
DIRECTIVES = (
    "-d",
    "-m",
    "-H",
    "-I",
    "-M",
    "-S",
    "-j",
    "-y",
    *"aAbBcCdDeFfgGhHIjmMnprRStTuUVwWxXyYzZ",
)
EPOCH = "SOURCE_DATE_EPOCH"  # environment variable whose seconds take the place of the clock's


@dataclass
class PromptDate:
    """A date, and whether a template has asked for it."""

    day: date
    is_used: bool = False

    def __str__(self) -> str:
        return self.day.isoformat()


_current = ContextVar[PromptDate | None]("current", default=None)


def today() -> str:
    """Return the day of the clock, or of $SOURCE_DATE_EPOCH, in ISO form."""
    seconds = os.environ.get(EPOCH)
    if not seconds:
        return date.today().isoformat()
    with wrap_faults(
        f"{EPOCH} is {seconds}", "unset it", "give it seconds since 1970, or unset it"
    ):
        return datetime.fromtimestamp(int(seconds), UTC).date().isoformat()


def prompt_date() -> str:
    """Return the date that a template gets here, in ISO form."""
    return str(_current.get() or today())


@contextmanager
def dated(day: Any = None) -> Iterator[PromptDate]:
    """Fix the date until the block ends: the given one, or that of the surrounding block, or
    today's."""
    try:
        current = PromptDate(date.fromisoformat(day or prompt_date()))
    except (TypeError, ValueError) as error:
        raise CompressionError(
            f"{day!r} is no date; restore the file that names it, or make it anew"
        ) from error
    token = _current.set(current)
    try:
        yield current
    finally:
        _current.reset(token)


def dated_template(templates: Mapping[str, str], name: str = "default") -> dict[str, str]:
    """Return the argument of `apply_chat_template` that makes a template write the date; none for
    one without it.

    Templates are given data alone and no functions, so a macro of that name stands before it. Its
    time is midnight."""
    template = templates.get(name, "")
    if FUNCTION not in template:
        return {}
    current = _current.get()
    if current is not None:
        current.is_used = True
    midnight = datetime.fromisoformat(prompt_date())
    written = "part"
    for directive in DIRECTIVES:
        written += (
            f".replace({json.dumps(f'%{directive}')}, "
            f"{json.dumps(midnight.strftime(f'%{directive}'))})"
        )
    parts = (
        "{%- for part in format.split('%%') %}{{ '%' if not loop.first }}{{ "
        + written
        + " }}{% endfor -%}"
    )
    macro = "{%- macro " + FUNCTION + "(format) -%}" + parts + "{%- endmacro %}"
    # an output, so that no newline after it is trimmed
    return {"chat_template": macro + "{{ '' }}" + template}


def date_facts(templates: Mapping[str, str], name: str = "default") -> dict[str, str]:
    """Return the date as a fact of answers in a chat template that writes it; nothing for
    others."""
    return {"date": prompt_date()} if FUNCTION in templates.get(name, "") else {}
