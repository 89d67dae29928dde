"""The fuzzer reads every kind of file, tells what was accepted from what was refused, and shows what fails."""

import sys

import pytest

from scripts import fuzz
from tests.compressor import test_damaged_files


def test_it_reads_as_many_files_of_each_kind_as_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", "--cases", "35"])
    assert fuzz.main() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    kinds = [test.__name__.removeprefix("test_") for test in test_damaged_files.SOUND]
    assert [(kind, cases) for kind, cases, *_ in rows] == [(kind, str(-(-35 // len(kinds)))) for kind in kinds]
    assert all(int(accepted) + int(refused) == int(cases) for _, cases, accepted, refused, *_ in rows)
