import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import compressor
from compressor.attribution.hubs import Hub
from compressor.errors import CompressionError
from compressor.quality_gate.report import gate_json
from compressor.quality_gate.verdict import gate_from_content
from compressor.records import plain_json, read_as
from compressor.report.data import LayerMeasures, Measured, report_data
from tests.support import gate_results, small
from tests.support.report_data import report


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    small.save(folder / "in")
    text = small.text_file(folder)
    (folder / "protected.json").write_text('[{"layer": 1, "expert": 6}]')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_COMPRESSOR_CACHE", str(folder / "cache"))
        compressor.compress(
            str(folder / "in"), folder / "out", experts=4, strategy="reap", split=1, calibration=str(text), samples=6,
            sequence_length=32, correct="ridge", sequential=True, protect=str(folder / "protected.json"),
            command=("moe-compress", "compress", "in"),
        )  # fmt: skip
    return folder / "out"


@pytest.fixture
def cached(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(out.parent / "cache"))


HUB = Hub("m", 1, 6, 2.5, 40.0, 7.0, 5.5, 0.3)
MODULES = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
MEASURED = Measured(
    tuple(
        LayerMeasures(module, ((1.0, 0.25), (0.25, 1.0)), "made up", (0.5, 0.5), (1.0,), 0.125)
        for module in MODULES
    ),
    1000, "calibration.txt", ("Something is missing.",),
)  # fmt: skip


def test_an_output_tells_what_was_done(out: Path, cached: None) -> None:
    record = json.loads((out / "compression.json").read_text())
    data = report_data(out)
    assert (data.title, data.plan.source.model, data.plan.source.revision) == ("out", "in", None)
    assert (data.strategy, data.plan.sequential) == ("reap", True)
    assert data.plan.correction is not None and data.plan.correction["method"] == "ridge"
    assert (data.experts_before, data.experts_after, data.top_k) == (8, 4, 2)
    for size, when in ((data.before, "before"), (data.after, "after")):
        assert (size.parameters, size.bytes) == (record["parameters"][when], record["bytes"][when])
    assert data.after.bytes < data.before.bytes
    assert data.plan.digest() == record["plan_digest"] and data.versions == record["versions"]
    phases = {"open", "read text", "plan", "correct", "write", "evaluate"}
    assert set(data.seconds) == phases and data.peak_memory > 0
    assert data.command == ("moe-compress", "compress", "in")
    assert (data.missing, data.gate, data.hubs) == ((), None, ())
    for layer, planned in zip(data.layers, record["plan"]["steps"][0]["plan"]["layers"], strict=True):
        assert [list(group.members) for group in layer.plan.groups] == [each["members"] for each in planned["groups"]]
        assert list(layer.plan.dropped) == planned["dropped"] and (layer.plan.experts, len(planned["groups"])) == (8, 4)
        assert layer.protected == ((6,) if layer.plan.layer == 1 else ())
        figures = planned["figures"]["correction"]
        assert layer.heldout_error_before == figures["heldout_error_before"]
        assert layer.heldout_error_after == figures["heldout_error"]
        assert (layer.similarity, layer.visits_before, layer.error) == (None, None, None)


def test_what_was_measured_goes_to_its_layer(out: Path, cached: None) -> None:
    measured = replace(MEASURED, layers=MEASURED.layers[1:])
    data = report_data(out, measured)
    first, second = data.layers
    assert (first.error, first.similarity) == (None, None)
    assert second.fields() == measured.layers[0].fields()
    assert (data.missing, data.measured_tokens) == (("Something is missing.",), 1000)


def test_gate_and_hubs_are_read(out: Path, cached: None, tmp_path: Path) -> None:
    of_these = {"weights": [["model.safetensors", (out / "model.safetensors").stat().st_size, 0]], "files": {}}
    gate = replace(gate_results.mixed(), compressed_identity=of_these)
    (out / "gate.json").write_text(gate_json(gate))
    hubs = tmp_path / "hubs.json"
    hubs.write_text(json.dumps([plain_json(HUB)]))
    try:
        data = report_data(out, MEASURED, hubs)
        assert data.gate == gate
        assert data.hubs == (HUB,)
        assert gate_from_content(json.loads(data.to_json())["gate"]) == gate
        (out / "gate.json").write_text(gate_json(gate_results.mixed()))  # which judged files of other sizes
        assert report_data(out, MEASURED).gate is None
        with pytest.raises(CompressionError, match="is of another model"):
            report_data(out, MEASURED, gate=out / "gate.json")
    finally:
        (out / "gate.json").unlink()
    for content in ('{"a": 1}', "[1]", "nonsense", '[{"layer": 1}]'):
        hubs.write_text(content)
        with pytest.raises(CompressionError, match=r"name a hubs\.json that moe-compress attribute has written"):
            report_data(out, None, hubs)
    with pytest.raises(CompressionError, match=r"absent\.json cannot be read"):
        report_data(out, None, tmp_path / "absent.json")


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no plan": (lambda content: content.pop("plan"), "holds no plan"),
    "another plan": (lambda content: content["plan"].pop("steps"), "steps should be a list"),
    "no sizes": (lambda content: content.pop("bytes"), "bytes is missing; add it"),
    "odd sizes": (lambda content: content.update(parameters={"before": "many"}), "before should be a whole number"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_refused(out: Path, tmp_path: Path, damage: str) -> None:
    change, message = DAMAGE[damage]
    content = json.loads((out / "compression.json").read_text())
    change(content)
    (tmp_path / "compression.json").write_text(json.dumps(content))
    with pytest.raises(CompressionError, match=message):
        report_data(tmp_path)
    (tmp_path / "compression.json").write_text("{")
    with pytest.raises(CompressionError, match="is not valid JSON"):
        report_data(tmp_path)


@given(gate=st.none() | gate_results.gates(), command=st.none() | st.lists(st.text(max_size=5), max_size=3).map(tuple))
def test_json_comes_back(gate: Any, command: Any) -> None:
    layer = LayerMeasures("m", ((1.0,),), "l", (1.0,), (1.0,), 0.5)
    measured = Measured((layer,), 3, "t", ("m",))
    assert read_as(Measured, json.loads(json.dumps(plain_json(measured)))) == measured
    data = report(gate=gate, command=command, options={"a": [1, 2]}, hubs=(HUB,), missing=("a",))
    content = json.loads(data.to_json())
    assert content["experts"] == {"before": 16, "after": 12} and content["hubs"] == [plain_json(HUB)]
    options = content["steps"][0]["options"]
    assert (options["strategy"], options["options"]) == ("hc-smoe", {"a": [1, 2]})
    assert content["layers"][1]["protected"] == [11] and len(content["layers"][1]["similarity"]) == 16
    assert content["command"] == (None if command is None else list(command))
    assert (None if gate is None else gate_from_content(content["gate"])) == gate
