import json
import re
from pathlib import Path

import pytest

from compressor.errors import CompressionError
from compressor.hub.push import push
from tests.support.hub import Fault, Hub
from tests.support.hub_pushes import CANARY, REPOSITORY, everything_said, logged_in

ECHO = json.dumps({"error": f"bad thing, Authorization: Bearer {CANARY}"}).encode()


@pytest.mark.parametrize(
    ("place", "status", "message"),
    [
        ("POST /repos/create", 401, "hf auth login"),
        ("POST /repos/create", 403, "ask its owner for write permission"),
        ("POST /preupload/", 403, "ask its owner for write permission"),
        ("POST /preupload/", 404, "not there or not visible"),
        ("POST /preupload/", 429, "no more requests.*wait some minutes"),
        ("POST /preupload/", 503, "trouble of its own"),
        ("POST /objects/batch", 500, "trouble of its own"),
        ("PUT /lfs/", 400, "the Hub refuses it"),
        ("POST /commit/", 409, "busy with another change"),
        ("POST /commit/", 412, "somebody else has committed"),
        ("POST /commit/", 413, "make the shards smaller"),
        ("POST /commit/", 500, "trouble of its own"),
        ("POST /validate-yaml", 400, "Hub refuses it"),
        ("GET /refs", 418, "Hub refuses it"),
        ("POST /tag/", 409, "busy with another change"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(carded: Path, hub: Hub, place: str, status: int, message: str) -> None:
    method, path = place.split()
    hub.fail(Fault(method, path, status=status, times=20, body=ECHO, headers={"X-Error-Message": f"for {CANARY}"}))
    with pytest.raises(CompressionError, match=message) as caught:
        push(carded, REPOSITORY, tag="v1")
    assert re.search(rf"^{REPOSITORY}: .*run the same command again", str(caught.value))
    assert str(status) in str(caught.value) or "validate" in path
    assert CANARY not in everything_said(caught.value) and CANARY[:20] not in everything_said(caught.value)
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    if "tag" not in place:
        assert set(hub.repositories[REPOSITORY].files() if REPOSITORY in hub.repositories else ()) <= {".gitattributes"}
    hub.faults.clear()
    push(carded, REPOSITORY, tag="v1")
    assert hub.repositories[REPOSITORY].tags["v1"] == hub.repositories[REPOSITORY].branches["main"]


def test_a_wrong_login_and_one_that_may_only_read(carded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with logged_in() as hub:
        hub.tokens = {CANARY: "read"}
        refused_with = []
        for token in (CANARY, "hf_" + "wrong" * 7, None):
            monkeypatch.delenv("HF_TOKEN") if token is None else monkeypatch.setenv("HF_TOKEN", token)
            with pytest.raises(CompressionError) as caught:
                push(carded, REPOSITORY)
            refused_with.append(str(caught.value))
        assert "you may not write there (403" in refused_with[0]
        assert all("hf auth login" in said and "401" in said for said in refused_with[1:])
        assert push(carded, REPOSITORY, dry_run=True).uploaded  # which needs no login
        assert hub.repositories == {}


def test_no_room_left(carded: Path) -> None:
    with logged_in(quota=100_000) as hub:
        with pytest.raises(CompressionError, match=r"no room left on the Hub.*free some storage"):
            push(carded, REPOSITORY)
        hub.quota = None
        push(carded, REPOSITORY)


def test_a_commit_of_somebody_else_in_between_is_not_overwritten(carded: Path, hub: Hub) -> None:
    there = hub.create(REPOSITORY, {"config.json": b"{}"})

    def commit_theirs(path: str) -> None:
        if "/preupload/" in path:
            other = there.commit("theirs", "", (there.branches["main"],), there.commit_at("main").entries)
            there.branches["main"] = other.oid

    hub.meanwhile = commit_theirs
    with pytest.raises(CompressionError, match=r"somebody else has committed to it meanwhile \(412"):
        push(carded, REPOSITORY)
    assert there.commits()[0].title == "theirs"


def test_what_an_ignore_file_there_keeps_out_is_noticed(made: Path, hub: Hub) -> None:
    hub.create(REPOSITORY, {".gitignore": b"tokenizer.json"})
    with pytest.raises(CompressionError, match=r"^tokenizer.json of the commit .*\.gitignore"):
        push(made, REPOSITORY)
