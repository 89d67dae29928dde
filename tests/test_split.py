"""`split` and `--top-k`: the same function in stock transformers, or a refusal; repeated, killed, rebuilt, misused."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import compressor
from compressor.api import make_recipe
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.hub.card import card_text, recipe_text
from compressor.model.opened import open_model
from compressor.pipeline.compress import possible_counts
from compressor.pipeline.outcome import Outcome, read_plan
from compressor.recipe.recipe import make_step, on_text, read_recipe
from compressor.recipe.step import TextOptions
from compressor.steps.split.view import chosen_parts
from tests.support import small, zoo
from tests.support.command_line import Run
from tests.support.plans import plan_of, recipe_of
from tests.support.small import tensors_of, tree

pytestmark = pytest.mark.usefixtures("offline")

GROUPS = "scores a group of experts by its two best"
SHARED = "sets the width of .* as well as that of the experts"
REFUSED = {  # why, by family
    **dict.fromkeys(
        (
            "beam", "exaone_moe", "mimo_v2_flash", "deepseek_v3", "axk1", "dots1", "glm4_moe", "glm4_moe_lite",
            "solar_open", "mistral4", "axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "dots3_note", "nemotron_h",
            "kimi_linear", "bailing_hybrid", "glm4v_moe", "glm5_next", "mistral_large4", "deepseek_v3-n_group4",
            "hy_v4_vl",
        ),
        GROUPS,
    ),
    **dict.fromkeys(("hunyuan_v1_moe", "deepseek_v4", "jamba", "inkling"), SHARED),
    "phimoe": r"differ by 0\.\d of the largest",  # it chooses two experts one after the other, whatever the top-k
    "zaya": "its router weighs more than the routed experts",
    "muse_spark": "normalises each expert's output",
}  # fmt: skip
VARIANTS = [
    "mixtral-tied", "olmoe-collide", "qwen3_moe-norm_topk_false", "qwen2_moe-mlp_only_layers", "gpt_oss-top4",
    "deepseek_v3-n_group1", "deepseek_v3-n_group4", "deepseek_v2-group_limited", "gemma4-vl",
]  # fmt: skip
EXACT = [
    "mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3-n_group1", "deepseek_v2-group_limited", "llama4_text", "qwen3_next",
]  # fmt: skip
ROUNDING = 2e-6  # of the largest logit


@pytest.mark.parametrize("name", zoo.sweep([*zoo.FAMILIES, *VARIANTS]))
def test_a_split_model_computes_the_same_or_is_refused(name: str, tmp_path: Path) -> None:
    model, out = zoo.save(name, tmp_path / "model"), tmp_path / "out"
    if name in REFUSED:
        with pytest.raises(CompressionError, match=f"cannot be split.*{REFUSED[name]}"):
            split(tmp_path / "model", out, 2)
        assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
        return
    done = split(tmp_path / "model", out, 2)
    assert done.experts_after == 2 * done.experts_before
    after, ids = zoo.reload(name, out), zoo.tokens(model, 3, 24)
    modules = [zoo.experts(each) for each in (model, after)]
    assert modules[0].keys() == modules[1].keys()
    for before, finer in zip(*(each.values() for each in modules), strict=True):
        assert finer.num_experts == 2 * int(before.num_experts)  # type: ignore[arg-type]
        assert finer.down_proj.numel() == before.down_proj.numel()  # type: ignore[union-attr,operator]
    wanted = zoo.logits(model, ids)
    assert float((zoo.logits(after, ids) - wanted).abs().max() / wanted.abs().max()) < ROUNDING


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("home") / "model", shard="60KB")


def split(model: Path, out: Path, parts: int, text: Any = None, **more: Any) -> Outcome:
    step = on_text("prune", {"ratio": 0.0, "split": parts}, text or TextOptions())
    return compressor.compress(str(model), out, [step], **more)


def calibration(folder: Path) -> dict[str, Any]:
    return {"calibration": str(small.text_file(folder)), "samples": 8, "sequence_length": 32}


def data(folder: Path) -> TextOptions:
    return TextOptions(**{"data": str(small.text_file(folder)), "samples": 8, "sequence_length": 32})


@pytest.mark.parametrize("by", ["weights", "energy"])
def test_three_parts_hold_every_neuron_once(by: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked: dict[str, Any] = {} if by == "weights" else {"text": data(tmp_path)}
    split(model, out, 3, **asked)
    record = json.loads((out / "compression.json").read_text())["plan"]["steps"][0]["plan"]["split"]
    assert (record["parts"], record["experts"], record["output_factor"]) == (3, 8, 3.0)
    assert (record["calibration"] is None) == (by == "weights")
    before, after = tensors_of(model), tensors_of(out)
    name = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"
    for expert in range(8):
        rows = {tuple(row.tolist()): number for number, row in enumerate(before[name.format(expert, "w1")])}
        taken = [
            [rows[tuple(row.tolist())] for row in after[name.format(3 * expert + part, "w1")]] for part in range(3)
        ]
        assert sorted(itertools.chain(*taken)) == list(range(24)) and {len(part) for part in taken} == {8}
        for part, neurons in enumerate(taken):
            own = 3 * expert + part
            assert torch.equal(after[name.format(own, "w3")], before[name.format(expert, "w3")][neurons])
            torch.testing.assert_close(
                after[name.format(own, "w2")], 3 * before[name.format(expert, "w2")][:, neurons], rtol=0, atol=0
            )
    router = "model.layers.1.block_sparse_moe.gate.weight"
    assert torch.equal(after[router], before[router].repeat_interleave(3, 0))
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


COMPRESS = ("compress", "--experts", 6, "--strategy", "model-centric")


@pytest.mark.parametrize(
    ("options", "fault", "commands"),
    [
        (("--split", 1), "the recipe has no step that does anything", (("split",),)),
        (("--split", 2, "--calibration", "absent.txt"), "absent.txt", (("split",),)),
        (
            ("--split", 5),
            "24 neurons do not divide into 5 equal parts; give one of 2, 3, 6",
            (("split",), COMPRESS),
        ),
        (("--split", 65), "--split 65 is not 1 to 64", (("split",), COMPRESS)),
        (("--split", 2, "--top-k", 5), "--top-k 5 is not between 1 and the 4 experts that a token", (COMPRESS,)),
        (("--top-k", 3), "--top-k 3 is not between 1 and the 2 experts", (COMPRESS,)),
    ],
)
def test_what_cannot_be_split_so_leaves_nothing(
    options: tuple[Any, ...], fault: str, commands: tuple[tuple[Any, ...], ...], model: Path, tmp_path: Path, run: Run
) -> None:
    for name, *more in commands:
        names = {"--split": "--parts"} if name == "split" else {}
        done = run(name, model, "-o", tmp_path / "out", *more, *(names.get(word, word) for word in options))
        assert done.status == 2 and fault in done.err.splitlines()[-1]
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["pruned", zoo.full("weights"), zoo.full("energy")])
def test_the_card_says_so_and_its_command_makes_the_same_again(
    way: str, model: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    if way == "pruned":
        asked = {"experts": 5, "split": 2, "top_k": 3, "strategy": "gated-mass"}
        compressor.compress("model", tmp_path / "out", **asked, **calibration(tmp_path))
        wanted = "16 experts in each of its 2 MoE layers"
    else:
        split(model, tmp_path / "out", 2, **({} if way == "weights" else {"text": data(tmp_path)}))
        wanted = "All experts of its 2 MoE layers stay; sub-experts compute what theirs do"
    card = card_text(tmp_path / "out", "me/out").text
    assert wanted in card and "- Split: each of 8 experts into 2 parts" in card
    recipe = recipe_text(read_plan(tmp_path / "out"))
    assert recipe is not None
    (tmp_path / "recipe.yaml").write_text(recipe)
    done = run("compress", "recipe.yaml", "-o", "again")
    assert done.status == 0 and (way == "pruned" or "Split each of 8 experts" in done.out)
    assert tree(tmp_path / "out") == tree(tmp_path / "again")
    if way == "pruned":
        assert run("compress", tmp_path / "out" / "recipe.yaml", "-o", "third").status == 0
        assert tree(tmp_path / "out") == tree(tmp_path / "third")


# --- on the way of `compress` -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.sweep(name for name in EXACT if name in zoo.FAMILIES or "-" in name))
def test_splitting_on_the_way_gives_what_splitting_first_gives(name: str, tmp_path: Path) -> None:
    zoo.save(name, tmp_path / "model")
    made = compressor.compress(
        str(tmp_path / "model"), tmp_path / "split", [make_step("prune", {"ratio": 0, "split": 2})]
    )
    experts = made.experts_after
    asked: dict[str, Any] = {"strategy": "model-centric", "ratio": 0.25}
    compressor.compress(str(tmp_path / "split"), tmp_path / "twice", **asked)
    done = compressor.compress(str(tmp_path / "model"), tmp_path / "once", split=2, **asked)
    assert done.experts_before == experts
    once, twice = tensors_of(tmp_path / "once"), tensors_of(tmp_path / "twice")
    assert once.keys() == twice.keys() and all(torch.equal(once[key], twice[key]) for key in once)
    configs = [json.loads((tmp_path / made / "config.json").read_text()) for made in ("once", "twice")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("correct", ["tune", zoo.full("none"), zoo.full("ridge")])
def test_plan_and_source_rebuild_the_output(correct: str, model: Path, tmp_path: Path, hasty: None) -> None:
    asked = {"ratio": 0.3125, "split": 2, "strategy": "gated-mass", "correct": correct, **calibration(tmp_path)}
    compressor.compress(str(model), tmp_path / "first", **asked)
    made = plan_of(model, **asked)
    (tmp_path / "plan.json").write_text(made.to_json())
    compressor.apply(tmp_path / "plan.json", tmp_path / "second", model=str(model))
    assert tree(tmp_path / "first") == tree(tmp_path / "second")
    split = made.split
    assert split is not None and split["calibration"] and made.expert_plan.layers[0].experts == 16
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    assert (config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"]) == (11, 4, 12)


def test_top_k_is_written_and_the_correction_is_run_with_it(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    asked = {"experts": 6, "strategy": "gated-mass", "correct": "ridge", "dtype": "float32", **calibration(tmp_path)}
    done = {top_k: compressor.compress(str(model), tmp_path / str(top_k), top_k=top_k, **asked) for top_k in (1, 2)}
    ids = torch.arange(32)[None] % 50
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    wanted = hidden_after_first(whole, ids)
    for top_k, summary in done.items():
        assert summary.plan.expert_plan.top_k == top_k and summary.plan.expert_plan.layers[0].top_k == top_k
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
    before, after = tensors_of(model), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_experts_per_tok"] == 1


def test_an_edited_split_is_refused(model: Path, tmp_path: Path) -> None:
    made = plan_of(model, experts=6, split=2, strategy="model-centric").to_dict()
    decided = made["steps"][0]["plan"]
    own = decided["split"]
    name, told = next(iter(own["neurons"].items()))
    for edit, fault in (
        ({"parts": 3}, "do not divide into 3|neurons' parts is damaged"),
        ({"parts": "two"}, "the split's parts should be a whole number"),
        ({"parts": 65}, "the split should have 2 to 64 parts"),
        ({"calibration": 3}, "an object or null as calibration"),
        ({"neurons": {**own["neurons"], name: told[:-8]}}, "record of its neurons' parts is damaged"),
        ({"neurons": {name: 5}}, "record of its neurons' parts is damaged"),
    ):
        steps = [{**made["steps"][0], "plan": {**decided, "split": {**own, **edit}}}]
        (tmp_path / "plan.json").write_text(json.dumps({**made, "steps": steps}))
        with pytest.raises(CompressionError, match=fault):
            compressor.apply(tmp_path / "plan.json", tmp_path / "out", model=str(model))
        assert not (tmp_path / "out").exists()


def test_protected_lists_name_the_experts_of_the_source(model: Path, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps([{"layer": 0, "expert": 7}, {"layer": 1, "expert": 2, "part": 1}]))
    asked = {"experts": 4, "split": 2, "strategy": "gated-mass", "protect": str(tmp_path / "list.json")}
    done = compressor.compress(str(model), tmp_path / "out", **asked, **calibration(tmp_path))
    assert [*done.plan.expert_plan.protected.values()] == [(14, 15), (5,)]
    (prune,) = read_recipe(tmp_path / "out" / "recipe.yaml").steps
    assert prune.split == 2 and prune.experts == 4
    assert [*prune.protect] == [{"layer": 0, "expert": 7}, {"layer": 1, "expert": 2, "part": 1}]


# --- where nobody says how often --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("wide") / "model", intermediate_size=512)


def chosen(model: Path, **asked: Any) -> tuple[int, str]:
    (prune,) = recipe_of(model, **asked).steps
    assert isinstance(prune, compressor.Prune)
    return chosen_parts(open_model(locate(str(model))), prune)


@pytest.mark.parametrize("parts", [zoo.full("auto"), 1, 2, zoo.full(4)])
@pytest.mark.parametrize("again", [True, zoo.full(False)])
def test_experts_count_those_of_the_source(parts: Any, again: bool, wide: Path, tmp_path: Path) -> None:
    asked = calibration(tmp_path)
    steps = [make_step("prune", {"split": parts, "experts": 6 if again else 4})]
    steps += [make_step("prune", {"experts": 4})] * again
    compressor.compress(str(wide), tmp_path / "out", steps, **asked)
    config, count = json.loads((tmp_path / "out" / "config.json").read_text()), 2 if parts == "auto" else parts
    assert (config["num_local_experts"], config["intermediate_size"]) == (4 * count, 512 // count)
    assert config["num_experts_per_tok"] == 2 * count
    before, after = tensors_of(wide), tensors_of(tmp_path / "out")
    weights = [sum(value.numel() for name, value in each.items() if ".experts." in name) for each in (before, after)]
    assert 2 * weights[1] == weights[0]


@pytest.mark.parametrize("parts", ["auto", 1, 2, 4])
def test_a_search_tries_experts_of_the_source(parts: Any, wide: Path) -> None:
    steps = [make_step("prune", {"split": parts})]
    for recipe in (steps, [make_step("routers", {}), *steps]):
        assert possible_counts(open_model(locate(str(wide))), make_recipe(str(wide), recipe)) == [2, 3, 4, 5, 6, 7]


def test_auto_takes_the_first_number_of_parts_that_suits(wide: Path, tmp_path: Path, run: Run) -> None:
    assert chosen(wide, experts=4) == chosen(wide, ratio=0.5) == chosen(wide)  # the last one is searched for
    assert chosen(wide, experts=4)[0] == 2
    assert chosen(wide, experts=4, strategy="gated-mass") == (1, "")
    assert chosen(wide, experts=99) == (1, "")  # which is refused afterwards
    assert chosen(wide, experts=4, top_k=1) == (1, "--top-k counts whole experts")
    qwen = small.save(tmp_path / "qwen", "qwen3_moe", moe_intermediate_size=768)  # as of Qwen3-30B-A3B
    assert chosen(qwen, experts=6)[0] == 2
    odd = small.save(tmp_path / "odd", intermediate_size=192)
    parts, why = chosen(odd, experts=6)
    assert parts == 3 and "192 neurons do not make 2 parts of a multiple of 64; it loses less" in why
    grouped = small.save(tmp_path / "grouped", "deepseek_v3", moe_intermediate_size=512)
    parts, why = chosen(grouped, experts=8)
    assert parts == 1 and GROUPS in why


@pytest.mark.full
@pytest.mark.parametrize("width", [512, 96])
def test_what_auto_decided_is_said_once_and_recorded(width: int, tmp_path: Path, run: Run) -> None:
    model, text = small.save(tmp_path / "model", intermediate_size=width), small.text_file(tmp_path)
    said = "Experts stay whole: 96 neurons do not make 2, 3 or 4 parts of a multiple of 64.\n"
    if width == 512:
        said = "Split each of 8 experts into 2 parts: num_experts 8 to 16, num_experts_per_tok 2 to 4, width 512 to 256"
    done = run("compress", model, "-o", tmp_path / "out", "--experts", 4, "--calibration", text, "--samples", 8)
    assert done.status == 0 and done.out.count("Split each of 8 experts into 2 parts" if width == 512 else said) == 1
    kept = "Keep 8 of 16 sub-experts in each layer, as large as 4 of 8 experts."
    assert done.out.count(kept) == int(width == 512)
    entry = json.loads((tmp_path / "out" / "compression.json").read_text())["plan"]["steps"][0]
    assert entry["plan"]["split"]["why"] in done.out and "into 2 parts" not in done.err
    assert run("compress", tmp_path / "out" / "recipe.yaml", "-o", tmp_path / "again").status == 0
    first, again = (tensors_of(tmp_path / name) for name in ("out", "again"))
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)


def test_a_pruned_output_is_split_and_pruned_again(tmp_path: Path) -> None:
    folder = small.save(tmp_path / "in", "qwen3_moe")
    fewer = compressor.Prune(strategy="aimer", experts=6)
    text = {"calibration": str(small.text_file(tmp_path)), "samples": 16, "sequence_length": 32}
    compressor.compress(str(folder), tmp_path / "first", [fewer], **text)
    steps = [compressor.Prune(strategy="aimer", experts=4, split=2)]
    outcome = compressor.compress(str(tmp_path / "first"), tmp_path / "out", steps, **text)
    assert {len(layer.groups) for layer in outcome.plan.expert_plan.layers} == {8}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_experts == 8
