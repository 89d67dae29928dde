"""A compressed checkpoint to push and a Hub on loopback to push it to; test support."""

import json
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

from compressor import compress
from compressor.answers.models import identity
from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.hub.push import PushSummary, push
from compressor.quality_gate.verdict import GateResult
from exporters.onnx.verify import Verification
from tests.support import gate_results, small
from tests.support.hub import Hub, serve

REPOSITORY = "org/smaller"
CANARY = "hf_" + "CanaryInTheMine" * 2 + "0123"  # a token of the form that the Hub gives out
CARD = ("README.md", "images/experts.png")
SHARD_BYTES = 60_000


def checkpoint(folder: Path) -> Path:
    """A Mixtral with 4 of 8 experts in several shards, with a licence; the source lies beside it as `base`."""
    small.save(folder / "base")
    (folder / "base" / "LICENSE").write_text("You may do what you like.\n")
    compress(str(folder / "base"), folder / "out", experts=4, strategy="model-centric", max_shard_bytes=SHARD_BYTES)
    return folder / "out"


def with_card(folder: Path, to: Path) -> Path:
    """A copy with a card of its own, so that none need be made; times of change are kept."""
    shutil.copytree(folder, to)
    (to / "README.md").write_text("---\ntags: [moe-compressor]\n---\n")
    return to


@contextmanager
def logged_in(tokens: bool = True, **options: Any) -> Iterator[Hub]:
    """A Hub that this process's client asks, with CANARY as the token in use; retries do not wait."""
    granted = {CANARY: "write"} if tokens else None
    with serve(tokens=granted, **options) as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
        patch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None))
        patch.setenv("HF_TOKEN", CANARY)
        huggingface_hub.utils.disable_progress_bars()
        yield hub
        huggingface_hub.utils.enable_progress_bars()


def writes(hub: Hub) -> list[str]:
    """What was asked of the Hub that could change it."""
    return [f"{request.method} {request.path}" for request in hub.requests if request.method not in ("GET", "HEAD")]


def gate_of(folder: Path, verdict: str = "pass") -> GateResult:
    """A gate's result on the checkpoint in a folder as it is now."""
    here = identity(ModelSource(str(folder), None, folder))
    return gate_results.gate(gate_results.task(verdict=verdict), compressed=folder.name, compressed_identity=here)


def everything_said(error: BaseException) -> str:
    """An exception with its traceback and all that it refers to."""
    text, found = "".join(traceback.format_exception(error)), error
    while (found := found.__cause__ or found.__context__) is not None:  # type: ignore[assignment]
        text += repr(found) + str(found)
    return text


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) > 2
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sent(summary: PushSummary) -> list[str]:
    return [file.path for file in summary.uploaded]


def refusal(folder: Path, hub: Hub, message: str, **options: Any) -> str:
    """What a push is refused with, after not a single request that writes."""
    before = len(writes(hub))
    with pytest.raises(CompressionError, match=message) as caught:
        push(folder, REPOSITORY, **options)
    assert len(writes(hub)) == before
    assert "\n" not in str(caught.value)
    assert CANARY not in everything_said(caught.value)
    return str(caught.value)


def export_record() -> str:
    """The record of an ONNX export of the graph in `test_check`."""
    checked = Verification(2.5e-5, 1e-4, 20.0, ((1, 1),), (("1x1", 2.5e-5),), 64, 63)
    record = {
        "model": "Small", "nodes": 1, "inputs": ["input_ids"], "outputs": ["logits"], "routes": [],
        "verification": asdict(checked), "rounding": None,
    }  # fmt: skip
    return json.dumps(record)
