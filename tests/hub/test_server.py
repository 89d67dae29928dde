"""The Hub on loopback, used through huggingface_hub."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars

from tests.hub import Hub, committing, serve
from tests.hub.committing import changed
from tests.hub.objects import Entry

REPOSITORY = "org/tiny"
LARGE = {"model.safetensors", "nested/deep/odd.data", "nested/image"}


@pytest.fixture(autouse=True)
def quiet() -> None:
    disable_progress_bars()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of every sort of file; its path has a space, a plus and an accent in it."""
    contents = {
        "README.md": "---\nlicense: mit\ntags:\n- moe\n---\n# Tiny \N{LATIN SMALL LETTER E WITH ACUTE}\n".encode(),
        "config.json": b'{"hidden_size": 4}\n',
        "empty.bin": b"",
        "model.safetensors": b"\x08\0\0\0\0\0\0\0{}      " + bytes(range(256)) * 20,
        "nested/deep/odd.data": b"plain text, but large by its name",
        "nested/image": b"\x89PNG\r\n\0binary by its bytes",
        "nested/a b+\N{LATIN SMALL LETTER E WITH ACUTE}.txt": b"a name to quote",
    }
    for path, content in contents.items():
        (tmp_path / "folder" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / path).write_bytes(content)
    return tmp_path / "folder"


def client(hub: Hub, token: str | bool = "hf_any") -> HfApi:
    return HfApi(endpoint=hub.url, token=token)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".cache" not in path.parts
    }


def sent(hub: Hub, method: str, part: str) -> int:
    return sum(request.method == method and part in request.path for request in hub.requests)


def status_of(call: Callable[[], object]) -> int:
    with pytest.raises(HfHubHTTPError) as refused:
        call()
    return int(refused.value.response.status_code)


