"""Downloading from a Hub on loopback: which files, in which order, and what happens when something goes wrong."""

import json
import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compressor.checkpoint import source as downloading
from compressor.checkpoint.reader import INDEX_NAME, read_header
from compressor.checkpoint.source import fetch_headers, locate
from compressor.errors import CompressionError
from compressor.steps.job import carried_files
from tests.support import small
from tests.support.command_line import Run
from tests.support.hub import Fault, Hub, point, serve
from tests.support.hub.state import contents

MODEL = "org/tiny-moe"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SMALL = ("config.json", "model.safetensors.index.json", "README.md", "generation_config.json", "tokenizer.json")
TRAVELLERS = (
    *("LICENSE", "NOTICE.txt", "additional_chat_templates/tool.jinja", "chat_template.jinja", "merges.txt"),
    *("preprocessor_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json"),
)
DECOYS = (
    *("consolidated.safetensors", "model.fp16.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("image.png", "optimizer.pt", "modeling_own.py", ".gitattributes", "USE_POLICY.md", "model.onnx"),
    *("original/params.json", "onnx/model.onnx", "onnx/config.json", "checkpoint-5/model.safetensors"),
)


class Listener:
    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []
        self.advanced: list[str] = []

    def start(self, phase: str, total: int) -> None:
        self.started.append((phase, total))

    def advance(self, detail: str) -> None:
        self.advanced.append(detail)


def put(folder: Path, *names: str, size: int = 40) -> Path:
    """Files of some bytes each, never the same twice in one folder."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(name).randbytes(size))
    return folder


def put_index(folder: Path, *shards: str) -> Path:
    places = {f"layer.{number}": shard for number, shard in enumerate(reversed(shards))}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    return folder


def repository(folder: Path) -> Path:
    """A sharded model: two shards of 5000 bytes, and small files."""
    return put_index(put(put(folder, *SMALL), *SHARDS, size=5000), *SHARDS)


def main(hub: Hub) -> str:
    return hub.repositories[MODEL].branches["main"]


def asked_for(hub: Hub) -> list[str]:
    return [request.path for request in hub.requests]


Serve = Callable[[Path], AbstractContextManager[Hub]]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serve a folder as the model, to this process; once the block ends, nobody answers there."""
    from huggingface_hub import close_session

    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between tries

    @contextmanager
    def serving(folder: Path) -> Iterator[Hub]:
        with serve() as hub:
            hub.serve(MODEL, folder)
            point(monkeypatch, hub.url, tmp_path / "cache")
            yield hub
        close_session()  # which keeps connections

    return serving


def test_only_what_is_needed_is_fetched_small_files_first(tmp_path: Path, served: Serve, capfd: Any) -> None:
    folder = put(repository(tmp_path / "model"), *TRAVELLERS, *DECOYS)
    heard = Listener()
    with served(folder) as hub:
        source = locate(MODEL, progress=heard)
        fetched = hub.fetched()
    assert fetched[:2] == ["config.json", INDEX_NAME]
    assert sorted(fetched[2:-2]) == sorted((*SMALL[2:], *TRAVELLERS))
    assert fetched[-2:] == list(SHARDS)
    assert heard.started == [("download (MB)", 2)]
    assert heard.advanced == list(SHARDS)
    assert (source.name, source.revision) == (MODEL, main(hub))
    expected = contents(folder)
    assert contents(source.folder) == {name: expected[name] for name in (*SMALL, *TRAVELLERS, *SHARDS)}
    carried = set(carried_files(folder)) - {"image.png"}
    assert set(carried_files(source.folder)) == carried, "an output would be given other files than from a folder"
    assert capfd.readouterr() == ("", ""), "the Hub client drew bars of its own"


def test_the_progress_counts_bytes(tmp_path: Path, served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(downloading, "STEP_BYTES", 1200)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    heard = Listener()
    with served(repository(tmp_path / "model")) as hub:
        hub.fail(Fault("GET", SHARDS[0], half=True, reset=True))  # what comes twice counts once
        locate(MODEL, progress=heard)
    assert heard.started == [("download (MB)", 2 * math.ceil(5000 / 1200))]
    assert heard.advanced == [shard for shard in SHARDS for _ in range(5)]


def test_a_revision_is_that_commit(tmp_path: Path, served: Serve) -> None:
    old, new = (repository(tmp_path / name) for name in ("old", "new"))
    put(old, SHARDS[1], size=4000)
    with served(new) as hub:
        older = hub.repositories[MODEL].add(contents(old))
        hub.repositories[MODEL].branches["v1"] = older
        for revision in ("v1", older):
            source = locate(MODEL, revision)
            assert (source.revision, source.folder.name) == (older, older)
            assert contents(source.folder) == contents(old)
        assert locate(MODEL).revision == main(hub)
        assert not any(path.endswith(f"/resolve/main/{SHARDS[1]}") for path in asked_for(hub))
        with pytest.raises(CompressionError, match="has no revision 'v2' on the Hub; check --revision"):
            locate(MODEL, "v2")


@pytest.mark.parametrize("reset", [False, True])
def test_a_download_cut_in_the_middle_ends_whole(tmp_path: Path, served: Serve, reset: bool, monkeypatch: Any) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    folder = repository(tmp_path / "model")
    with served(folder) as hub:
        for name in (SHARDS[0], "tokenizer.json"):
            hub.fail(Fault("GET", name, half=True, reset=reset))
        source = locate(MODEL)
        assert hub.fetched().count(SHARDS[0]) == 2
        assert hub.faults == []
        sent = sum(request.sent for request in hub.requests if request.path.endswith(SHARDS[0]))
    assert contents(source.folder) == contents(folder)
    assert sent == (7500 if reset else 5000), "what came before a quiet cut is not asked for again"


def test_a_run_after_a_failed_one_goes_on(tmp_path: Path, served: Serve) -> None:
    folder = repository(tmp_path / "model")
    message = f"{SHARDS[1]} of {MODEL} could not be downloaded .*500.*; run the same command again to go on"
    with served(folder) as hub:
        hub.fail(Fault("GET", SHARDS[1], 500, times=99))
        with pytest.raises(CompressionError, match=message):
            locate(MODEL)
        heard = Listener()
        hub.faults.clear()
        hub.requests.clear()
        source = locate(MODEL, progress=heard)
        assert hub.fetched() == [SHARDS[1]]
    assert heard.advanced == [SHARDS[1]]
    assert contents(source.folder) == contents(folder)


def test_a_truncated_shard_in_the_cache_is_fetched_anew(tmp_path: Path, served: Serve) -> None:
    folder = repository(tmp_path / "model")
    with served(folder) as hub:
        damaged = locate(MODEL).folder / SHARDS[0]
        damaged.resolve().write_bytes(damaged.read_bytes()[:1000])
        hub.requests.clear()
        assert contents(locate(MODEL).folder) == contents(folder)
        assert hub.fetched() == [SHARDS[0]]


@pytest.mark.parametrize("odd", ["model-00003-of-00003.safetensors", "../other/model.safetensors"])
def test_a_shard_that_is_not_there_is_told_before_any_is_fetched(tmp_path: Path, served: Serve, odd: str) -> None:
    folder = put_index(repository(tmp_path / "model"), odd, *SHARDS)
    message = f"{MODEL}: model.safetensors.index.json names the shard '{odd}', which is missing on the Hub"
    with served(folder) as hub:
        for ask in (locate, fetch_headers):
            with pytest.raises(CompressionError, match=message):
                ask(MODEL)
        assert not any(name.endswith(".safetensors") for name in hub.fetched())


REFUSED = {
    "pickles": (("config.json", "pytorch_model.bin"), "only as pickle files"),
    "adapter": (("adapter_config.json", "adapter_model.safetensors"), "is an adapter, not a model"),
    "adapter with a config": (("config.json", "adapter_config.json", "adapter_model.safetensors"), "is an adapter"),
    "adapter beside weights": (("config.json", "adapter_config.json", "model.safetensors"), "has an adapter, which"),
    "no config": (("model.safetensors", "README.md"), "on the Hub has no config.json; name the repository"),
    "other names": (("config.json", "consolidated.safetensors"), "has consolidated.safetensors but neither"),
    "no weights": (("config.json", "model.gguf"), "on the Hub has neither model.safetensors nor"),
    "graph alone": (("config.json", "model.onnx"), "on the Hub has neither model.safetensors nor"),
}


@pytest.mark.parametrize(("names", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_refused_unfetched(tmp_path: Path, served: Serve, names: Any, message: str) -> None:
    with served(put(tmp_path / "model", *names)) as hub:
        for ask in (locate, fetch_headers):
            with pytest.raises(CompressionError, match=message):
                ask(MODEL)
        assert {*hub.fetched()} <= {"config.json"}


@pytest.mark.parametrize("why", ["gone", "offline", "in trouble"])
def test_a_cached_commit_will_do_without_the_hub(
    why: str, tmp_path: Path, served: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import constants

    with served(repository(tmp_path / "model")) as hub:
        commit = hub.repositories[MODEL].branches["v1"] = main(hub)
        source = locate(MODEL, "v1")
        locate(MODEL)
        assert caplog.records == []
        if why == "in trouble":
            hub.fail(Fault("GET", "/api/", 500, times=99))
            assert locate(MODEL) == source
    if why != "in trouble":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", why == "offline")
        caplog.clear()
        for revision in (None, "v1", commit):
            assert locate(MODEL, revision) == source
        with pytest.raises(CompressionError, match="'org/tiny-moe' is no folder here, and the Hub could not be asked"):
            locate(MODEL, "a" * 40)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert f"the Hub could not be asked for {MODEL}; its cached commit {commit} is used" in caplog.text
    (source.folder / SHARDS[1]).unlink()
    with pytest.raises(CompressionError, match=f"{SHARDS[1]} is not in the cache, and the Hub could not be asked"):
        locate(MODEL)


def test_a_model_that_the_hub_denies_is_not_taken_from_the_cache(tmp_path: Path, served: Serve) -> None:
    with served(repository(tmp_path / "model")) as hub:
        locate(MODEL)
        hub.repositories[MODEL].history.clear()
        with pytest.raises(CompressionError, match="has no revision"):
            locate(MODEL)


def test_headers_cost_few_bytes(tmp_path: Path, served: Serve) -> None:
    folder = put(tmp_path / "model", "tokenizer.json")
    (folder / "config.json").write_text("{}")
    for number, shard in enumerate(SHARDS):
        save_file({f"layer.{number}": torch.zeros(1024, 1024)}, folder / shard)
    put_index(folder, *reversed(SHARDS))
    with served(folder) as hub:
        found = fetch_headers(MODEL)
        sent = sum(request.sent for request in hub.requests if request.path.endswith(".safetensors"))
        assert "tokenizer.json" not in hub.fetched()
    assert 0 < sent < 250_000 < sum((folder / shard).stat().st_size for shard in SHARDS)
    local = {name: info for shard in SHARDS for name, info in read_header(folder / shard).items()}
    assert {name: (info.file, info.shape, info.nbytes) for name, info in found.tensors.items()} == {
        name: (info.file, info.shape, info.nbytes) for name, info in local.items()
    }
    assert found.folder.name == main(hub)


@pytest.mark.full
def test_the_command_shows_the_download(tmp_path: Path, served: Serve, run: Run) -> None:
    small.save(tmp_path / "model", shard="100KB")
    asked = ("compress", MODEL, "--experts", 4, "--strategy", "model-centric", "-o")
    with served(tmp_path / "model") as hub:
        first, second = (run(*asked, tmp_path / name) for name in ("first", "second"))
    third = run(*asked, tmp_path / "third")
    assert (first.status, second.status, third.status) == (0, 0, 0), (first.err, second.err, third.err)
    assert "download (MB)" in first.err
    assert "download" not in second.err
    assert third.err.count(f"WARNING: the Hub could not be asked for {MODEL}") == 1
    shown = locate(str(tmp_path / "model"))
    assert run(*("compress", shown.folder, *asked[2:]), tmp_path / "local").status == 0
    written = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "third", "local")}
    assert len(set(written.values())) == 1
    source = json.loads((tmp_path / "first" / "compression.json").read_text())["plan"]["source"]
    assert (source["model"], source["revision"]) == (MODEL, main(hub))
