import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compressor.answers.models import identity
from compressor.checkpoint.reader import INDEX_NAME
from compressor.checkpoint.source import ModelSource
from compressor.hub.push import push
from compressor.quality_gate.report import gate_blocks, keep_result, write_gate
from compressor.quality_gate.report import gate_of as gate_of_files
from compressor.quality_gate.verdict import gate_content
from tests.support import small
from tests.support.hub import Hub
from tests.support.hub_pushes import REPOSITORY, content, export_record, gate_of, refusal, sent, shards


def cut(path: Path, nbytes: int) -> None:
    """Shorten a file, or with a negative number cut so many bytes off its end."""
    os.truncate(path, nbytes if nbytes >= 0 else path.stat().st_size + nbytes)


def reshape_a_tensor(folder: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        entry = next(entry for name, entry in header.items() if "norm" in name and len(entry["shape"]) == 1)
        entry["shape"] = [1, *entry["shape"]]

    small.edit_header(next(path for path in shards(folder) if b"norm" in path.read_bytes()[:20_000]), change)


def miscount(folder: Path) -> None:
    small.edit_json(folder / "compression.json", lambda record: record["plan"]["steps"][0]["plan"].update(experts=5))


def promise_more(folder: Path) -> None:
    small.edit_json(folder / "config.json", lambda config: config.update(num_local_experts=8))


def pickle(folder: Path) -> None:
    for path in [*shards(folder), folder / INDEX_NAME]:
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"weights")


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shards(folder)[1].unlink(), "names the shard .*missing"),
        (lambda folder: cut(shards(folder)[1], -1), "is truncated"),
        (reshape_a_tensor, "has shape"),
        (miscount, "4 groups, but the plan keeps 5 experts in every layer"),
        (promise_more, "with 8 experts instead of 4"),
        (pickle, "only as pickle files"),
        (empty, "is neither a safetensors checkpoint .* nor an export"),
        (shutil.rmtree, "is not a folder"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(folder: Path, hub: Hub, damage: Any, message: str) -> None:
    damage(folder)
    refusal(folder, hub, message)
    assert hub.requests == []


def test_any_verified_checkpoint_may_be_pushed(made: Path, hub: Hub) -> None:
    source = made.parent / "base"
    summary = push(source, REPOSITORY)
    assert summary.message == "Checkpoint base"
    there = hub.repositories[REPOSITORY].files()
    assert {name: data for name, data in there.items() if name != ".gitattributes"} == content(source)


def test_a_gate_that_passed_this_very_model(folder: Path, hub: Hub, tmp_path: Path) -> None:
    reports = write_gate(gate_of(folder), tmp_path / "gate")[0].parent
    push(folder, REPOSITORY, require_gate=reports)
    there = hub.repositories[REPOSITORY].files()
    assert there["gate.json"] == (reports / "gate.json").read_bytes()
    assert b"boolq" in there["README.md"]  # the card has the gate's figures
    shutil.copy(reports / "gate.json", folder)
    (folder / "README.md").write_text("---\ntags: [moe-compressor]\n---\n")
    assert sent(push(folder, REPOSITORY, require_gate=reports / "gate.json")) == ["README.md"]


@pytest.mark.parametrize("verdict", ["fail", "inconclusive"])
def test_a_gate_that_did_not_pass_these_weights(folder: Path, hub: Hub, tmp_path: Path, verdict: str) -> None:
    write_gate(gate_of(folder, verdict), tmp_path / "gate")
    refusal(folder, hub, f"says {verdict} for smaller, so nothing was pushed", require_gate=tmp_path / "gate")
    assert hub.requests == []


def touch_weights(folder: Path) -> str:
    path = shards(folder)[2]
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    return path.name


def touch_config(folder: Path) -> str:
    small.edit_json(folder / "generation_config.json", lambda config: config.update(temperature=0.5))
    return "generation_config.json"


def add_template(folder: Path) -> str:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return "chat_template.jinja"


def lose_tokenizer(folder: Path) -> str:
    (folder / "tokenizer_config.json").unlink()
    return "tokenizer_config.json"


def spoil_weights(folder: Path) -> str:
    """One bit of one weight, with size and time of change as they were."""
    path = shards(folder)[2]
    time = path.stat().st_mtime_ns
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(time, time))
    return path.name


@pytest.mark.parametrize(
    ("change", "digests"),
    [
        *((change, False) for change in (touch_weights, touch_config, add_template, lose_tokenizer)),
        *((change, True) for change in (spoil_weights, touch_config)),
    ],
)
def test_a_model_that_changed_since_its_gate(
    folder: Path, hub: Hub, tmp_path: Path, change: Callable[[Path], str], digests: bool
) -> None:
    """With digests a gate knows the model by its content."""
    judged = identity(ModelSource(str(folder), None, folder), digests=digests)
    write_gate(replace(gate_of(folder), compressed_identity=judged), tmp_path / "gate")
    if digests:
        touch_weights(folder)  # as a copy does
        assert push(folder, REPOSITORY, require_gate=tmp_path / "gate", dry_run=True).uploaded
    name = change(folder)
    assert refusal(folder, hub, "is not the one that the gate", require_gate=tmp_path / "gate").startswith(name)