@pytest.mark.parametrize("part_size", [None, 1000])
def test_a_pushed_folder_comes_back_as_it_was(folder: Path, tmp_path: Path, part_size: int | None) -> None:
    with serve(part_size=part_size) as hub:
        api = client(hub)
        api.create_repo(REPOSITORY)
        made = api.upload_folder(
            repo_id=REPOSITORY, folder_path=folder, commit_message="First", commit_description="Why"
        )
        local = Path(api.snapshot_download(REPOSITORY, local_dir=tmp_path / "back"))
        cached = Path(api.snapshot_download(REPOSITORY, cache_dir=tmp_path / "cache"))
        expected = contents(folder)
        large = {path: len(content) for path, content in expected.items() if path in LARGE}
        whole = sum(part_size is None or size <= part_size for size in large.values())
        parts = sum(-(-size // part_size) for size in large.values() if part_size and size > part_size)
        assert sent(hub, "PUT", "/lfs/") == whole + parts
        assert parts > 1 or part_size is None
        assert sorted(size for _, size in hub.uploaded) == sorted(large.values())
        assert hub.uploaded_bytes == sum(large.values())
        repository = hub.repositories[REPOSITORY]
        for found in (contents(local), contents(cached), repository.files()):
            assert set(found) - set(expected) == {".gitattributes"}
            assert {path: found[path] for path in expected} == expected
        newest, first = repository.commits()
        assert (newest.oid, newest.title, newest.message) == (made.oid, "First", "Why")
        assert newest.parents == (first.oid,)
        assert set(first.files) == {".gitattributes"}


def test_a_folder_pushed_again_sends_only_what_changed(hub: Hub, folder: Path) -> None:
    api = client(hub)
    api.create_repo(REPOSITORY)
    first = api.upload_folder(repo_id=REPOSITORY, folder_path=folder)
    uploads, commits = sent(hub, "PUT", "/lfs/"), sent(hub, "POST", "/commit/")
    assert api.upload_folder(repo_id=REPOSITORY, folder_path=folder).oid == first.oid
    assert (sent(hub, "PUT", "/lfs/"), sent(hub, "POST", "/commit/")) == (uploads, commits)
    (folder / "config.json").write_text("{}")
    (folder / "copy.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    api.upload_folder(repo_id=REPOSITORY, folder_path=folder)
    new, old, _ = hub.repositories[REPOSITORY].commits()
    assert {path for path in new.files if new.files[path] != old.files.get(path)} == {"config.json", "copy.safetensors"}
    assert sent(hub, "PUT", "/lfs/") == uploads, "an object that is stored is not sent again"


def test_the_plain_client_in_a_process_of_its_own(hub: Hub, folder: Path, tmp_path: Path) -> None:
    script = (
        "import sys, huggingface_hub as h\n"
        f"h.create_repo({REPOSITORY!r})\n"
        f"h.upload_folder(repo_id={REPOSITORY!r}, folder_path=sys.argv[1])\n"
        f"h.snapshot_download({REPOSITORY!r}, local_dir=sys.argv[2])\n"
    )
    names = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_any"}
    switches = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(tmp_path / "back")],
        env={**os.environ, **names, **switches},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "back").items() >= contents(folder).items()
    tokens = [(request.method, request.headers.get("authorization")) for request in hub.requests]
    assert {token for method, token in tokens if method != "PUT"} == {"Bearer hf_any"}
    assert [token for method, token in tokens if method == "PUT"] == [None] * len(LARGE), "the addresses are signed"


def test_a_repository_is_created_once(hub: Hub) -> None:
    api = client(hub)
    assert api.create_repo(REPOSITORY, private=True).repo_id == REPOSITORY
    assert status_of(lambda: api.create_repo(REPOSITORY)) == 409
    assert api.create_repo(REPOSITORY, exist_ok=True).url == f"{hub.url}/{REPOSITORY}"
    assert hub.repositories[REPOSITORY].private
    assert len(hub.repositories[REPOSITORY].commits()) == 1
    assert status_of(lambda: api.create_repo("org/tiny", repo_type="space", space_sdk="static")) == 400
    api.create_repo(REPOSITORY, repo_type="dataset")
    api.upload_file(path_or_fileobj=b"{}", path_in_repo="a.json", repo_id=REPOSITORY, repo_type="dataset")
    assert hub.repositories[f"datasets/{REPOSITORY}"].files()["a.json"] == b"{}"


def test_what_the_client_reads_of_a_repository(hub: Hub) -> None:
    card = b"---\nlicense: apache-2.0\ndate: 2026-01-01\n---\n"
    files = {"README.md": card, "a/b/weights.bin": b"\0\1", "a/c.txt": b"text"}
    repository = hub.create(REPOSITORY, files)
    api = client(hub)
    api.create_commit(REPOSITORY, [CommitOperationAdd("a/c.txt", b"new")], commit_message="Second")
    second, first = repository.commits()
    model = api.model_info(REPOSITORY, files_metadata=True)
    assert (model.sha, model.private, model.card_data.license) == (second.oid, False, "apache-2.0")
    assert {item.rfilename: item.size for item in model.siblings} == {
        "README.md": len(card),
        "a/b/weights.bin": 2,
        "a/c.txt": 3,
    }
    rows = {row.path: row for row in api.list_repo_tree(REPOSITORY, recursive=True, expand=True)}
    assert set(rows) == {"README.md", "a", "a/b", "a/b/weights.bin", "a/c.txt"}
    assert rows["a/b/weights.bin"].lfs.sha256 == first.files["a/b/weights.bin"]
    assert rows["a/c.txt"].blob_id == "3e5126c4e761fd09582fc517918a1601b218dff0"  # git hash-object of "new"
    assert {path: row.last_commit.title for path, row in rows.items()} == {
        **dict.fromkeys(("README.md", "a/b", "a/b/weights.bin"), "initial commit"),
        **dict.fromkeys(("a", "a/c.txt"), "Second"),
    }
    assert [row.path for row in api.list_repo_tree(REPOSITORY)] == ["README.md", "a"]
    assert [row.path for row in api.list_repo_tree(REPOSITORY, "a/b")] == ["a/b/weights.bin"]
    assert [row.path for row in api.get_paths_info(REPOSITORY, ["a", "nowhere", "README.md"])] == ["a", "README.md"]
    assert [item.commit_id for item in api.list_repo_commits(REPOSITORY)] == [second.oid, first.oid]
    with pytest.raises(RemoteEntryNotFoundError):
        api.hf_hub_download(REPOSITORY, "nowhere.json")
    with pytest.raises(RevisionNotFoundError):
        api.model_info(REPOSITORY, revision="nowhere")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("org/nowhere")
    with pytest.raises(RemoteEntryNotFoundError):
        list(api.list_repo_tree(REPOSITORY, "nowhere"))


def test_what_gitignore_keeps_out_is_not_committed(hub: Hub, folder: Path) -> None:
    hub.create(REPOSITORY, {".gitignore": b"nested/"})
    client(hub).upload_folder(repo_id=REPOSITORY, folder_path=folder)
    kept = {".gitignore", "README.md", "config.json", "empty.bin", "model.safetensors"}
    assert set(hub.repositories[REPOSITORY].files()) == kept


def test_deletions(hub: Hub) -> None:
    hub.create(REPOSITORY, {"a.txt": b"a", "b/c.txt": b"c", "b/d.txt": b"d", "bb.txt": b"bb"})
    api = client(hub)
    operations = [CommitOperationDelete("b/"), CommitOperationDelete("a.txt")]
    api.create_commit(REPOSITORY, operations, commit_message="Remove")
    assert set(hub.repositories[REPOSITORY].files()) == {"bb.txt"}
    with pytest.raises(RemoteEntryNotFoundError, match="doesn't exist"):
        api.create_commit(REPOSITORY, [CommitOperationDelete("a.txt")], commit_message="Again")


def test_a_commit_on_a_stale_parent_is_412(hub: Hub) -> None:
    first = hub.create(REPOSITORY, {"a.txt": b"a"}).branches["main"]
    api = client(hub)

    def push(content: bytes, parent: str) -> object:
        return api.upload_file(path_or_fileobj=content, path_in_repo="a.txt", repo_id=REPOSITORY, parent_commit=parent)

    push(b"b", first)
    assert status_of(lambda: push(b"c", first)) == 412
    push(b"d", hub.repositories[REPOSITORY].branches["main"])
    assert hub.repositories[REPOSITORY].files() == {"a.txt": b"d"}


def test_a_pull_request_leaves_main_alone(hub: Hub) -> None:
    repository = hub.create(REPOSITORY, {"a.txt": b"a"})
    api, main = client(hub), repository.branches["main"]
    opened = api.upload_file(path_or_fileobj=b"b", path_in_repo="a.txt", repo_id=REPOSITORY, create_pr=True)
    assert (opened.pr_num, opened.pr_revision) == (1, "refs/pr/1")
    api.upload_file(
        path_or_fileobj=b"c", path_in_repo="c.bin", repo_id=REPOSITORY, revision="refs/pr/1", commit_message="Then"
    )
    assert repository.branches == {"main": main}
    assert repository.files("refs/pr/1") == {"a.txt": b"b", "c.bin": b"c"}
    (head,) = api.list_repo_refs(REPOSITORY, include_pull_requests=True).pull_requests
    assert (head.ref, head.target_commit) == ("refs/pr/1", repository.pull_requests[1].commit)
    second = api.create_pull_request(REPOSITORY, "Another", description="Of no change")
    api.create_discussion(REPOSITORY, "A question")
    assert (second.num, second.is_pull_request, second.git_reference) == (2, True, "refs/pr/2")
    assert repository.pull_requests[2].commit == main
    events = api.get_discussion_details(REPOSITORY, 1).events
    assert [event.summary for event in events if event.type == "commit"][1] == "Then"
    assert [item.num for item in api.get_repo_discussions(REPOSITORY)] == [3, 2, 1]
    assert [item.num for item in api.get_repo_discussions(REPOSITORY, discussion_type="pull_request")] == [2, 1]


def test_branches_and_tags(hub: Hub) -> None:
    repository = hub.create(REPOSITORY, {"a.txt": b"a"})
    api, first = client(hub), repository.branches["main"]
    api.create_branch(REPOSITORY, branch="try/one")
    api.create_tag(REPOSITORY, tag="v1", tag_message="The first", revision="main")
    assert status_of(lambda: api.create_branch(REPOSITORY, branch="try/one")) == 409
    assert status_of(lambda: api.create_tag(REPOSITORY, tag="v1")) == 409
    api.create_branch(REPOSITORY, branch="try/one", exist_ok=True)
    api.create_tag(REPOSITORY, tag="v1", exist_ok=True)
    api.upload_file(path_or_fileobj=b"b", path_in_repo="a.txt", repo_id=REPOSITORY, revision="try/one")
    api.create_branch(REPOSITORY, branch="old", revision="v1")
    assert repository.tags == {"v1": first}
    assert {name: repository.files(name)["a.txt"] for name in (*repository.branches, *repository.tags)} == {
        **{"main": b"a", "try/one": b"b", "old": b"a", "v1": b"a"}
    }
    refs = api.list_repo_refs(REPOSITORY)
    assert {item.name: item.target_commit for item in refs.branches} == repository.branches
    assert [item.ref for item in refs.tags] == ["refs/tags/v1"]

    def onto(revision: str) -> Callable[[], object]:
        return lambda: api.upload_file(
            path_or_fileobj=b"c", path_in_repo="a.txt", repo_id=REPOSITORY, revision=revision
        )

    assert status_of(onto("v1")) == 400
    assert status_of(onto("nowhere")) == 404
    api.delete_branch(REPOSITORY, branch="old")
    api.delete_tag(REPOSITORY, tag="v1")
    assert (set(repository.branches), repository.tags) == ({"main", "try/one"}, {})


def test_commits_at_the_same_time_are_all_kept(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> dict[str, Entry]:
        time.sleep(0.005)  # long enough for another commit to start from the same parent, if it could
        return changed(*arguments)

    monkeypatch.setattr(committing, "changed", slow)
    repository = hub.create(REPOSITORY)
    api = client(hub)

    def push(number: int) -> object:
        content = json.dumps(number).encode()
        return api.upload_file(path_or_fileobj=content, path_in_repo=f"{number}.bin", repo_id=REPOSITORY)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(push, range(24)))
    assert len(repository.commits()) == 25
    assert repository.files() == {f"{number}.bin": json.dumps(number).encode() for number in range(24)}
    assert len(hub.uploaded) == 24
