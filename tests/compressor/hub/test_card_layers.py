import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st

from compressor.formatting import joined, label, one_line, ranges, without_paths
from compressor.hub.card import base_metadata, card_text, licence
from compressor.model.moe_layer import MoeLayer
from compressor.recipe.plan import Group, LayerPlan, Source
from compressor.recipe.steps_plan import Plan
from compressor.records import readable_json
from compressor.steps.dispositions import experts_table
from tests.support.hub.cards import LICENCES, mistakes
from tests.support.plans import Decided, by_hand


def group(members: list[int], scale: float = 1.0) -> Group:
    shares = (1 / len(members),) * len(members)
    return Group(tuple(members), shares, shares, scale)


def moe_layer(index: int, experts: int) -> MoeLayer:
    name = f"model.layers.{index}.mlp"
    return MoeLayer(
        f"{name}.experts", name, f"{name}.gate", f"model.layers.{index}", index, experts, 2, 1, 1,
    )  # fmt: skip


def a_plan(layers: list[LayerPlan]) -> Decided:
    source = Source("model", None, "f" * 64)
    return Decided(source, len(layers[0].groups), "by-hand", {}, None, tuple(layers))


def read_ranges(text: str) -> list[int]:
    """'0-2,5' -> [0, 1, 2, 5]."""
    if text == "-":
        return []
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [number for each in ends for number in range(each[0], each[-1] + 1)]


