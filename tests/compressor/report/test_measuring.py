import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import compressor
from compressor.errors import CompressionError
from compressor.records import plain_json
from compressor.report.data import report_data
from compressor.report.measuring import measure
from compressor.report.page import page
from tests.support import small
from tests.support.hub.server import point, serve
from tests.support.quantized import save_fp8
from tests.support.small import edit_json, edit_tensors

SETTINGS: dict[str, Any] = {"experts": 4, "strategy": "hc-smoe", "samples": 8, "sequence_length": 32}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, a text, an output of both, and the cache with the record of that run."""
    folder = tmp_path_factory.mktemp("made")
    small.save(folder / "in")
    small.text_file(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_COMPRESSOR_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        compressor.compress("in", folder / "out", calibration="calibration.txt", **SETTINGS)
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it that a test may change; the record still names the first place."""
    shutil.copytree(made, tmp_path / "place")
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "place" / "cache"))
    return tmp_path / "place"


def forget(place: Path) -> None:
    shutil.rmtree(place / "cache", ignore_errors=True)


def test_the_record_gives_source_and_text_wherever_one_stands(made: Path, place: Path) -> None:
    found = measure(place / "out")
    assert found.missing == () and found.tokens == 8 * 32 and found.text == "calibration.txt"
    for layer in found.layers:
        assert None not in (layer.similarity, layer.visits_before, layer.visits_after, layer.error)
        assert layer.similarity_label == "linear CKA of expert outputs, 256 tokens"
        assert 0 < (layer.error or 0) < 2
    assert report_data(place / "out", found).layers[0].similarity == found.layers[0].similarity
    assert str(made) not in json.dumps(plain_json(found))
    assert measure(place / "out", samples=3).tokens == 3 * 32
    assert measure(place / "out", samples=100).tokens == 8 * 32  # no more than the plan read


def test_a_named_text_is_run_through_both_models(place: Path) -> None:
    text = place / "mine.txt"
    text.write_text("The quick brown fox jumps over the lazy dog again and again, says the book of foxes. " * 3)
    found = measure(place / "out", str(place / "in"), calibration=[str(text)], samples=5, sequence_length=16)
    assert (found.tokens, found.text, found.missing) == (80, "mine.txt", ())
    assert found.layers != measure(place / "out").layers


@pytest.mark.full
def test_speed_is_measured_of_both_models_and_kept(place: Path) -> None:
    found = measure(place / "out", speed=True)
    assert found.speed is not None and found.speed.prompt_tokens == 32
    assert min(*found.speed.prefill, *found.speed.decode) > 0
    for folder, nbytes in zip(("in", "out"), found.speed.memory, strict=True):
        stock = AutoModelForCausalLM.from_pretrained(place / folder, dtype=found.speed.dtype)
        weights = {value.data_ptr(): value.nbytes for value in (*stock.parameters(), *stock.buffers())}
        assert sum(weights.values()) == nbytes
    later = report_data(place / "out")
    assert later.speed == found.speed
    assert "as fast" in page(later, [])
    edit_record(place, lambda record: record.update(source="/gone"))
    with pytest.raises(CompressionError, match="--speed needs base, output and text"):
        measure(place / "out", speed=True)


