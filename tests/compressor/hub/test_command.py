"""`moe-compress push` through the command line: what it prints, and that no stream ever shows a token."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compressor.evaluation.gate_report import write_gate
from tests import small
from tests.command_line import Run, refused
from tests.hub import Fault, Hub
from tests.pushes import CANARY, CARD, REPOSITORY, content, gate_of, with_card, writes

ECHO = json.dumps({"error": f"no: Authorization: Bearer {CANARY}"}).encode()


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


def test_a_pull_request_and_a_branch(made: Path, hub: Hub, run: Run, tmp_path: Path) -> None:
    folder = with_card(made, tmp_path / "smaller")
    hub.create(REPOSITORY)
    done = run("push", folder, REPOSITORY, "--create-pr")
    assert f"to a pull request against main of {REPOSITORY} in one commit." in done.out
    assert f"Pull request: {hub.url}/{REPOSITORY}/discussions/1\n" in done.out
    report = json.loads(run("push", folder, REPOSITORY, "--revision", "next", "--json").out)
    assert report["branch"] == "next" and report["url"] == f"{hub.url}/{REPOSITORY}/tree/next"
    assert hub.repositories[REPOSITORY].branches["next"] == report["commit"]
    assert report["uploaded_bytes"] == sum(file["nbytes"] for file in report["uploaded"])
    there = hub.repositories[REPOSITORY]
    assert there.files() == {} and content(folder).items() <= there.files("refs/pr/1").items()


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


@pytest.mark.parametrize(
    "place", ["POST /repos/create", "POST /commit/", "PUT /lfs/", "GET /refs", "POST /validate-yaml"]
)
def test_a_server_that_echoes_the_token(made: Path, hub: Hub, run: Run, tmp_path: Path, place: str) -> None:
    method, path = place.split()
    hub.fail(Fault(method, path, 403, 20, body=ECHO, headers={"X-HF-Warning": f"t; {CANARY}", "X-Request-Id": CANARY}))
    result = run("push", with_card(made, tmp_path / "smaller"), REPOSITORY)
    refused(result, "run the same command again, which goes on where it stopped")
    assert CANARY not in result.err + result.out and CANARY[3:20] not in result.err + result.out


def test_in_a_process_of_its_own(made: Path, hub: Hub, run: Run, tmp_path: Path) -> None:
    """The client as it is installed, with its token from the environment; another process goes on after the cut."""
    folder = with_card(made, tmp_path / "smaller")
    environment = {
        **os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": CANARY, "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    hub.fail(Fault("POST", "/commit/", reset=True))
    line = [sys.executable, "-m", "compressor", "push", str(folder), REPOSITORY]
    cut = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert (cut.returncode, cut.stdout, cut.stderr.count("\n")) == (2, "", 1)
    assert cut.stderr.startswith(f"Error: {REPOSITORY}: the connection to the Hub broke")
    assert CANARY not in cut.stderr
    assert hub.requests and {request.headers.get("authorization") for request in hub.requests} <= {
        f"Bearer {CANARY}", None,
    }  # fmt: skip
    arrived = len(hub.uploaded)
    done = run("push", folder, REPOSITORY, "--json")
    assert (done.status, done.err) == (0, "")
    assert json.loads(done.out)["commit"] == hub.repositories[REPOSITORY].branches["main"]
    assert len(hub.uploaded) == arrived > 0
    assert content(folder).items() <= hub.repositories[REPOSITORY].files().items()
