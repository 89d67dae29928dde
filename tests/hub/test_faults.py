"""What a client sees of a Hub on loopback that refuses, limits, fails or hangs up."""

import http.client
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import _http, disable_progress_bars

from tests.hub import Fault, Hub, serve

REPOSITORY = "org/tiny"
CONTENT = bytes(range(256)) * 4096
QUOTA = b'{"error": "Private repository storage limit reached"}'


@pytest.fixture
def hub() -> Iterator[Hub]:
    disable_progress_bars()
    with serve() as running:
        running.create(REPOSITORY)
        yield running


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client would have waited between its attempts."""
    slept: list[float] = []
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=slept.append))
    return slept


def push(hub: Hub, path: str = "model.safetensors", content: bytes = CONTENT, token: str | bool = "hf_any") -> None:
    api = HfApi(endpoint=hub.url, token=token)
    api.upload_file(path_or_fileobj=content, path_in_repo=path, repo_id=REPOSITORY)


def refused(hub: Hub, token: str | bool = "hf_any", path: str = "config.json") -> HfHubHTTPError:
    with pytest.raises(HfHubHTTPError) as error:
        push(hub, path, b"{}", token)
    return error.value


def statuses(hub: Hub, method: str, part: str) -> list[int | None]:
    return [request.status for request in hub.requests if request.method == method and part in request.path]


@pytest.mark.parametrize(
    ("fault", "waited"),
    [
        (Fault("PUT", "/lfs/", 500, times=2), [1, 2]),
        (Fault("PUT", "/lfs/", 503), [1]),
        (Fault("PUT", "/lfs/", 429, headers={"Retry-After": "7"}), [8]),
        (Fault("POST", "/preupload/main$", 504), [1]),
        (Fault("PUT", "/lfs/", reset=True), [1]),
        (Fault("PUT", "/lfs/", reset=True, after_bytes=0), [1]),
        (Fault("PUT", "/lfs/", reset=True, after_bytes=300_000, times=2), [1, 2]),
        (Fault("PUT", "/lfs/", 502, after_bytes=300_000), [1]),
    ],
    ids=lambda value: f"{value.status}-{value.after_bytes}-{value.times}" if isinstance(value, Fault) else "",
)
def test_a_passing_fault_is_tried_again(hub: Hub, waits: list[float], fault: Fault, waited: list[float]) -> None:
    hub.fail(fault)
    push(hub)
    assert waits == waited
    assert hub.repositories[REPOSITORY].files() == {"model.safetensors": CONTENT}
    assert len(hub.uploaded) == 1, "an attempt that failed counts as nothing"
    part = "/lfs/" if fault.method == "PUT" else "/preupload/"
    assert statuses(hub, fault.method, part)[: fault.times + 1] == [fault.status] * fault.times + [200]
    cut = [request.size for request in hub.requests if request.status == fault.status]
    if fault.after_bytes is not None:
        assert cut == [fault.after_bytes] * fault.times


def test_a_lasting_fault_is_given_up(hub: Hub, waits: list[float]) -> None:
    hub.fail(Fault("PUT", "/lfs/org/tiny/[0-9a-f]{64}$", 500, times=100))
    with pytest.raises(RuntimeError, match=r"Error while uploading 'model\.safetensors'") as error:
        push(hub)
    assert isinstance(error.value.__cause__, HfHubHTTPError)
    assert (len(waits), statuses(hub, "PUT", "/lfs/")) == (5, [500] * 6)
    assert hub.uploaded == []
    assert statuses(hub, "POST", "/commit/") == []


def test_a_connection_that_is_always_reset_is_given_up(hub: Hub, waits: list[float]) -> None:
    hub.fail(Fault("PUT", "/lfs/", reset=True, after_bytes=1000, times=6))
    with pytest.raises(RuntimeError, match="Error while uploading") as error:
        push(hub)
    assert isinstance(error.value.__cause__, httpx2.TransportError)
    push(hub)
    assert hub.repositories[REPOSITORY].files() == {"model.safetensors": CONTENT}


def test_a_commit_that_is_reset_is_not_tried_again(hub: Hub, waits: list[float]) -> None:
    hub.fail(Fault("POST", "/commit/main$", reset=True))
    with pytest.raises(httpx2.ReadError, match="Connection reset by peer"):
        push(hub)
    assert waits == []
    assert hub.repositories[REPOSITORY].files() == {}


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (Fault("POST", "/commit/", 401), HfHubHTTPError, "401 Unauthorized"),
        (Fault("POST", "/commit/", 403, body=QUOTA), HfHubHTTPError, "403 Forbidden(.|\n)*storage limit reached"),
        (Fault("POST", "/commit/", 400, body=b'{"error": "not so"}'), BadRequestError, "Bad request(.|\n)*not so"),
        (Fault("POST", "/commit/", 404, headers={"X-Error-Code": "RepoNotFound"}), RepositoryNotFoundError, "404"),
        (Fault("POST", "/commit/", 429), HfHubHTTPError, "429 Too Many Requests"),
        (Fault("POST", "/commit/", 500), HfHubHTTPError, "500 Internal Server Error"),
        (Fault("POST", "/objects/batch", 403, body=QUOTA), HfHubHTTPError, "storage limit reached"),
    ],
)
def test_a_refusal_is_the_error_it_should_be(
    hub: Hub, waits: list[float], fault: Fault, kind: type[Exception], message: str
) -> None:
    hub.fail(fault)
    with pytest.raises(kind, match=message):
        push(hub)
    assert waits == []
    push(hub)
    assert set(hub.repositories[REPOSITORY].files()) == {"model.safetensors"}


def test_faults_are_met_in_their_order_and_only_by_their_requests(hub: Hub) -> None:
    hub.fail(Fault("GET", "^/api/models/org/tiny$", 418))
    hub.fail(Fault("GET", "/api/models/", 503, body=b"busy"))
    connection = http.client.HTTPConnection(hub.url.removeprefix("http://"))

    def ask(method: str, path: str) -> tuple[int, bytes]:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.read()

    assert ask("HEAD", f"/api/models/{REPOSITORY}")[0] == 200
    assert ask("GET", f"/api/models/{REPOSITORY}/refs") == (503, b"busy")
    assert ask("GET", f"/api/models/{REPOSITORY}") == (418, b"")
    assert ask("GET", f"/api/models/{REPOSITORY}")[0] == 200
    connection.close()


def test_an_early_answer_reaches_a_client_that_sends_before_it_reads(hub: Hub) -> None:
    hub.fail(Fault("PUT", "/lfs/", 413, after_bytes=10, body=b"too large"))
    connection = http.client.HTTPConnection(hub.url.removeprefix("http://"), timeout=30)
    connection.request("PUT", "/lfs/x", b"\0" * 30_000_000)
    reply = connection.getresponse()
    assert (reply.status, reply.read(), reply.headers["Connection"]) == (413, b"too large", "close")
    assert [(request.size, request.sent, request.status) for request in hub.requests] == [(10, 9, 413)]
    connection.close()


@pytest.mark.parametrize("wrong", [{}, {"status": 500, "reset": True}, {"status": 500, "times": 0}])
def test_a_fault_is_one_thing(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="A fault"):
        Fault("GET", "/", **wrong)


def test_the_quota_limits_objects_and_commits() -> None:
    disable_progress_bars()
    with serve(quota=1000) as hub:
        repository = hub.create(REPOSITORY, {"config.json": b"{}" * 200})
        push(hub, "a.bin", b"\0" * 500)
        with pytest.raises(HfHubHTTPError, match="storage limit reached") as error:
            push(hub, "b.bin", b"\1" * 101)
        assert error.value.response.status_code == 403
        with pytest.raises(HfHubHTTPError, match="storage limit reached"):
            push(hub, "c.txt", b"c" * 101)
        push(hub, "d.txt", b"d" * 100)
        push(hub, "again.bin", b"\0" * 500)
        assert set(repository.files()) == {"config.json", "a.bin", "d.txt", "again.bin"}
        assert repository.size == 1000


def test_tokens() -> None:
    with serve(tokens={"hf_w": "write", "hf_r": "read"}) as hub:
        hub.create(REPOSITORY, {"config.json": b"{}"})
        hub.create("org/secret", {"config.json": b"{}"}, private=True)
        assert refused(hub, token=False).response.status_code == 401
        assert refused(hub, token="hf_unknown").response.status_code == 401
        forbidden = refused(hub, token="hf_r")
        assert forbidden.response.status_code == 403
        assert "write token" in str(forbidden)
        push(hub, "new.txt", b"new", token="hf_w")
        nobody, reader, writer = (HfApi(endpoint=hub.url, token=token) for token in (False, "hf_r", "hf_w"))
        assert nobody.list_repo_files(REPOSITORY) == ["config.json", "new.txt"]
        with pytest.raises(RepositoryNotFoundError):
            nobody.model_info("org/secret")
        assert reader.model_info("org/secret").private
        assert writer.whoami()["auth"]["accessToken"]["role"] == "write"
        assert reader.whoami()["auth"]["accessToken"]["role"] == "read"
        writer.auth_check(REPOSITORY, write=True)
        reader.auth_check(REPOSITORY)
        with pytest.raises(HfHubHTTPError, match="403"):
            reader.auth_check(REPOSITORY, write=True)
        with pytest.raises(HfHubHTTPError, match="403"):
            reader.create_repo("org/other")
        assert "hf_w" not in repr(hub)
