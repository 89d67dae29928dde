"""Files that travel with the weights: what stock transformers cannot load is refused by name, at the start."""

import json
import shutil
from pathlib import Path

import pytest
import transformers
from transformers import AutoTokenizer, GenerationConfig

import compressor
from compressor.errors import CompressionError
from compressor.model.verification import OBJECTS, check_carried
from tests import small
from tests.plans import plan_of

CONFIG = "tokenizer_config.json"
UNLOADABLE = {  # by file: content that stock transformers cannot take
    "generation_config.json": (b"[1]", b'"x"', b"{", b'{"watermarking_config": 5}'),
    "special_tokens_map.json": (b"[1]", b'{"eos_token": 5}'),
    "added_tokens.json": (b"[1]", b'{"x": {"y": 1}}'),
    CONFIG: (b"[1]", b'{"eos_token": 5}', b'{"added_tokens_decoder": 3}'),
    "chat_template.jinja": (b"\xff\xfe",),
    "additional_chat_templates/rag.jinja": (b"\xff\xfe",),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose optional files are there too, so that only one is at fault where one is."""
    folder = small.save(tmp_path_factory.mktemp("sound") / "model")
    (folder / "chat_template.jinja").write_text(small.CHAT)
    check_carried(folder)
    return folder


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def loads(folder: Path) -> bool:
    """Whether stock transformers loads what is beside the weights."""
    try:
        GenerationConfig.from_pretrained(folder)
        AutoTokenizer.from_pretrained(folder)
    except Exception:
        return False
    return True


@pytest.mark.parametrize(("name", "content"), [(name, each) for name, all_ in UNLOADABLE.items() for each in all_])
def test_what_stock_transformers_cannot_load_is_refused_by_name(name: str, content: bytes, model: Path) -> None:
    assert loads(model)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_bytes(content)
    assert not loads(model)
    with pytest.raises(CompressionError, match=name):
        compressor.compress(str(model), model.parent / "out", strategy="model-centric", experts=4)
    assert [path.name for path in model.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("name", OBJECTS)
def test_configs_that_are_no_objects_are_refused(name: str, model: Path) -> None:
    (model / name).write_text("[1]")
    with pytest.raises(CompressionError, match=f"{name} should hold a JSON object"):
        check_carried(model)


def test_a_plan_is_not_carried_out_and_nothing_exported_with_such_a_file(model: Path) -> None:
    plan = plan_of(model, strategy="model-centric", experts=4)
    (model / "generation_config.json").write_text("[1]")
    with pytest.raises(CompressionError, match=r"generation_config.json should hold a JSON object"):
        compressor.apply(plan, model.parent / "out")
    onnx = pytest.importorskip("exporters.onnx")
    with pytest.raises(CompressionError, match=r"generation_config.json should hold a JSON object"):
        onnx.export(model, model.parent / "out")
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_a_tokenizer_of_its_own_code_or_without_its_package_passes(model: Path) -> None:
    (model / "tokenizer.json").rename(model / "own.model")
    (model / CONFIG).write_text(json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["o.Own", None]}}))
    assert not loads(model)
    check_carried(model)
    (model / CONFIG).unlink()
    assert not loads(model)
    check_carried(model)


def test_an_output_whose_tokenizer_does_not_load_as_the_sources_does_is_refused(sound: Path, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    check_carried(model, model)
    with pytest.raises(CompressionError, match="the written tokenizer does not load, though the source's does"):
        check_carried(model, sound)


def test_carried_files_are_loaded_before_the_output_is_in_place(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they change while the run is at work."""
    stock = transformers.GenerationConfig.from_pretrained

    def change(folder: str) -> GenerationConfig:
        found: GenerationConfig = stock(folder)
        (model / "generation_config.json").write_text("[1]")
        return found

    monkeypatch.setattr(transformers.GenerationConfig, "from_pretrained", change)
    with pytest.raises(CompressionError, match=r"generation_config.json should hold a JSON object"):
        compressor.compress(str(model), model.parent / "out", strategy="model-centric", experts=4)
    assert [path.name for path in model.parent.iterdir()] == ["model"]
