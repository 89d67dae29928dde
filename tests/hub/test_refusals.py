"""What the Hub on loopback does not accept, asked by hand, and the small functions behind it."""

import base64
import hashlib
import http.client
import json
import socket
import string
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml  # type: ignore[import-untyped]
from huggingface_hub import HfApi
from huggingface_hub.utils.sha import git_hash
from hypothesis import given
from hypothesis import strategies as st

from tests.hub import Hub, cards, serve
from tests.hub.large import MIME
from tests.hub.objects import blob_id, is_ignored, is_large

REPOSITORY = "org/tiny"
CONTENT = b"\0some weights"
OID = hashlib.sha256(CONTENT).hexdigest()
LFS = {"Accept": MIME, "Content-Type": MIME}
BATCH = f"/{REPOSITORY}.git/info/lfs/objects/batch"
VERIFY = f"/{REPOSITORY}.git/info/lfs/objects/verify"
COMMIT = f"/api/models/{REPOSITORY}/commit/main"
HEADER = {"key": "header", "value": {"summary": "By hand"}}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve() as running:
        running.create(REPOSITORY, {"a.txt": b"0123456789"})
        yield running


def ask(
    hub: Hub, method: str, address: str, body: bytes | object = b"", headers: dict[str, str] | None = None
) -> tuple[int, bytes, http.client.HTTPMessage]:
    """One request on a connection of its own: status, body and headers of the answer."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(hub.url.removeprefix("http://"), timeout=10)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, f"{parts.path}{'?' if parts.query else ''}{parts.query}", data, headers or {})
    reply = connection.getresponse()
    answer = reply.status, reply.read(), reply.headers
    connection.close()
    return answer


def granted(hub: Hub, content: bytes = CONTENT) -> dict[str, Any]:
    """The upload that a batch grants for a content."""
    objects = [{"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}]
    asked = {"operation": "upload", "transfers": ["basic", "multipart"], "objects": objects}
    status, body, _ = ask(hub, "POST", BATCH, asked, LFS)
    assert status == 200, body
    upload: dict[str, Any] = json.loads(body)["objects"][0]["actions"]["upload"]
    return upload


def test_an_object_must_be_what_it_is_called(hub: Hub) -> None:
    address = granted(hub)["href"]
    assert ask(hub, "PUT", address, b"\0SOME WEIGHTS")[0] == 400
    assert ask(hub, "PUT", address, CONTENT + b"!")[0] == 422
    assert ask(hub, "PUT", address.partition("?")[0], CONTENT)[0] == 403
    assert ask(hub, "PUT", address.replace(OID, "0" * 64), CONTENT)[0] == 403
    assert ask(hub, "PUT", address, CONTENT, {"Authorization": "Bearer hf_any"})[0] == 400
    assert ask(hub, "POST", VERIFY, {"oid": OID, "size": len(CONTENT)})[0] == 404
    assert hub.uploaded == []
    assert ask(hub, "PUT", address, CONTENT)[0] == 200
    assert ask(hub, "POST", VERIFY, {"oid": OID, "size": len(CONTENT) + 1})[0] == 422
    assert ask(hub, "POST", VERIFY, {"oid": OID, "size": len(CONTENT)})[0] == 200
    assert hub.uploaded == [(OID, len(CONTENT))]


def test_an_upload_that_breaks_off_stores_nothing(hub: Hub) -> None:
    address = urlsplit(granted(hub)["href"])
    with socket.create_connection(("127.0.0.1", urlsplit(hub.url).port or 0), timeout=10) as client:
        head = f"PUT {address.path}?{address.query} HTTP/1.1\r\nHost: hub\r\nContent-Length: {len(CONTENT)}\r\n\r\n"
        client.sendall(head.encode() + CONTENT[:5])
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b"", "half a body is not answered"
    assert (hub.requests[-1].size, hub.requests[-1].status, hub.uploaded) == (5, None, [])


def test_parts_are_put_together_only_if_all_are_there() -> None:
    with serve(part_size=5) as hub:
        hub.create(REPOSITORY)
        upload = granted(hub)
        parts = {int(key): address for key, address in upload["header"].items() if key.isdigit()}
        assert (len(parts), upload["header"]["chunk_size"]) == (3, "5")
        assert ask(hub, "PUT", parts[3], CONTENT[10:] + b"!")[0] == 422
        tags = [
            {"partNumber": number, "etag": ask(hub, "PUT", parts[number], CONTENT[start : start + 5])[2]["ETag"]}
            for number, start in ((1, 0), (2, 5))
        ]
        assert ask(hub, "POST", upload["href"], {"oid": OID, "parts": tags})[0] == 422
        ask(hub, "PUT", parts[3], b"xyz")
        tags.append({"partNumber": 3, "etag": f'"{hashlib.md5(b"xyz").hexdigest()}"'})
        assert ask(hub, "POST", upload["href"], {"oid": OID, "parts": tags})[0] == 400, "the sum is wrong"
        right = ask(hub, "PUT", parts[3], CONTENT[10:])[2]["ETag"]
        assert ask(hub, "POST", upload["href"], {"oid": OID, "parts": tags})[0] == 400, "a tag is stale"
        tags[2]["etag"] = right
        assert ask(hub, "POST", upload["href"], {"oid": OID, "parts": tags[::-1]})[0] == 400
        assert ask(hub, "POST", upload["href"], {"oid": OID, "parts": tags})[0] == 200
        assert hub.uploaded == [(OID, len(CONTENT))]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"operation": "download"}, 422),
        ({"hash_algo": "md5"}, 422),
        ({"objects": [{"oid": "short", "size": 1}]}, 422),
        ({"objects": [{"oid": OID, "size": 0}]}, 422),
        ({"objects": ["no object"]}, 400),
        ({"objects": "none"}, 400),
        ({"other": 1}, 400),
    ],
)
def test_a_batch_is_checked(hub: Hub, change: dict[str, object], status: int) -> None:
    asked = {"operation": "upload", "objects": [{"oid": OID, "size": 1}]}
    assert ask(hub, "POST", BATCH, asked | change, LFS)[0] == status
    assert ask(hub, "POST", BATCH, asked)[0] == 406


def file(path: str, data: bytes = b"text", **change: object) -> dict[str, object]:
    value = {"path": path, "content": base64.b64encode(data).decode(), "encoding": "base64"}
    return {"key": "file", "value": value | change}


def pointer(**change: object) -> dict[str, object]:
    return {"key": "lfsFile", "value": {"path": "m.bin", "algo": "sha256", "oid": OID, "size": len(CONTENT)} | change}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "starts with its one header"),
        ([file("b.txt")], "starts with its one header"),
        ([HEADER, HEADER], "starts with its one header"),
        ([{"key": "header", "value": {"summary": " "}}], "must not be empty"),
        ([{"key": "header", "value": {"summary": "a", "author": "b"}}], '"author" is not allowed'),
        ([HEADER, {"key": "rename", "value": {"path": "a.txt"}}], 'Unknown operation "rename"'),
        ([HEADER, {**file("b.txt"), "more": 1}], "object of a key and a value"),
        ([HEADER, file("b.txt", mode="755")], '"mode" is not allowed'),
        ([HEADER, file("b.txt", content="not base64!")], "is not base64"),
        ([HEADER, file("b.txt", encoding="hex")], "must be base64 or utf-8"),
        ([HEADER, file("../b.txt")], "not a valid path"),
        ([HEADER, file("a.txt/b.txt")], "is a file and a folder"),
        ([HEADER, file("b.txt", b"\0")], "contains binary files"),
        ([HEADER, file("b.bin")], "contains binary files"),
        ([HEADER, pointer()], "a file that does not exist"),
        ([HEADER, pointer(algo="md5")], "must be sha256"),
        ([HEADER, {"key": "deletedFile", "value": {"path": "a.txt", "force": True}}], '"force" is not allowed'),
    ],
)
def test_a_commit_is_checked_and_changes_nothing_when_refused(
    hub: Hub, lines: list[dict[str, object]], message: str
) -> None:
    repository = hub.repositories[REPOSITORY]
    before = dict(repository.branches), len(repository.history), repository.size
    body = b"\n".join(json.dumps(line).encode() for line in lines)
    status, answer, headers = ask(hub, "POST", COMMIT, body, {"Content-Type": "application/x-ndjson"})
    assert status == 400
    assert message in json.loads(answer)["error"]
    assert headers["X-Error-Message"]
    assert (repository.branches, len(repository.history), repository.size) == before


def test_a_commit_names_the_size_of_an_object(hub: Hub) -> None:
    ask(hub, "PUT", granted(hub)["href"], CONTENT)
    ndjson = {"Content-Type": "application/x-ndjson"}
    for line, status in ((pointer(size=1), 400), (pointer(), 200)):
        body = b"\n".join(json.dumps(item).encode() for item in (HEADER, line))
        assert ask(hub, "POST", COMMIT, body, ndjson)[0] == status
        assert ask(hub, "POST", COMMIT, body)[0] == 415
    assert hub.repositories[REPOSITORY].files()["m.bin"] == CONTENT


def test_preupload_is_checked(hub: Hub) -> None:
    address = f"/api/models/{REPOSITORY}/preupload/main"
    sample = base64.b64encode(b"0123456789").decode()
    for path, size, given_sample, status in (
        ("a.txt", 10, sample, 200),
        ("a.txt", 11, sample, 400),
        ("a.txt", 10, "?", 400),
        (".git/config", 10, sample, 400),
    ):
        asked = {"files": [{"path": path, "size": size, "sample": given_sample}]}
        assert ask(hub, "POST", address, asked)[0] == status
    (row,) = json.loads(ask(hub, "POST", address, {"files": [{"path": "a.txt", "size": 10, "sample": sample}]})[1])[
        "files"
    ]
    assert (row["uploadMode"], row["oid"]) == ("regular", git_hash(b"0123456789"))
    assert ask(hub, "GET", f"/api/models/{REPOSITORY}/xet-write-token/main")[0] == 404


def test_every_range_of_a_file(hub: Hub) -> None:
    address, content = f"/{REPOSITORY}/resolve/main/a.txt", b"0123456789"
    ranges = {f"{first}-{last}": content[first : last + 1] for first in range(10) for last in range(first, 12)}
    ranges |= {f"{first}-": content[first:] for first in range(10)} | {"-3": content[-3:], "-30": content}
    for asked, expected in ranges.items():
        status, body, headers = ask(hub, "GET", address, headers={"Range": f"bytes={asked}"})
        first = content.index(expected)
        assert (status, body) == (206, expected)
        assert headers["Content-Range"] == f"bytes {first}-{first + len(expected) - 1}/10"
    assert [ask(hub, "GET", address, headers={"Range": f"bytes={asked}"})[0] for asked in ("10-", "-", "a-b")] == [
        416
    ] * 3
    status, body, headers = ask(hub, "HEAD", address)
    assert (status, body, headers["Content-Length"], headers["ETag"]) == (200, b"", "10", f'"{git_hash(content)}"')


def test_a_stopped_hub_answers_on_no_connection() -> None:
    with serve() as hub:
        connection = http.client.HTTPConnection(hub.url.removeprefix("http://"), timeout=10)
        connection.request("GET", "/api/nothing")
        assert connection.getresponse().read()
        kept = connection.sock
    assert kept.recv(1) == b"", "a client would ask a later server's port on this connection"
    connection.close()


@given(st.binary(max_size=600))
def test_a_file_has_the_id_that_git_gives_it(content: bytes) -> None:
    assert blob_id(content) == git_hash(content)


@given(st.text(min_size=1).filter(lambda text: "\0" not in text), st.integers(1, 40))
def test_text_cut_in_a_character_stays_text(text: str, size: int) -> None:
    content = text.encode()
    assert not is_large("a.txt", len(content), content[:size])
    assert is_large("a.txt", len(content), b"\xff" + content[:size])


@pytest.mark.parametrize(
    ("rules", "ignored"),
    [
        ("# comment\n\n*.log\n", {"a.log", "b/c.log"}),
        ("/a.log", {"a.log"}),
        ("b/", {"b/c.log", "b/d.txt"}),
        ("b/*.txt\n", {"b/d.txt"}),
        ("*.log\n!a.log", {"b/c.log"}),
        ("d.txt/\n#b", set()),
    ],
)
def test_ignore_rules(tmp_path: Path, rules: str, ignored: set[str]) -> None:
    paths = ["a.log", "b/c.log", "b/d.txt"]
    assert {path for path in paths if is_ignored(path, rules)} == ignored
    (tmp_path / ".gitignore").write_text(rules)
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True, capture_output=True)
    found = subprocess.run([*git, "check-ignore", "--no-index", *paths], capture_output=True, text=True)
    assert set(found.stdout.split()) == ignored


NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=8)


@given(st.dictionaries(NAMES, st.text(max_size=20) | st.lists(NAMES) | st.integers(), min_size=1), st.text(max_size=40))
def test_the_metadata_of_a_card_is_its_front_matter(said: dict[str, object], rest: str) -> None:
    card = f"---\n{yaml.safe_dump(said, allow_unicode=False)}---\n{rest}"
    assert cards.metadata(card) == said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("license: [unclosed", "YAML Metadata Error"),
        ("- a\n- b", "metadata must be an object"),
        ("license: secret-9", '"license" must be one of'),
        ("tags: {a: b}", '"tags" must be a string or an array of strings'),
        ("library_name: 3", '"library_name" must be a string'),
        ("base_model_relation: cousin", '"base_model_relation" must be one of'),
        ("model-index: none", '"model-index" must be an array'),
    ],
)
def test_the_client_refuses_a_card_that_the_hub_refuses(hub: Hub, text: str, message: str) -> None:
    api = HfApi(endpoint=hub.url, token="hf_any")
    with pytest.raises(ValueError, match=message):
        api.upload_file(path_or_fileobj=f"---\n{text}\n---\n".encode(), path_in_repo="README.md", repo_id=REPOSITORY)
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        api.upload_file(path_or_fileobj=b"# No metadata\n", path_in_repo="README.md", repo_id=REPOSITORY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        card = b"---\nlicense: mit\nbase_model:\n- org/other\n---\n"
        api.upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id=REPOSITORY)