@given(st.integers(2, 20), st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=4))
def test_the_table_parses_back_to_the_plan(kept: int, sizes: list[tuple[int, bool]]) -> None:
    """Layers of which every third expert is merged with another, rescaled or not, and the last ones are dropped."""
    layers = []
    for index, (lost, is_rescaled) in enumerate(sizes):
        members = [[slot] if slot % 3 else [slot, kept + slot // 3] for slot in range(kept)]
        groups = [group(each, 0.5 if is_rescaled and each[0] == 1 else 1.0) for each in members]
        experts = kept + (kept + 2) // 3 + lost
        layers.append(LayerPlan.of(moe_layer(index, experts), groups, decided_by=f"by {index}\n"))
    plan = a_plan(layers)
    table = experts_table(plan)
    assert table.columns == ("layer", "experts", "kept", "merged", "dropped", "decided by")
    for layer, row in zip(plan.layers, table.rows, strict=True):
        number, counts, stay, merged, dropped, decided = map(str, row)
        assert (counts, decided) == (f"{layer.experts} → {len(layer.groups)}", f"by {number}")
        changed = [] if merged == "-" else [[int(each) for each in part.split("+")] for part in merged.split(", ")]
        found = [([expert], True) for expert in read_ranges(stay)] + [(members, False) for members in changed]
        assert sorted(found) == sorted((sorted(each.members), each.untouched) for each in layer.groups)
        assert (int(number), read_ranges(dropped)) == (layer.layer, list(layer.dropped))


@given(st.sets(st.integers(0, 60)))
def test_ranges_are_as_short_as_runs(numbers: set[int]) -> None:
    text = ranges(numbers)
    assert read_ranges(text) == sorted(numbers)
    runs = sum(number - 1 not in numbers for number in numbers)
    assert text == "-" or text.count(",") == runs - 1


def kept(layers: int) -> tuple[LayerPlan, ...]:
    return tuple(LayerPlan.keep(moe_layer(index, 8), range(4)) for index in range(layers))


def test_corrections_are_told_as_they_were_recorded() -> None:
    corrections = [
        {"kept": "tune", "heldout_error": 0.0145321, "heldout_error_before": 0.114467},
        {"kept": "none", "heldout_error": 0.2, "heldout_error_before": 0.2},
        {"kept": "none", "reason": "no calibration token reached the layer"},
    ]
    told = [replace(layer, figures={"correction": each}) for layer, each in zip(kept(3), corrections, strict=True)]
    table = experts_table(a_plan(told))
    assert table.columns[-1] == "held-out error"
    assert [row[-1] for row in table.rows] == ["0.1145 to 0.01453 (tune)", "0.2, not corrected", "-"]


def test_layers_with_several_modules_are_told_apart_by_name() -> None:
    first, second = kept(2)
    plan = a_plan([first, replace(second, layer=0)])
    assert [row[0] for row in experts_table(plan).rows] == [f"0 ({layer.module})" for layer in plan.layers]


def test_names_lose_their_folders_and_nothing_else() -> None:
    for name, expected in {
        "org/model": "org/model", "allenai/c4:en": "allenai/c4:en", "demo": "demo", "model": "model",
        "/home/me/models/mine": "mine", "/home/me/models/mine/": "mine", "~/texts": "texts", "../up/mine": "mine",
        "data/texts.jsonl#body": "texts.jsonl#body", "C:\\Users\\me\\texts.txt": "texts.txt", "file:///home/me/a": "a",
    }.items():  # fmt: skip
        assert label(name) == expected
    command = (
        "moe-compress compress /home/me/big -o ~/out/small --calibration data/private/a.txt=0.5 \\\n"
        "--calibration=/srv/b.jsonl=0.5 --calibration allenai/c4 --calibration d/c.parquet "
        "--protect '/home/my name/h.json' org/model\n"
        "moe-compress apply ../plan.json"
    )
    assert without_paths(command) == (
        "moe-compress compress big -o small --calibration a.txt=0.5 --calibration=b.jsonl=0.5 --calibration allenai/c4 "
        "--calibration c.parquet --protect h.json org/model\nmoe-compress apply plan.json"
    )
    assert "home" not in without_paths("moe-compress inspect /home/me/it 'without an end")


def test_words_are_joined_and_names_stay_on_one_line() -> None:
    assert [joined(words) for words in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]
    assert one_line("a\n\u202e|b\x00`c`") == "a |b `c`"
    assert len(one_line("y" * 10**6)) < 400


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
        "experts": {"before": 8, "after": 3}, "left_out": [], "zeroed_fields": [], "config_fields": {}, "versions": {},
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
    inherited = "license: other\nlicense_name: odd-1.0\nlicense_link: LICENSE.md\nlanguage: [en, no, zh-Hans]\n"
    card_of_base(tmp_path, monkeypatch, f"---\n{inherited}tags: [theirs]\nmodel-index: 7\n---\n# Big\n")
    with caplog.at_level(logging.WARNING):
        card = card_text(folder, "me/small")
        back = ModelCard(card.text)
    assert not caplog.records
    assert front(card.text) == {
        "license": "other", "license_name": "odd-1.0",
        "license_link": f"https://huggingface.co/{BASE}/blob/{COMMIT}/LICENSE.md",
        "language": ["en", "no", "zh-Hans"], "base_model": BASE, "base_model_relation": "finetune",
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
        ({"license": "Apache-2.0"}, {"license": "apache-2.0"}),
        ({"license": ["MIT", "Apache License 2.0"]}, {"license": ["mit", "apache-2.0"]}),
        ({"license": "tongyi-qianwen"}, {"license": "other", "license_name": "tongyi-qianwen"}),
        ({"license": ["mit", "Our Terms"]}, {"license": ["mit", "other"], "license_name": "Our Terms"}),
        ({"license": ["mit", 7]}, {}),
    ],
)
def test_licences_that_the_hub_takes_are_taken(base: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("terms")
    assert licence(base, tmp_path, BASE, COMMIT) == expected


SPELLINGS = {  # SPDX's, and names written out
    "apache-2.0": ("Apache-2.0", "Apache License 2.0", "Apache License, Version 2.0", "apache 2"),
    "mit": ("MIT", "The MIT License", "MIT licence"),
    "gpl-3.0": ("GPL-3.0-only", "GPL-3.0-or-later", "GPL-3.0+", "GPLv3", "GNU General Public License v3.0"),
    "lgpl-2.1": ("LGPL-2.1-or-later", "GNU Lesser General Public License v2.1"),
    "agpl-3.0": ("AGPL-3.0-only", "GNU Affero General Public License v3"),
    "cc-by-nc-sa-4.0": ("CC-BY-NC-SA-4.0", "Creative Commons Attribution-NonCommercial-ShareAlike 4.0 International"),
    "cc0-1.0": ("CC0-1.0", "CC0 1.0 Universal"),
    "bsd-3-clause": ("BSD-3-Clause", "BSD 3-Clause License"),
    "unlicense": ("Unlicense", "The Unlicense"),
    "odbl": ("ODbL-1.0",),
    "llama3.1": ("Llama 3.1 Community License",),
}


def test_every_spelling_becomes_the_hubs_own() -> None:
    def listed(name: str) -> Any:
        return licence({"license": name}, Path(), None, None).get("license")

    assert {name: listed(name) for name in LICENCES} == {name: name for name in LICENCES}
    for expected, spellings in SPELLINGS.items():
        assert {listed(spelling) for spelling in spellings} == {expected}
    assert set(map(listed, ("Apache-1.1", "modified-mit", "GFDL-1.3-only", "Our Own Terms"))) == {"other"}
    assert listed("") is None