@pytest.mark.parametrize("verdict", ["fail", "inconclusive"])
@pytest.mark.parametrize("kept", ["beside", "cached"])
def test_the_gate_of_these_very_files_is_found_by_their_digests(
    folder: Path, hub: Hub, tmp_path: Path, verdict: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "cache" / "of" / "results"))
    judged = identity(ModelSource(str(folder), None, folder), digests=True)
    result = replace(gate_of(folder, verdict), compressed_identity=judged)
    if kept == "beside":
        write_gate(result, tmp_path / "gate")
    else:
        keep_result(result)
    for name in ("other", "odd", "broken"):
        (tmp_path / name).mkdir()
    odd = {**gate_content(result), "compressed_identity": {"weights": [["../x", "y"]], "files": 3}}
    (tmp_path / "odd" / "gate.json").write_text(json.dumps(odd))
    (tmp_path / "broken" / "gate.json").write_text("{")
    refusal(folder, hub, "Nothing was pushed; pass --yes")
    assert push(folder, REPOSITORY, dry_run=True).uploaded
    touch_weights(folder)  # as a copy does
    push(folder, REPOSITORY, yes=True)
    card = hub.repositories[REPOSITORY].files()["README.md"].decode()
    assert f"**{verdict.capitalize()}" in card and "boolq" in card
    assert f"{verdict.capitalize()}:" in "".join(map(str, gate_blocks(result)))
    spoil_weights(folder)
    assert gate_of_files(folder) is None


def test_a_gate_of_something_else(folder: Path, hub: Hub, tmp_path: Path) -> None:
    write_gate(gate_of(folder), tmp_path / "gate")
    path = tmp_path / "gate" / "gate.json"
    small.edit_json(path, lambda gate: gate.update(compressed_identity={"repository": "org/x", "commit": "c0"}))
    refusal(folder, hub, "judged org/x on the Hub", require_gate=path)
    small.edit_json(path, lambda gate: gate.update(compressed_identity={}))
    refusal(folder, hub, "is not the one that the gate", require_gate=path)
    refusal(folder, hub, "cannot be read", require_gate=tmp_path / "gone.json")


def graph(folder: Path) -> Path:
    """An ONNX export in miniature: a product, its weights in a file of their own, and the record of the comparison."""
    weight = numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(3, 4), "weight")
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.FLOAT, ["batch", 3])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 4])]
    node = helper.make_node("MatMul", ["input_ids", "weight"], ["logits"])
    model = helper.make_model(helper.make_graph([node], "small", inputs, outputs, [weight]))
    folder.mkdir()
    onnx.save_model(
        model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=0
    )
    (folder / "onnx_export.json").write_text(export_record())
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def test_a_graph_is_pushed_with_its_record_and_its_weights(hub: Hub, tmp_path: Path) -> None:
    folder = graph(tmp_path / "graph")
    (folder / "model.safetensors").write_bytes(b"unverified")
    there = hub.create(REPOSITORY, {"model.safetensors": b"theirs"})
    summary = push(folder, REPOSITORY)
    pushed = {name: data for name, data in content(folder).items() if name != "model.safetensors"}
    assert there.files() == {**pushed, "model.safetensors": b"theirs"}
    assert (summary.message, summary.left_out) == ("Checkpoint graph as ONNX", ("model.safetensors",))
    refusal(folder, hub, "--require-gate is for safetensors", require_gate=tmp_path)


def test_the_graph_of_a_checkpoint_goes_with_it(folder: Path, hub: Hub) -> None:
    graph(folder / "onnx")
    (folder / "onnx" / "scratch.bin").write_bytes(b"x")
    push(folder, REPOSITORY)
    there = hub.repositories[REPOSITORY].files()
    names = {"model.onnx", "model.onnx.data", "onnx_export.json", "config.json", "tokenizer.json"}
    assert {name for name in there if name.startswith("onnx/")} == {f"onnx/{name}" for name in names}
    cut(folder / "onnx" / "model.onnx.data", 40)
    refusal(folder, hub, "model.onnx.data has 40 bytes, model.onnx needs 48")


def relocate(folder: Path, place: str) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = place
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def claim(folder: Path, **changes: Any) -> None:
    small.edit_json(folder / "onnx_export.json", lambda record: record.update(changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "onnx_export.json").unlink(), "has no onnx_export.json"),
        (lambda f: (f / "model.onnx").unlink(), "has no model.onnx"),
        (lambda f: (f / "model.onnx.data").unlink(), "model.onnx.data is missing, model.onnx needs 48 bytes"),
        (lambda f: cut(f / "model.onnx.data", 47), "has 47 bytes"),
        (lambda f: cut(f / "model.onnx.data", 49), "has 49 bytes"),
        (lambda f: cut(f / "model.onnx", 30), "no sound ONNX graph"),
        (lambda f: (f / "model.onnx").write_bytes(b""), "no sound ONNX graph"),
        (lambda f: relocate(f, "../secret"), "outside its folder"),
        (lambda f: claim(f, outputs=["other"]), "does not have the outputs"),
        (lambda f: claim(f, verification=None), "does not say that the graph agrees"),
        (lambda f: claim(f, verification={"largest_difference": 1, "tolerance": 0.5}), "does not say"),
        (lambda f: (f / "onnx_export.json").write_text("[]"), "should hold a JSON object"),
    ],
)
def test_a_graph_that_is_not_whole_is_refused(hub: Hub, tmp_path: Path, damage: Any, message: str) -> None:
    folder = graph(tmp_path / "graph")
    damage(folder)
    refusal(folder, hub, message)
    assert hub.requests == []
