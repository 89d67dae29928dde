"""Models named by a Hub id, against a real HTTP server on loopback."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from compressor.data.sources import SourceSpec, read_blend
from tests.support import blends, small, zoo
from tests.support.command_line import Result
from tests.support.hub import Hub, serve

pytestmark = pytest.mark.full  # each starts the command in a process of its own
REPOSITORY = "org/tiny-moe"


CODE = """
import dataclasses, json, sys
from tests.support.command_line import captured
print(json.dumps([dataclasses.asdict(captured(*arguments)) for arguments in json.load(sys.stdin)]))
"""


def run(hub: Hub, home: Path, *commands: Sequence[str]) -> list[Result]:
    """The command line in a process of its own, whose Hub is the server from its start, one command after the other."""
    quiet = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
    places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[3])}
    given = {"input": json.dumps(commands), "env": {**os.environ, **quiet, **places}, "cwd": home}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, **given)
    assert done.returncode == 0, done.stderr
    return [Result(**each) for each in json.loads(done.stdout)]


def test_inspect_fetches_headers_only_and_unknown_names_are_one_sentence(tmp_path: Path) -> None:
    zoo.save("mixtral", tmp_path / "model")
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    (tmp_path / "home").mkdir()
    unknown = {
        ("inspect", "org/other"): "neither a folder here nor a model on the Hub",
        ("inspect", REPOSITORY, "--revision", "nowhere"): "has no revision 'nowhere'",
        ("compress", "org/other", "-o", "out", "--experts", "4"): "neither a folder here nor a model on the Hub",
    }
    with serve() as hub:
        commit = hub.serve(REPOSITORY, tmp_path / "model").branches["main"]
        dry = ("compress", REPOSITORY, "--experts", "4", "--dry-run", "--json")
        found, shown, *refusals = run(hub, tmp_path / "home", ("inspect", REPOSITORY, "--json"), dry, *unknown)
        fetched = sum(request.sent for request in hub.requests if request.path.endswith("model.safetensors"))
    assert found.status == 0, found
    report = json.loads(found.out)
    assert 0 < fetched < size, "the weights were downloaded"
    assert report["revision"] == commit
    assert report["experts"] == 8
    assert shown.status == 0 and json.loads(shown.out)["after"]["num_experts"] == 4, shown
    from compressor import inspect

    local = inspect(str(tmp_path / "model"))
    assert report["parameters"] == local.parameters
    assert report["outcomes"] == [
        {"experts": o.experts, "parameters": o.parameters, "bytes": o.bytes} for o in local.outcomes
    ]
    for refusal, message in zip(refusals, unknown.values(), strict=True):
        assert refusal.status == 2
        assert message in refusal.err
        assert refusal.err.count("\n") == 1, refusal


def test_the_default_calibration_is_the_blend_at_its_commits(tmp_path: Path) -> None:
    small.save(tmp_path / "model")
    (tmp_path / "home").mkdir()
    folders = blends.data_sets(tmp_path / "sets", 60)
    gone = folders.pop("argilla/Synth-APIGen-v0.1")
    ask = ("compress", "../model", "--experts", "4", "--strategy", "count-guided", "--sequence-length", "32")
    missing = (*ask, "--samples", "20", "-o", "../without", "--json")
    strict = (*ask, "-o", "../strict", "--strict")
    few = (*ask, "--samples", "3", "-o", "../few", "--json")
    with serve() as hub:
        for entry in read_blend():
            address = SourceSpec.parse(entry.source)
            if address.name in folders:
                served = hub.serve(address.name, folders[address.name])
                served.branches[str(address.revision)] = served.branches.pop("main")
        without, refusal, heaviest = run(hub, tmp_path / "home", missing, strict, few)
    assert without.status == 0, without
    calibration = json.loads((tmp_path / "without" / "compression.json").read_text())["plan"]["calibration"]
    assert [SourceSpec.parse(entry["source"]).name for entry in calibration["sources"]] == [*folders]
    assert sum(entry["weight"] for entry in calibration["sources"]) == pytest.approx(1)
    assert calibration["samples"] == 20 and calibration["left_out"] == [read_blend()[-1].source]
    assert f"argilla/{gone.name}" in without.err and "count for more" in without.err
    recipe = (tmp_path / "without" / "recipe.yaml").read_text()
    assert all(str(entry["source"]) in recipe for entry in calibration["sources"])
    assert refusal.status == 2 and "argilla/Synth-APIGen" in refusal.err and not (tmp_path / "strict").exists()
    assert heaviest.status == 0 and "only the heaviest are read" in heaviest.err, heaviest


def test_c4_is_streamed_by_its_name(tmp_path: Path) -> None:
    small.save(tmp_path / "model")
    data = tmp_path / "c4"
    (data / "en").mkdir(parents=True)
    card = "---\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n    path: en/c4-train.*.json.gz\n---\n"
    (data / "README.md").write_text(card)
    lines = [json.dumps({"text": f"document {number} speaks of {number * 7}", "url": "-"}) for number in range(200)]
    for shard in range(2):
        packed = gzip.compress("\n".join(lines[shard::2]).encode())
        (data / "en" / f"c4-train.{shard:05d}-of-00002.json.gz").write_bytes(packed)
    (tmp_path / "home").mkdir()
    sizes = ("--samples", "4", "--sequence-length", "32")
    ask = ("compress", "../model", "--experts", "4", "--strategy", "count-guided", *sizes)
    (tmp_path / "chat").mkdir()
    splits = [{"split": name, "path": f"{name}.jsonl"} for name in ("train_sft", "test_sft")]
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {json.dumps(splits)}\n---\n"
    (tmp_path / "chat" / "README.md").write_text(card)
    for split in ("train_sft", "test_sft"):
        lines = [json.dumps({"prompt": f"{split} {number}", "id": number}) for number in range(200)]
        (tmp_path / "chat" / f"{split}.jsonl").write_text("\n".join(lines))
    others = [(*ask, "-o", "../other", "--calibration", name) for name in ("org/nothing", "org/chat", "org/chat:no")]
    named = (*ask, "-o", "../named", "--calibration", "org/chat@test_sft#prompt", "--json")
    with serve() as hub:
        hub.serve("allenai/c4", data)
        hub.serve("org/chat", tmp_path / "chat")
        c4 = (*ask, "-o", "../out", "--json", "--calibration", "allenai/c4")
        done, split, *refusals = run(hub, tmp_path / "home", c4, named, *others)
        assert any("c4-train" in request.path for request in hub.requests)
    assert done.status == 0, done
    calibration = json.loads((tmp_path / "out" / "compression.json").read_text())["plan"]["calibration"]
    assert calibration["tokens"] == 4 * 32
    assert split.status == 0, split
    assert "- org/chat@test_sft#prompt" in (tmp_path / "named" / "recipe.yaml").read_text()
    messages = (
        "'org/nothing' is no file, and cannot be read as a data set",
        "Bad split: train. Available splits: ['train_sft', 'test_sft']",
        "BuilderConfig 'no' not found. Available: ['default']",
    )
    for refusal, message in zip(refusals, messages, strict=True):
        assert refusal.status == 2 and message in refusal.err, refusal
    assert not (tmp_path / "other").exists()
