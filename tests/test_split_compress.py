"""`--split` and `--top-k`: the same as splitting first, rebuilt by its plan, and refused where they cannot be."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as drawn
from safetensors.torch import load_file

import compressor
from compressor.errors import CompressionError
from compressor.publishing.card import again as asked_again
from compressor.publishing.card import introduction
from compressor.publishing.facts import read_facts
from compressor.recipe.recipe import make_step, read_recipe
from compressor.steps.split.neurons import order_of_parts, parts_of
from compressor.steps.split.opening import packed, unpacked
from tests import small, zoo
from tests.command_line import Run
from tests.plans import plan_of
from tests.small import tree

pytestmark = pytest.mark.usefixtures("offline")

EXACT = [
    "mixtral",
    "gpt_oss",
    "qwen3_moe",
    "deepseek_v3-n_group1",
    "deepseek_v2-group_limited",
    "llama4_text",
    "qwen3_next",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("home") / "model")


def data(folder: Path) -> dict[str, Any]:
    return {"calibration": str(small.text_file(folder)), "samples": 8, "sequence_length": 32}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize("name", [name for name in EXACT if name in zoo.FAMILIES or "-" in name])
def test_splitting_on_the_way_gives_what_splitting_first_gives(name: str, tmp_path: Path) -> None:
    zoo.save(name, tmp_path / "model")
    made = compressor.compress(str(tmp_path / "model"), tmp_path / "split", [make_step("split", {"parts": 2})])
    experts = made.experts_after
    asked: dict[str, Any] = {"strategy": "model-centric", "ratio": 0.25}
    compressor.compress(str(tmp_path / "split"), tmp_path / "twice", **asked)
    done = compressor.compress(str(tmp_path / "model"), tmp_path / "once", split=2, **asked)
    assert done.experts_before == experts
    once, twice = stored(tmp_path / "once"), stored(tmp_path / "twice")
    assert once.keys() == twice.keys() and all(torch.equal(once[key], twice[key]) for key in once)
    configs = [json.loads((tmp_path / made / "config.json").read_text()) for made in ("once", "twice")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("correct", ["none", "ridge", "tune"])
def test_plan_and_source_rebuild_the_output(correct: str, model: Path, tmp_path: Path, hasty: None) -> None:
    asked = {"ratio": 0.3125, "split": 2, "strategy": "gated-mass", "correct": correct, **data(tmp_path)}
    compressor.compress(str(model), tmp_path / "first", **asked)
    made = plan_of(model, **asked)
    (tmp_path / "plan.json").write_text(made.to_json())
    compressor.apply(tmp_path / "plan.json", tmp_path / "second", model=str(model))
    assert tree(tmp_path / "first") == tree(tmp_path / "second")
    split = made.stage.split
    assert split is not None and split["by"] == "energy" and made.stage.layers[0].experts == 16
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    assert (config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"]) == (11, 4, 12)


def test_top_k_is_written_and_the_correction_is_run_with_it(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    asked = {"experts": 6, "strategy": "gated-mass", "correct": "ridge", "dtype": "float32", **data(tmp_path)}
    done = {top_k: compressor.compress(str(model), tmp_path / str(top_k), top_k=top_k, **asked) for top_k in (1, 2)}
    ids = torch.arange(32)[None] % 50
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    wanted = hidden_after_first(whole, ids)
    for top_k, summary in done.items():
        assert summary.plan.stage.top_k == top_k and summary.plan.stage.layers[0].top_k == top_k
        config = json.loads((tmp_path / str(top_k) / "config.json").read_text())
        assert (config["num_experts_per_tok"], config["num_local_experts"]) == (top_k, 6)
    ones = AutoModelForCausalLM.from_pretrained(tmp_path / "1", dtype=torch.float32)
    twos = AutoModelForCausalLM.from_pretrained(tmp_path / "2", dtype=torch.float32)
    twos.config.num_experts_per_tok = 1
    for layer in twos.model.layers:
        layer.mlp.gate.top_k = 1
    errors = [float((hidden_after_first(each, ids) - wanted).square().mean()) for each in (ones, twos)]
    assert errors[0] < errors[1]  # refitted for one expert, not for two of which one is then left out


def hidden_after_first(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids, output_hidden_states=True).hidden_states[1]
    return found


def test_top_k_alone_is_the_stock_model_with_another_config(model: Path, tmp_path: Path) -> None:
    compressor.compress(str(model), tmp_path / "out", experts=8, top_k=1, strategy="model-centric")
    before, after = stored(model), stored(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_experts_per_tok"] == 1


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--split", 5], "its experts' 24 neurons do not divide into 5 equal parts"),
        (["--split", 65], "--split 65 is not 1 to 64"),
        (["--split", 2, "--split-by", "chance"], "split: by is 'chance'; input should be 'energy' or 'clusters'"),
        (["--split", 2, "--split-by", "clusters"], "--split-by clusters needs text on which neurons fire"),
        (["--split", 2, "--top-k", 5], "--top-k 5 is not between 1 and the 4 experts that a token visits now"),
        (["--top-k", 3], "--top-k 3 is not between 1 and the 2 experts"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    options: list[Any], fault: str, model: Path, tmp_path: Path, run: Run
) -> None:
    done = run("compress", model, "-o", tmp_path / "out", "--experts", 6, "--strategy", "model-centric", *options)
    assert done.status == 2 and fault in done.err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_an_edited_split_is_refused(model: Path, tmp_path: Path) -> None:
    made = plan_of(model, experts=6, split=2, strategy="model-centric").to_dict()
    own = made["steps"][0]["plan"]
    name, told = next(iter(own["neurons"].items()))
    for edit, fault in (
        ({"parts": 3}, "neurons are not dealt out|bytes say where"),
        ({"parts": "two"}, "should be a whole number"),
        ({"output_factor": 1.0}, "says output_factor 1.0, the model asks for 2.0"),
        ({"order_sha256": "0" * 64}, "otherwise than its order_sha256 says"),
        ({"neurons": {**own["neurons"], name: told[:-8]}}, "bytes say where its neurons go"),
        ({"neurons": {**own["neurons"], name: "A" * len(told)}}, "not dealt out to 2 parts of equal size"),
        ({"neurons": {name: 5}}, "should say for each module"),
    ):
        steps = [{**made["steps"][0], "plan": {**own, **edit}}, *made["steps"][1:]]
        (tmp_path / "plan.json").write_text(json.dumps({**made, "steps": steps}))
        with pytest.raises(CompressionError, match=fault):
            compressor.apply(tmp_path / "plan.json", tmp_path / "out", model=str(model))
        assert not (tmp_path / "out").exists()


def test_protected_lists_name_the_experts_of_the_source(model: Path, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps([{"layer": 0, "expert": 7}, {"layer": 1, "expert": 2, "part": 1}]))
    asked = {"experts": 4, "split": 2, "strategy": "gated-mass", "protect": str(tmp_path / "list.json")}
    done = compressor.compress(str(model), tmp_path / "out", **asked, **data(tmp_path))
    assert [*done.plan.stage.protected.values()] == [(14, 15), (5,)]
    split, prune = read_recipe(tmp_path / "out" / "recipe.yaml").steps
    assert split.parts == 2 and prune.experts == 4
    assert [*prune.protect] == [
        {"layer": 0, "expert": 7},
        {"layer": 1, "expert": 2, "part": 1},
    ]


def test_recipe_and_card_make_the_same_again(model: Path, tmp_path: Path, run: Run, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    asked = {"experts": 5, "split": 2, "split_by": "clusters", "top_k": 3, "strategy": "gated-mass"}
    compressor.compress("model", tmp_path / "out", **asked, **data(tmp_path))
    facts = read_facts(tmp_path / "out")
    assert "16 experts in each of its 2 MoE layers, after a split of each of 8 experts into 2 parts" in str(
        introduction(facts)
    )
    said = asked_again(facts.outcome.plan, "again")
    assert said is not None
    recipe, commands = said
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert run(*shlex.split(commands[0])[1:]).status == 0
    assert run("compress", tmp_path / "out" / "recipe.yaml", "-o", "third").status == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "again") == tree(tmp_path / "third")


@given(parts=drawn.integers(2, 9), width=drawn.integers(1, 7), experts=drawn.integers(1, 4), seed=drawn.integers(0, 99))
def test_what_a_plan_says_of_neurons_is_read_back(parts: int, width: int, experts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(parts * width, generator=generator) for _ in range(experts)])
    dealt = parts_of(order, parts)
    for expert, row in enumerate(order.tolist()):
        runs = [row[part * width : (part + 1) * width] for part in range(parts)]
        assert [int(dealt[expert, neuron]) for run in runs for neuron in run] == [
            p for p in range(parts) for _ in runs[p]
        ]
    assert torch.equal(unpacked(packed(dealt, parts), experts, parts * width, parts, "here"), dealt)
    again = order_of_parts(dealt)
    assert torch.equal(parts_of(again, parts), dealt)
    assert all(
        run == sorted(run)
        for row in again.tolist()
        for run in (row[i : i + width] for i in range(0, parts * width, width))
    )
