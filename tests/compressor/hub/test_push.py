import json
import logging
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from compressor.errors import CompressionError
from compressor.hub.push import push
from tests.support import small
from tests.support.command_line import Run, refused
from tests.support.hub import Fault, Hub
from tests.support.hub_pushes import (
    CANARY,
    CARD,
    REPOSITORY,
    content,
    everything_said,
    refusal,
    sent,
    shards,
    with_card,
    writes,
)  # fmt: skip


def test_a_push_is_one_commit_and_another_writes_nothing(made: Path, hub: Hub) -> None:
    before = small.tree(made)
    summary = push(made, REPOSITORY)
    there = hub.repositories[REPOSITORY]
    assert {name: data for name, data in there.files().items() if name not in (*CARD, ".gitattributes")} == content(
        made
    )
    assert set(CARD) < set(there.files())
    assert b"base_model" in there.files()["README.md"] or b"moe-compressor" in there.files()["README.md"]
    assert len(there.commits()) == 2  # the Hub's own first one, and ours
    assert there.commits()[0].title == summary.message == "Compressed from base by model-centric, 4 of 8 experts"
    assert summary.commit == there.branches["main"]
    assert summary.uploaded_bytes == sum(map(len, there.files().values())) - len(there.files()[".gitattributes"])
    assert sorted(sent(summary)) == sorted({*content(made), *CARD})
    assert {file.state for file in summary.uploaded} == {"new"}
    assert (summary.branch, summary.pull_request, summary.unchanged, summary.removed) == ("main", None, (), ())
    assert summary.url == f"{hub.url}/{REPOSITORY}"
    assert small.tree(made) == before
    assert not there.private
    written, large = len(writes(hub)), list(hub.uploaded)
    again = push(made, REPOSITORY)
    assert (again.commit, again.uploaded, again.uploaded_bytes, again.changed) == (None, (), 0, False)
    assert sorted(again.unchanged) == sorted({*content(made), *CARD})
    assert (len(writes(hub)), hub.uploaded, len(there.commits())) == (written, large, 2)