def edit_record(place: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit_json(next((place / "cache" / "runs").iterdir()), change)


def change_source(place: Path) -> None:
    edit_tensors(place / "in", lambda tensors: tensors["model.layers.0.block_sparse_moe.gate.weight"].add_(1))
    edit_record(place, lambda record: record.update(source=str(place / "in")))


def change_text(place: Path, change: Callable[[Path], Any]) -> None:
    def moved(record: dict[str, Any]) -> None:
        name = str(place / "calibration.txt")
        record["calibration"].update(source=name, sources=[{**record["calibration"]["sources"][0], "source": name}])

    edit_record(place, moved)
    change(place / "calibration.txt")


SOURCE = (
    "The base model in is not available, so the similarity of its experts, the routed tokens before and the errors are "
    "not measured; name it with --model."
)
TEXT = (
    "The calibration text calibration.txt is not available or has changed, so routed tokens, errors and "
    "similarities of outputs are not measured; name it with --calibration."
)
LOSSES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "no source": (lambda place: edit_record(place, lambda record: record.update(source="/gone")), (SOURCE,)),
    "changed source": (change_source, (SOURCE,)),
    "no text": (lambda place: change_text(place, Path.unlink), (TEXT,)),
    "changed text": (lambda place: change_text(place, lambda file: file.write_text("other " * 999)), (TEXT,)),
    "no record": (forget, (SOURCE, TEXT)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_gone_is_said(place: Path, loss: str) -> None:
    change, missing = LOSSES[loss]
    change(place)
    found = measure(place / "out")
    assert found.missing == missing
    for layer in found.layers:
        assert (layer.visits_after is None) == (TEXT in missing) and layer.visits_before is None and layer.error is None
        assert (layer.similarity is None) == (SOURCE in missing)
        assert ("router rows" in layer.similarity_label) == (missing == (TEXT,))
    assert bool(found.layers) == (missing != (SOURCE, TEXT))
    assert len(report_data(place / "out", found).layers) == 2


def test_a_plan_without_text_says_so(place: Path) -> None:
    compressor.compress(str(place / "in"), place / "bare", experts=4, strategy="model-centric")
    found = measure(place / "bare")
    assert found.missing == (
        "The plan was made without any text, so routed tokens, errors and similarities of outputs are not measured; "
        "name one with --calibration.",
    )
    assert all("surrogate weights" in layer.similarity_label and layer.similarity for layer in found.layers)
    found = measure(place / "bare", calibration=["demo"], samples=2, sequence_length=64)
    assert found.missing == () and found.tokens == 128 and found.layers[0].error is not None


def test_another_model_is_refused(place: Path) -> None:
    small.save(place / "other", num_local_experts=6)
    with pytest.raises(CompressionError, match=r"other is not the model that .*out was made from: its fingerprint is"):
        measure(place / "out", str(place / "other"))
    with pytest.raises(CompressionError, match=r"nowhere is not a folder"):
        measure(place / "out", str(place / "nowhere" / "nowhere"))
    with pytest.raises(CompressionError, match="--revision is that of the model that --model names"):
        measure(place / "out", revision="main")
    with pytest.raises(CompressionError, match="--samples 0 leaves nothing to run"):
        measure(place / "out", samples=0)
    with pytest.raises(CompressionError, match="--sequence-length 0 leave nothing to run"):
        measure(place / "out", calibration=["demo"], sequence_length=0)
    with pytest.raises(CompressionError, match=r"compression\.json cannot be read"):
        measure(place / "in")


@pytest.mark.parametrize("here", [False, True])
def test_a_source_on_the_hub_is_read_at_its_commit(place: Path, monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    """Not where a folder here is called like it: that would be another model."""
    monkeypatch.chdir(place)
    if here:
        shutil.copytree(place / "in", place / "org" / "model")
    with serve() as hub:
        point(monkeypatch, hub.url, place / "hub")
        there = hub.serve("org/model", place / "in")
        published = {"model": "org/model", "revision": there.branches["main"]}
        there.branches["main"] = there.add({"config.json": b"{}"})
        edit_json(place / "out" / "compression.json", lambda content: content["plan"]["source"].update(published))
        found = measure(place / "out")
    assert found.missing == ((SOURCE.replace("model in", "model org/model"),) if here else ())


def test_an_output_without_weights_is_told(place: Path) -> None:
    (place / "out" / "model.safetensors").unlink()
    found = measure(place / "out")
    assert found.missing == (
        "out holds no weights that can be run, so routed tokens, errors and similarities of outputs are not measured.",
    )
    assert ["router rows" in layer.similarity_label for layer in found.layers] == [True, True]


@pytest.mark.full
def test_a_quantised_source_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "cache"))
    save_fp8(tmp_path / "in", sizes={"vocab_size": small.VOCABULARY})
    small.tokenizer().save_pretrained(tmp_path / "in")
    text = small.text_file(tmp_path)
    for strategy in ("reap", "hc-smoe"):  # which keeps it quantised, and which does not
        settings = {**SETTINGS, "strategy": strategy}
        compressor.compress(str(tmp_path / "in"), tmp_path / strategy, calibration=str(text), **settings)
        found = measure(tmp_path / strategy)
        assert found.missing == () and all(0 < (layer.error or 0) < 2 for layer in found.layers)
