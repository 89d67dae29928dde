"""`moe-compress push` through the command line: what it prints, and that no stream ever shows a token."""

import json
from pathlib import Path

from compressor.quality_gate.report import write_gate
from tests.support import small
from tests.support.command_line import Run, refused
from tests.support.hub import Hub
from tests.support.hub_pushes import CANARY, CARD, REPOSITORY, content, gate_of, with_card, writes


def test_a_push_as_a_table_then_nothing_new_as_json(made: Path, hub: Hub, run: Run) -> None:
    dry = run("push", made, REPOSITORY, "--dry-run")
    assert (dry.status, dry.err) == (0, "")
    assert "nothing is sent" in dry.out and writes(hub) == []
    done = run("push", made, REPOSITORY, "--tag", "v1", "--private", "--message", "First of all")
    assert (done.status, done.err) == (0, "")
    for text in ("model-00001-of-", "README.md", "Commit: First of all", "tagged v1", f"{hub.url}/{REPOSITORY}\n"):
        assert text in done.out
    there = hub.repositories[REPOSITORY]
    assert there.private and there.commits()[0].title == "First of all"
    again = run("push", made, REPOSITORY)
    assert (again.status, again.err) == (0, "") and "Nothing has changed" in again.out
    report = json.loads(run("push", made, REPOSITORY, "--json").out)
    assert (report["changed"], report["commit"], report["uploaded"]) == (False, None, [])
    assert sorted(report["unchanged"]) == sorted({*content(made), *CARD})


def test_refusals_are_one_sentence_and_status_2(made: Path, hub: Hub, run: Run, tmp_path: Path) -> None:
    folder = with_card(made, tmp_path / "smaller")
    refused(run("push", folder, "smaller"), "NAMESPACE/NAME")
    refused(run("push", tmp_path / "gone", REPOSITORY), "is not a folder")
    refused(run("push", folder, REPOSITORY, "--create-pr", "--tag", "v1"), "tag it once it is merged")
    write_gate(gate_of(folder, "fail"), tmp_path / "gate")
    refused(run("push", folder, REPOSITORY, "--require-gate", tmp_path / "gate"), "says fail")
    small.edit_json(folder / "generation_config.json", lambda config: config.update(note=CANARY))
    result = run("push", folder, REPOSITORY)
    refused(result, "^Error: generation_config.json holds what looks like an access token")
    assert CANARY not in result.err and hub.requests == []
