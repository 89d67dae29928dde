"""Recipes: what a plan's recipe says, and which files are refused in one sentence."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from compressor.errors import CompressionError
from compressor.planning.recipe import read_recipe, recipe_of, refuse_missing
from compressor.planning.request import Request
from compressor.recipe.plan import CompressionPlan, LayerPlan, Source
from compressor.recipe.plan_json import layer_from_dict

SOURCES = [{"source": "/home/me/a.txt", "weight": 0.75}, {"source": "org/data", "weight": 0.25}]


def a_plan(**changes: Any) -> CompressionPlan:
    layers = tuple(_layer(index) for index in (0, 1))
    whole: dict[str, Any] = {
        "source": Source("org/moe", "abc123", "f" * 64), "experts": 2, "strategy": "hc-smoe",
        "options": {"merge": "max"}, "calibration": None, "layers": layers, "seed": 7,
    }  # fmt: skip
    return CompressionPlan(**{**whole, **changes})


def _layer(index: int) -> LayerPlan:
    groups = [{"members": [e], "coefficients": [1.0], "router_coefficients": [1.0]} for e in (0, 2)]
    return layer_from_dict(
        {"module": f"model.layers.{index}.mlp.experts", "layer": index, "experts": 4, "top_k": 1, "groups": groups}
    )


def said(plan: CompressionPlan, model: str = "org/moe") -> dict[str, Any]:
    return dict(yaml.safe_load(recipe_of(plan, model)))


def test_a_plan_without_data_names_no_calibration() -> None:
    assert said(a_plan()) == {
        "model": "org/moe", "revision": "abc123", "experts": 2, "strategy": "hc-smoe", "options": {"merge": "max"},
        "seed": 7, "correct": "none",
    }  # fmt: skip


def test_data_correction_and_protected_experts_are_named_without_folders() -> None:
    asked = {"samples": 32, "sequence_length": 64}
    calibration = {"source": "/home/me/a.txt + org/data", "sources": SOURCES, "asked": asked}
    plan = a_plan(
        source=Source("/home/me/model", None, "f" * 64), calibration=calibration, sequential=True,
        correction={"method": "ridge", "dtype": "float32"}, protected={"model.layers.1.mlp.experts": (0, 2)},
    )  # fmt: skip
    found = said(plan, "model")
    assert "/home" not in recipe_of(plan, "model").decode()
    assert found["calibration"] == ["a.txt=0.75", "org/data=0.25"]
    assert (found["samples"], found["sequence_length"], found["sequential"]) == (32, 64, True)
    assert (found["correct"], found["dtype"], found["model"]) == ("ridge", "float32", "model")
    assert found["protect"] == [{"layer": 1, "expert": 0}, {"layer": 1, "expert": 2}]
    assert "revision" not in found


def test_equal_weights_are_left_out_unless_a_name_looks_weighted() -> None:
    def sources(*named: str) -> Any:
        entries = [{"source": name, "weight": 1 / len(named)} for name in named]
        return said(a_plan(calibration={"source": " + ".join(named), "sources": entries, "asked": {}}))["calibration"]

    assert sources("demo", "org/data") == ["demo", "org/data"]
    assert sources("a=2.txt", "demo") == ["a=2.txt=0.5", "demo=0.5"]


def test_the_plan_of_one_source_says_how_it_was_made() -> None:
    plan = a_plan(calibration={"source": "a", "sources": SOURCES, "asked": {}, "only": "a"})
    assert b"--per-source" in recipe_of(plan, "org/moe").splitlines()[0]


def test_a_recipe_is_read_back_as_the_fields_of_a_request(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(recipe_of(a_plan(), "org/moe"))
    content = read_recipe(path)
    assert (content.pop("model"), content.pop("revision")) == ("org/moe", "abc123")
    assert Request(**content) == Request(
        experts=2, strategy="hc-smoe", options={"merge": "max"}, seed=7, correct="none"
    )


REFUSED: dict[str, tuple[str, str]] = {
    "misspelt": ("sample: 3", "has no field 'sample'; did you mean 'samples'"),
    "with a dash": ("sequence-length: 3", "did you mean 'sequence_length'"),
    "unknown": ("zzz: 3", "has no field 'zzz'; known are model, revision, experts"),
    "no name": ("3: 4", "has no field 3; known are"),
    "text for a number": ("samples: many", "samples is 'many', it should be a whole number"),
    "a fraction": ("experts: 4.5", "experts is 4.5, it should be a whole number"),
    "a switch for a number": ("experts: true", "experts is True, it should be a whole number"),
    "nothing": ("strategy:", "strategy is None, it should be text"),
    "a word that YAML reads as a switch": ("strategy: no", "strategy is False, it should be text"),
    "a number for a switch": ("sequential: 1", "sequential is 1, it should be true or false"),
    "a ratio in words": ("ratio: half", "ratio is 'half', it should be a number"),
    "numbers as sources": ("calibration: [1, 2]", r"calibration is \[1, 2\], it should be text or a list"),
    "options as a list": ("options: [merge]", r"options is \['merge'\], it should be a mapping"),
    "a date": ("options: {when: 2024-01-01}", "options is .* it should be a mapping"),
    "a huge number": (f"seed: {'9' * 400}", "seed is 9+.*, it should be a whole number"),
    "a NUL": ('strategy: "a\\0b"', "strategy is .* it should be text"),
    "an alias": ("options: &a {b: 1}\nprotect: [*a]", "by an alias"),
    "a tag": ("strategy: !!python/object/apply:os.system ['true']", "is not valid YAML"),
    "broken": ("experts: [4", "is not valid YAML"),
    "a list": ("- experts", "should hold a mapping"),
    "empty": ("", "should hold a mapping"),
    "deep": ("options: " + "[" * 3000, "is nested deeper than 100"),
    "endless digits": (f"seed: {'9' * 5000}", "a word of over 4,096 letters"),
    "endless sixties": (f"seed: {'1:' * 3000}1", "a word of over 4,096 letters"),
    "sixties": (f"seed: {'1:' * 2000}1", "seed is .*, it should be a whole number"),
    "endless parts": (f"calibration: [{'a,' * 300_000}]", "has more than 262,144 parts"),
    "an endless maze": ("[" * 900_000, "is nested deeper than 100"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_recipe_is_refused(name: str, tmp_path: Path) -> None:
    text, message = REFUSED[name]
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(CompressionError, match=message):
        read_recipe(tmp_path / "recipe.yaml")


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    with pytest.raises(CompressionError, match="is not a file"):
        read_recipe(path)
    with pytest.raises(CompressionError, match="is not a file"):
        read_recipe(tmp_path)
    path.write_bytes(b"experts: \xff")
    with pytest.raises(CompressionError, match="is not valid YAML"):
        read_recipe(path)
    path.write_text("#" * 1_000_001)
    with pytest.raises(CompressionError, match="larger than 1 MB"):
        read_recipe(path)


def test_what_is_not_here_is_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompressionError, match=r"the model 'gone', which is no folder here; name it as MODEL"):
        refuse_missing(Path("recipe.yaml"), {"model": "gone"})
    for source in ("gone.txt", "gone.txt=2"):
        with pytest.raises(CompressionError, match=r"the text gone\.txt, .*; name it with --calibration"):
            refuse_missing(Path("recipe.yaml"), {"calibration": ["demo", source]})
    (tmp_path / "here.txt").touch()
    refuse_missing(Path("recipe.yaml"), {"model": "org/moe", "calibration": ["here.txt=2", "org/data"]})
    refuse_missing(Path("recipe.yaml"), {"model": "moe", "revision": "abc", "calibration": "here.txt"})
