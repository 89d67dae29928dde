"""The fuzzer reads every kind of file, tells what was accepted from what was refused, and shows what fails."""

import sys

import pytest

from compressor.errors import CompressionError
from scripts import fuzz
from tests import test_mutated


def test_it_reads_as_many_files_of_each_kind_as_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", "--cases", "35"])
    assert fuzz.main() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    kinds = [test.__name__.removeprefix("test_") for test in test_mutated.SOUND]
    assert [(kind, cases) for kind, cases, *_ in rows] == [(kind, str(-(-35 // len(kinds)))) for kind in kinds]
    assert all(int(accepted) + int(refused) == int(cases) for _, cases, accepted, refused, *_ in rows)


def test_what_is_no_sentence_is_shown_once_with_the_file_that_did_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reads(raw: bytes) -> None:
        with test_mutated.only_sentences():
            if raw != b"sound":
                raise KeyError(raw) if raw.startswith(b"odd") else CompressionError("mend it")

    tally = fuzz.Tally()
    for raw in (b"sound", b"odd", b"odd again", b"bad"):
        fuzz.read(raw, reads, tally)
    assert (tally.cases, tally.accepted, tally.failed) == (4, 1, 2)
    monkeypatch.setattr(fuzz, "fuzz", lambda *_: {"plan": tally})
    monkeypatch.setattr(sys, "argv", ["fuzz"])
    assert fuzz.main() == 1
    said = capsys.readouterr().out
    assert "plan                  4         1        1       2" in said
    assert said.count("Traceback") == 1 and "b'odd'" in said and "odd again" not in said
