"""Files that travel with the weights: what stock transformers cannot load is refused at the start."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

import compressor
from compressor.errors import CompressionError
from compressor.model.tokenizer import load_tokenizer
from compressor.model.verification import check_carried
from compressor.pipeline.formats import export_checkpoint
from compressor.progress import Silent
from tests.support import small
from tests.support.plans import plan_of

CONFIG = "tokenizer_config.json"
UNLOADABLE = (b"[1]", b'"x"', b"{", b'{"watermarking_config": 5}')  # as a generation config


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small.save(tmp_path_factory.mktemp("sound") / "model")
    (folder / "chat_template.jinja").write_text(small.CHAT)
    check_carried(folder)
    return folder


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def loads(folder: Path) -> bool:
    try:
        GenerationConfig.from_pretrained(folder)
        AutoTokenizer.from_pretrained(folder)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("content", UNLOADABLE)
def test_a_generation_config_that_stock_transformers_cannot_load_is_refused(content: bytes, model: Path) -> None:
    assert loads(model)
    out, plan = model.parent / "out", plan_of(model, strategy="model-centric", experts=4)
    (model / "generation_config.json").write_bytes(content)
    assert not loads(model)
    for use in (
        lambda: compressor.compress(str(model), out, strategy="model-centric", experts=4),
        lambda: compressor.apply(plan, out),
        lambda: export_checkpoint("onnx", model, out, {}, False, Silent()),
    ):
        with pytest.raises(CompressionError, match=r"cannot load .*generation_config\.json"):
            use()
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_a_tokenizer_without_its_package_passes(model: Path) -> None:
    (model / "tokenizer.json").rename(model / "own.model")
    (model / CONFIG).unlink()
    assert not loads(model)
    check_carried(model)


OWN = {"AutoTokenizer": ["own.Own", None], "AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
OTHERS = ("generation_config.json", "processor_config.json", "preprocessor_config.json")
CONFIGS = ["config.json", CONFIG, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_output_names_no_code_where_the_rest_loads_without(name: str, model: Path) -> None:
    before = json.loads((model / name).read_text()) if (model / name).exists() else {"size": 3}
    named = {**before, "auto_map": OWN, "inner": {"auto_map": OWN, "custom_pipelines": {}, "list": [{"auto_map": OWN}]}}
    (model / name).write_text(json.dumps(named))
    (model / "own.py").write_text("raise SystemExit")
    (model / "vocab.json").write_text('{"auto_map": 5}')
    out = model.parent / "out"
    compressor.compress(str(model), out, strategy="model-centric", experts=4)
    written = json.loads((out / name).read_text())
    assert written["inner"] == {"list": [{}]} and "auto_map" not in written
    assert name == "config.json" or written == {**before, "inner": {"list": [{}]}}
    assert loads(out) and not (out / "own.py").exists()
    assert json.loads((out / "vocab.json").read_text()) == {"auto_map": 5}
    assert load_tokenizer(model).get_vocab() == AutoTokenizer.from_pretrained(out).get_vocab()


def test_a_tokenizer_class_of_its_own_goes_where_its_file_is_enough(tmp_path: Path) -> None:
    model = small.save(tmp_path / "model", "deepseek_v3")  # for whose type transformers has no tokenizer of its own
    ids = AutoTokenizer.from_pretrained(model)("one two")["input_ids"]
    small.edit_json(model / CONFIG, lambda config: config.update(tokenizer_class="Own", auto_map=OWN))
    assert not loads(model) and load_tokenizer(model)("one two")["input_ids"] == ids
    assert load_tokenizer(model).name_or_path == str(model)
    compressor.compress(str(model), model.parent / "out", strategy="model-centric", experts=4)
    assert AutoTokenizer.from_pretrained(model.parent / "out")("one two")["input_ids"] == ids


@pytest.mark.parametrize("named", [OWN, OWN["AutoTokenizer"]], ids=["by kind", "legacy"])
def test_a_tokenizer_that_needs_its_own_code_is_refused(named: object, model: Path) -> None:
    (model / "processor_config.json").write_text(json.dumps({"auto_map": {"AutoProcessor": "own.Processor"}}))
    with pytest.raises(CompressionError, match=r"processor_config.json names code of its own for the processor"):
        check_carried(model)
    (model / "processor_config.json").unlink()
    (model / "tokenizer.json").rename(model / "own.model")
    (model / CONFIG).write_text(json.dumps({"tokenizer_class": "Own", "auto_map": named}))
    message = r"tokenizer_config.json names code .*tokenizer \(.*own.Own.*; save it there"
    with pytest.raises(CompressionError, match=message):
        compressor.compress(str(model), model.parent / "out", strategy="model-centric", experts=4)
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_an_output_whose_tokenizer_does_not_load_as_the_sources_does_is_refused(sound: Path, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    check_carried(model, model)
    with pytest.raises(CompressionError, match="the written tokenizer does not load, though the source's does"):
        check_carried(model, sound)
