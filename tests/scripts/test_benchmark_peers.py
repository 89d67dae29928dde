"""The comparison with other projects: their code runs on an old Mixtral that computes the same; the table is right."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralForCausalLM

from compressor.data.demo import demo_checkpoint
from compressor.errors import CompressionError
from scripts.benchmarks import peers
from scripts.peers import absent
from scripts.peers.job import Job, Told, read, write
from scripts.peers.run import METHODS, by_label, kept_rows, prepare
from tests import small
from tests.scripts.peers import checkouts

SAMPLES, LENGTH, KEEP = 4, 32, 3


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A tiny Mixtral, its batches, and where an output goes."""
    folder = tmp_path_factory.mktemp("peers")
    model, text, tokens = small.save(folder / "model"), small.text_file(folder), folder / "tokens.pt"
    peers.save_batches(model, str(text), SAMPLES, LENGTH, tokens)
    return Job("", str(model), str(tokens), str(text), SAMPLES, LENGTH, KEEP, str(folder / "out"))


def carried_out(job: Job, method: str, peer: Path | None, place: Path) -> Told:
    """One method in a process of its own."""
    given = {"method": method, "out": str(place / "out"), "peer": None if peer is None else str(peer)}
    made = replace(job, **given)
    return peers.carry_out(made, place, {"MOE_COMPRESSOR_CACHE": str(place / "cache")})


def test_a_pruning_by_the_same_rule_writes_the_same_checkpoint(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = carried_out(job, "reap, theirs, weights as used", checkouts.reap(tmp_path / "reap"), tmp_path)
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "cache"))
    own = replace(job, out=str(tmp_path / "ours"))
    ours = METHODS["reap, ours"](own)
    assert peers.same_choice(ours, theirs) == "2 of 2 layers"
    assert all(len(group) == 1 for layer in theirs.groups for group in layer) and len(theirs.groups[0]) == KEEP
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "ours"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert theirs.stored == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert list(theirs.seconds) == ["open", "calibrate", "write"] and theirs.total > 0 and theirs.cpu > 0
    assert ours.tokens == peers.save_batches(Path(job.model), job.text, SAMPLES, LENGTH, tmp_path / "again.pt")


def test_a_merging_is_judged_with_its_weights_repeated(job: Job, tmp_path: Path) -> None:
    told = carried_out(job, "hc-smoe, theirs", checkouts.hc_smoe(tmp_path / "hc"), tmp_path)
    assert told.groups == [[[0, 3, 6], [1, 4, 7], [2, 5]]] * 2
    assert told.stored < (tmp_path / "out" / "model.safetensors").stat().st_size
    expected = MixtralForCausalLM.from_pretrained(job.model).eval()
    for layer in expected.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)
            weight.data = weight.data[torch.arange(8) % KEEP]
    merged, tokens = MixtralForCausalLM.from_pretrained(tmp_path / "out").eval(), torch.load(job.tokens)[0]
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, expected(tokens).logits)


def test_a_process_that_fails_says_why(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompressionError, match="has no src; name the folder"):
        prepare(str(tmp_path), "src")
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(CompressionError, match="reap, theirs ended with status 3:\nno such luck"):
        carried_out(job, "reap, theirs", tmp_path, tmp_path)


def test_only_what_is_not_installed_is_stood_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    assert absent.stand_in(["torch", "json", "not_there_at_all"]) == {"not_there_at_all"}
    inner = importlib.import_module("not_there_at_all.deep.inside")
    try:
        assert inner.SomeClass(1, name=2).call("x").further is not None
        with pytest.raises(AttributeError):
            _ = inner.__wrapped__
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("another_that_is_not_there")
    finally:
        for name in [name for name in sys.modules if name.startswith("not_there_at_all")]:
            del sys.modules[name]


def test_kept_experts_are_found_by_their_router_rows() -> None:
    before = torch.arange(12.0).view(4, 3)
    assert kept_rows(before, before[[3, 1]]) == [[3], [1]]
    with pytest.raises(CompressionError, match="not exactly one"):
        kept_rows(before, before[[3, 1]] + 1e-6)
    assert by_label([2, 0, 2, 1, 0]) == [[0, 2], [1, 4], [3]]


def test_theirs_stands_over_ours_of_the_same_method(tmp_path: Path) -> None:
    ours = Told({"all": 2.0}, 4.0, 300, 50, [[[0], [1]], [[0], [2]]], "digest")
    theirs = Told({"open": 1.0, "calibrate": 4.0}, 2.0, 500, 100, [[[1], [0]], [[0], [3]]])
    write(tmp_path / "told.json", theirs)
    assert read(tmp_path / "told.json", Told) == theirs
    found = {"reap, ours": ours, "reap, theirs": theirs}
    rows = list(peers.rows("m", found, {"reap, ours": 2.5, "reap, theirs": 2.25}, 2.0, imports=100))
    assert rows == [
        ("m", "reap, ours", 1.0, 1.0, 1.0, 1.0, "2.5000", "+0.5000", ""),
        ("m", "reap, theirs", 2.5, 0.5, 2.0, 2.0, "2.2500", "+0.2500", "1 of 2 layers"),
    ]
    assert {len(row) for row in rows} == {len(peers.COLUMNS)}
    assert list(peers.absolute(found, 100))[1].startswith("reap, theirs: open 1.00 s, calibrate 4.00 s, CPU")


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match="give --reap FOLDER, --hc-smoe FOLDER or both"):
        peers.methods(None, None)
    assert [*peers.methods(None, "here").values()] == [None, "here"]
    with demo_checkpoint() as folder, pytest.raises(CompressionError, match="is no Mixtral of two experts a token"):
        peers.copy_in_float32(folder, tmp_path / "copy")
