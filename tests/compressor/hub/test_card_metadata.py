import json
import logging
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub import ModelCard

from compressor.hub.card import base_metadata, card_text, languages, licence
from compressor.recipe.plan import LayerPlan, Source
from compressor.recipe.steps_plan import Plan
from compressor.records import readable_json
from tests.compressor.hub.test_card_layers import a_plan, moe_layer
from tests.support.hub.cards import LICENCES, mistakes
from tests.support.plans import Decided, by_hand

LINK = "https://a.b/c"
BASE, COMMIT = "org/big-moe", "0123456789" * 4


def recorded(folder: Path, source: Source) -> Path:
    """An output by its record, config and a weight of four numbers, of an architecture that nobody knows."""
    kept = a_plan([LayerPlan.keep(moe_layer(index, 8), [0, 3, 4]) for index in range(2)])
    plan = by_hand(Decided(source, 3, "by-hand", {}, None, kept.layers))
    folder.mkdir()
    header = b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    (folder / "config.json").write_text(json.dumps({"architectures": ["OddModel"], "model_type": "odd"}))
    record = {
        "parameters": {"before": 9, "after": 4}, "bytes": {"before": 36, "after": 16}, "plan_digest": plan.digest(),
        "plan": plan.to_dict(),
    }  # fmt: skip
    (folder / "compression.json").write_text(readable_json(record))
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return recorded(tmp_path / "small", Source(BASE, COMMIT, "f" * 64))


def card_of_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the Hub have this card at the base's commit, and nothing else."""
    path = tmp_path / "README.md"
    path.write_text(text, encoding="utf-8")

    def download(repo_id: str, filename: str, *, revision: str | None = None) -> str:
        assert (repo_id, filename, revision) == (BASE, "README.md", COMMIT)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)


def front(text: str) -> Any:
    return yaml.safe_load(text.split("---\n")[1])


def test_licence_and_language_come_from_the_base_at_its_commit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inherited = "license: other\nlicense_name: odd-1.0\nlicense_link: LICENSE.md\nlanguage: [en, no, zh]\n"
    card_of_base(tmp_path, monkeypatch, f"---\n{inherited}tags: [theirs]\nmodel-index: 7\n---\n# Big\n")
    with caplog.at_level(logging.WARNING):
        card = card_text(folder, "me/small")
        back = ModelCard(card.text)
    assert not caplog.records
    assert front(card.text) == {
        "license": "other", "license_name": "odd-1.0",
        "license_link": f"https://huggingface.co/{BASE}/blob/{COMMIT}/LICENSE.md",
        "language": ["en", "no", "zh"], "base_model": BASE, "base_model_relation": "finetune",
        "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["moe", "moe-compressor", "by-hand", "pruned", "expert-pruning"],
    }  # fmt: skip
    assert back.data.to_dict() == front(card.text) and back.content == card.text
    assert mistakes(front(card.text)) == [] and front(card.text)["license"] in LICENCES
    assert f"[{BASE}](https://huggingface.co/{BASE}) (revision {COMMIT})" in card.text
    assert "No licence" not in card.text and f"revision: {COMMIT}" in card.text and "local checkpoint" not in card.text


@pytest.mark.parametrize("text", ["", "# no metadata", "---\n- a\n- list\n---\n", "---\na: [\n---\n", "---\n---\n"])
def test_a_card_without_metadata_gives_nothing(
    text: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card_of_base(tmp_path, monkeypatch, text)
    card = card_text(folder, "me/small")
    assert not {"license", "language"} & set(front(card.text)) and front(card.text)["base_model"] == BASE
    assert "No licence was found" in card.text


def test_without_a_network_or_a_known_architecture_the_card_is_made_all_the_same(folder: Path) -> None:
    text = card_text(folder, "me/small").text
    assert front(text)["base_model"] == BASE
    assert "active" not in text and 'OddModel.from_pretrained("me/small"' in text and "AutoTokenizer" not in text


def test_a_local_base_is_no_repository_but_its_card_gives_the_licence(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "small", Source("big-moe", None, "f" * 64))
    (tmp_path / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage: de\npipeline_tag: image-text-to-text\n---\n"
    )
    header = front(card_text(folder, "me/small", base=tmp_path).text)
    assert "base_model" not in header and "base_model_relation" not in header
    assert (header["license"], header["language"]) == ("apache-2.0", ["de"])
    assert header["pipeline_tag"] == "image-text-to-text"
    assert 'local checkpoint "big-moe"' in card_text(folder, "me/small").text
    assert base_metadata(Plan.from_dict(json.loads((folder / "compression.json").read_text())["plan"]).source) == {}


def test_a_name_that_the_hub_could_not_have_is_no_base(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "small", Source("org/../x y", COMMIT, "f" * 64))
    assert "base_model" not in front(card_text(folder, "me/small").text)


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({}, {}),
        ({"license": ["mit", "apache-2.0"]}, {"license": ["mit", "apache-2.0"]}),
        ({"license": "Our Own\nTerms"}, {"license": "other", "license_name": "Our Own Terms"}),
        ({"license": "other", "license_link": "LICENSE"}, {"license": "other", "license_link": "LICENSE"}),
        ({"license": "llama3.1", "license_link": LINK}, {"license": "llama3.1", "license_link": LINK}),
        ({"license": 7, "license_name": "x"}, {}),
    ],
)
def test_licences_that_the_hub_takes_are_taken(base: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("terms")
    assert licence(base, tmp_path, BASE, COMMIT) == expected


def test_languages_are_codes() -> None:
    assert languages({"language": ["en", False, "zh-Hans"]}) == ["en", "no", "zh-Hans"]
    assert languages({}) is None and languages({"language": "de"}) == ["de"]