def test_a_push_cut_off_leaves_the_branch_alone_and_goes_on(made: Path, hub: Hub) -> None:
    """A shard of several is reset half-way, as often as the client tries: the rest arrive, the commit does not."""
    victim = shards(made)[1]
    digest = sha256(victim.read_bytes()).hexdigest()
    hub.fail(Fault("PUT", digest, reset=True, after_bytes=victim.stat().st_size // 2, times=6))
    with pytest.raises(CompressionError, match=r"connection to the Hub broke.*run the same command again"):
        push(made, REPOSITORY)
    assert set(hub.repositories[REPOSITORY].files()) == {".gitattributes"}
    arrived = {oid for oid, _ in hub.uploaded}
    assert arrived and digest not in arrived
    hub.uploaded.clear()
    summary = push(made, REPOSITORY)
    again = {oid for oid, _ in hub.uploaded}
    assert digest in again and not again & arrived
    assert hub.repositories[REPOSITORY].branches["main"] == summary.commit
    assert len(hub.repositories[REPOSITORY].commits()) == 2
    assert hub.repositories[REPOSITORY].files()[victim.name] == victim.read_bytes()


def test_a_branch_is_made_from_the_default_one(carded: Path, hub: Hub) -> None:
    hub.create(REPOSITORY, {"notes.txt": b"mine"})
    main = hub.repositories[REPOSITORY].branches["main"]
    summary = push(carded, REPOSITORY, revision="next/try 1")
    there = hub.repositories[REPOSITORY]
    assert there.branches["main"] == main
    assert there.branches["next/try 1"] == summary.commit
    assert there.files("next/try 1")["notes.txt"] == b"mine"
    assert content(carded).items() <= there.files("next/try 1").items()
    before = len(writes(hub))
    assert not push(carded, REPOSITORY, revision="next/try 1").changed
    assert len(writes(hub)) == before
    assert push(carded, REPOSITORY).changed  # the default branch does not have it


def test_a_pull_request_against_a_branch(carded: Path, hub: Hub) -> None:
    hub.create(REPOSITORY, {"notes.txt": b"mine"})
    there = hub.repositories[REPOSITORY]
    main = there.branches["main"]
    summary = push(carded, REPOSITORY, create_pr=True, revision="next")
    assert there.branches == {"main": main, "next": main}
    assert summary.pull_request and summary.branch == "next"
    sent = [request for request in hub.requests if request.path.endswith("/commit/next")]
    assert [request.query for request in sent] == ["create_pr=1"]


def test_a_tag_marks_the_commit_and_is_never_moved(folder: Path, hub: Hub) -> None:
    summary = push(folder, REPOSITORY, tag="v1")
    there = hub.repositories[REPOSITORY]
    assert there.tags == {"v1": summary.commit}
    assert push(folder, REPOSITORY, tag="v1").commit is None  # it is there already
    push(folder, REPOSITORY, tag="v1-final")  # nothing to send, and still a tag
    assert there.tags == {"v1": summary.commit, "v1-final": summary.commit}
    small.edit_json(folder / "generation_config.json", lambda config: config.update(temperature=0.5))
    refusal(folder, hub, "generation_config.json is not what was written, so nothing was pushed; restore it, or remove")
    (folder / "SHA256SUMS").unlink()
    refusal(folder, hub, "has a tag 'v1' already, on the commit .*nothing was pushed", tag="v1")
    push(folder, REPOSITORY)
    refusal(folder, hub, "has a tag 'v1' already", tag="v1")  # nothing has changed, but it is on another commit


def test_private_is_never_published(carded: Path, hub: Hub) -> None:
    push(carded, REPOSITORY, private=True)
    assert hub.repositories[REPOSITORY].private
    push(carded, REPOSITORY)  # stays as it is
    assert hub.repositories[REPOSITORY].private
    hub.repositories[REPOSITORY].private = False
    refusal(carded, hub, "is public, so nothing was pushed; make it private", private=True)


@pytest.mark.parametrize(
    ("repository", "options", "message"),
    [
        ("smaller", {}, "name it NAMESPACE/NAME"),
        ("a/b/c", {}, "name it NAMESPACE/NAME"),
        ("org/-x..y", {}, "name it NAMESPACE/NAME"),
        (REPOSITORY, {"create_pr": True, "tag": "v1"}, "tag it once it is merged"),
        (REPOSITORY, {"revision": "refs/pr/1"}, "give the name of a branch"),
        (REPOSITORY, {"message": " "}, "--message is empty"),
        (REPOSITORY, {"message": f"with {CANARY}"}, "holds an access token"),
    ],
)
def test_arguments_that_cannot_be_meant(made: Path, hub: Hub, repository: str, options: Any, message: str) -> None:
    with pytest.raises(CompressionError, match=message) as caught:
        push(made, repository, **options)
    assert hub.requests == []
    assert CANARY not in everything_said(caught.value)


def test_a_dry_run_asks_and_sends_nothing(folder: Path, hub: Hub) -> None:
    first = push(folder, REPOSITORY, dry_run=True)
    assert {file.state for file in first.uploaded} == {"new"} and writes(hub) == []
    done = push(folder, REPOSITORY)
    assert first.uploaded == done.uploaded and first.uploaded_bytes == done.uploaded_bytes
    assert (first.commit, first.dry_run) == (None, True)
    small.edit_json(folder / "generation_config.json", lambda config: config.update(temperature=0.5))
    (folder / "vocab.txt").write_text("a")
    (folder / "SHA256SUMS").unlink()
    before = len(writes(hub))
    second = push(folder, REPOSITORY, dry_run=True, tag="v1", revision="b", message="m")
    assert [(f.path, f.state) for f in second.uploaded] == [("generation_config.json", "changed"), ("vocab.txt", "new")]
    assert len(second.unchanged) == len(first.uploaded) - 2 and second.removed == ("SHA256SUMS",)
    assert len(writes(hub)) == before
    assert set(hub.repositories[REPOSITORY].branches) == {"main"}


def test_a_dry_run_without_a_hub(made: Path, hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.fail(Fault("GET", "/api/models/", status=500, times=99, body=b'{"error": "token %s"}' % CANARY.encode()))
    with caplog.at_level(logging.WARNING, "compressor"):
        summary = push(made, REPOSITORY, dry_run=True)
    assert {file.state for file in summary.uploaded} == {"unknown"}
    assert "could not be asked" in caplog.text and CANARY not in caplog.text


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


def test_a_refusal_is_one_sentence_and_status_2(made: Path, hub: Hub, run: Run, tmp_path: Path) -> None:
    folder = with_card(made, tmp_path / "smaller")
    small.edit_json(folder / "generation_config.json", lambda config: config.update(note=CANARY))
    result = run("push", folder, REPOSITORY)
    refused(result, "^Error: generation_config.json holds what looks like an access token")
    assert CANARY not in result.err and hub.requests == []
