"""`split`: the same function in stock transformers, or a refusal; repeated, killed, pruned afterwards, and misused."""

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import compressor
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.opened import open_model
from compressor.model.verification import verify_checkpoint
from compressor.pipeline.outcome import Outcome
from compressor.progress import Silent
from compressor.publishing.card import again as asked_again
from compressor.publishing.card import introduction
from compressor.publishing.facts import read_facts
from compressor.recipe.step import TextOptions
from compressor.steps.split.opening import resolved_parts
from tests import quantized, small, zoo
from tests.command_line import Run
from tests.plans import recipe_of
from tests.small import tree

pytestmark = pytest.mark.usefixtures("offline")

GROUPS = "scores a group of experts by its two best"
SHARED = "sets the width of .* as well as that of the experts"
REFUSED = {  # why, by family
    **dict.fromkeys(
        (
            "beam", "exaone_moe", "mimo_v2_flash", "deepseek_v3", "axk1", "dots1", "glm4_moe", "glm4_moe_lite",
            "solar_open", "mistral4", "axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "dots3_note", "nemotron_h",
            "kimi_linear", "bailing_hybrid", "glm4v_moe", "glm5_next", "mistral_large4", "deepseek_v3-n_group4",
        ),
        GROUPS,
    ),
    **dict.fromkeys(("hunyuan_v1_moe", "deepseek_v4", "jamba", "inkling"), SHARED),
    "phimoe": r"differ by 0\.\d of the largest",  # it chooses two experts one after the other, whatever the top-k
    "zaya": "its router weighs more than the routed experts",
    "muse_spark": "normalises what each expert puts out",
}  # fmt: skip
VARIANTS = [
    "mixtral-tied", "olmoe-collide", "qwen3_moe-norm_topk_false", "qwen2_moe-mlp_only_layers", "gpt_oss-top4",
    "deepseek_v3-n_group1", "deepseek_v3-n_group4", "deepseek_v2-group_limited", "gemma4-vl",
]  # fmt: skip
ROUNDING = 2e-6  # of the largest logit


@pytest.mark.parametrize("name", [*zoo.FAMILIES, *VARIANTS])
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


def split(model: Path, out: Path, parts: int, by: str = "energy", text: Any = None, **more: Any) -> Outcome:
    options = {"parts": parts, "by": by}
    return compressor.change("split", str(model), out, options=options, text=text or TextOptions(), **more)


def data(folder: Path) -> TextOptions:
    return TextOptions(**{"data": str(small.text_file(folder)), "samples": 8, "sequence_length": 32})


@pytest.mark.parametrize("by", ["weights", "energy", "clusters"])
def test_three_parts_hold_every_neuron_once(by: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked: dict[str, Any] = {} if by == "weights" else {"by": by, "text": data(tmp_path)}
    split(model, out, 3, **asked)
    record = json.loads((out / "compression.json").read_text())["plan"]["steps"][0]["plan"]
    assert (record["parts"], record["by"], record["experts"], record["output_factor"]) == (3, by, 8, 3.0)
    assert (record["calibration"] is None) == (by == "weights")
    before, after = stored(model), stored(out)
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


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


class Killed(Silent):
    """Raises what a key raises when so many layers have been written."""

    def __init__(self, layers: int) -> None:
        self.left, self.writing = layers, False

    def start(self, phase: str, total: int) -> None:
        self.writing = phase == "write"

    def advance(self, detail: str) -> None:
        self.left -= self.writing
        if self.left < 0:
            raise KeyboardInterrupt


def test_repeated_and_interrupted_runs_leave_the_same_bytes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"text": data(tmp_path)}
    first, second = tmp_path / "first", tmp_path / "second"
    split(model, first, 2, **asked)
    written = [path.stat().st_mtime_ns for path in sorted(first.iterdir())]
    split(model, first, 2, **asked)  # is in place already
    assert written == [path.stat().st_mtime_ns for path in sorted(first.iterdir())]
    with pytest.raises(KeyboardInterrupt):
        split(model, second, 2, progress=Killed(1), **asked)
    assert not second.exists()
    monkeypatch.setattr("compressor.steps.split.opening.measured", lambda *_: pytest.fail("neurons are measured twice"))
    split(model, second, 2, **asked)
    assert tree(first) == tree(second)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["first", "second"]


def test_a_split_model_is_pruned_like_any_other(model: Path, tmp_path: Path) -> None:
    split(model, tmp_path / "split", 2)
    made = compressor.compress(str(tmp_path / "split"), tmp_path / "out", strategy="model-centric", experts=12)
    assert (made.experts_before, made.experts_after) == (16, 12)
    verify_checkpoint(tmp_path / "out", 12)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"]) == (12, 4, 12)


def test_a_quantised_model_whose_blocks_are_torn_apart_is_split_in_a_plain_dtype(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quantized.save_fp8(tmp_path / "model", sizes={"moe_intermediate_size": 48})  # parts of one block and a half
    split(tmp_path / "model", tmp_path / "out", 2, dtype="float32")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    plain, finer = quantized.plain_model(tmp_path / "model"), AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert finer.dtype == torch.bfloat16
    wanted, found = (zoo.logits(each.float().eval(), zoo.tokens(plain)) for each in (plain, finer))
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 2e-2  # plain weights rounded to bfloat16


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--split", 1], "the recipe has no step that does anything"),
        (["--split", 5], "its experts' 24 neurons do not divide into 5 equal parts; give one of 2, 3, 4, 6, 8, 12, 24"),
        (["--split", 48], "do not divide into 48 equal parts"),
        (["--split", 2, "--split-by", "clusters"], "--split-by clusters needs text on which neurons fire"),
        (["--split", 2, "--split-by", "chance"], "split: by is 'chance'; input should be 'energy' or 'clusters'"),
        (["--split", 2, "--calibration", "absent.txt"], "absent.txt"),
    ],
)
def test_what_cannot_be_split_so_leaves_nothing(
    options: list[Any], fault: str, model: Path, tmp_path: Path, run: Run
) -> None:
    done = run("split", model, "-o", tmp_path / "out", *options)
    assert done.status == 2 and fault in done.err and len(done.err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_it_did(model: Path, tmp_path: Path, run: Run) -> None:
    done = run("split", model, "-o", tmp_path / "out", "--split", 2)
    assert done.status == 0
    assert "split each of 8 experts" in done.out
    assert done.status == 0
    again = run("split", model, "-o", model / "inside", "--split", 2)
    assert again.status == 2 and "lies in the source checkpoint" in again.err


def test_a_plan_of_a_split_makes_the_same_again(model: Path, tmp_path: Path) -> None:
    split(model, tmp_path / "split", 2, text=data(tmp_path))
    plan = json.loads((tmp_path / "split" / "compression.json").read_text())["plan"]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    compressor.apply(tmp_path / "plan.json", tmp_path / "out", model=str(model))
    assert weights(tmp_path / "split") == weights(tmp_path / "out")


def weights(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in tree(folder).items() if name.endswith(".safetensors")}


@pytest.mark.parametrize("by", ["weights", "clusters"])
def test_the_card_says_so_and_its_command_makes_the_same_again(
    by: str, model: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {} if by == "weights" else {"by": by, "text": data(tmp_path)}
    split(model, tmp_path / "split", 2, **asked)
    facts = read_facts(tmp_path / "split")
    text = str(introduction(facts))
    assert "of which all experts stay, after a split of each of 8 experts into 2 parts" in text
    said = asked_again(facts.outcome.plan, "again")
    assert said is not None
    recipe, commands = said
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert run(*shlex.split(commands[0])[1:]).status == 0
    assert tree(tmp_path / "split") == tree(tmp_path / "again")


# --- where nobody says how often --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("wide") / "model", intermediate_size=512)


def parts(model: Path, **asked: Any) -> int:
    steps = recipe_of(model, **asked).steps
    return resolved_parts(steps[0], open_model(locate(str(model))), steps)  # type: ignore[arg-type]


def test_auto_keeps_as_many_experts_as_whole_ones_would_weigh(wide: Path, tmp_path: Path) -> None:
    asked = {"calibration": str(small.text_file(tmp_path)), "samples": 8, "sequence_length": 32, "correct": "none"}
    done = compressor.compress(str(wide), tmp_path / "out", experts=4, **asked)
    assert (done.experts_before, done.experts_after) == (16, 8)
    compressor.compress(str(wide), tmp_path / "said", experts=4, split=2, **asked)
    assert tree(tmp_path / "out") == tree(tmp_path / "said")
    whole = compressor.compress(str(wide), tmp_path / "whole", experts=4, split=1, **asked)
    assert (whole.experts_before, whole.experts_after) == (8, 4)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert (config["num_local_experts"], config["intermediate_size"]) == (4, 512)
    sizes = [sum(path.stat().st_size for path in (tmp_path / made).glob("*.safetensors")) for made in ("out", "whole")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def test_it_is_left_to_what_suits(wide: Path, tmp_path: Path) -> None:
    assert parts(wide, experts=4) == 2
    assert parts(wide, ratio=0.5) == 2
    assert parts(wide) == 2  # a search for the number
    assert parts(wide, experts=4, split=1) == 1
    assert parts(wide, experts=4, strategy="gated-mass") == 1
    assert parts(wide, experts=4, top_k=1) == 1
    assert parts(wide, experts=99) == 1  # which is refused afterwards
    narrow = small.save(tmp_path / "narrow", intermediate_size=256)  # parts of 128 are larger as K-quants
    assert parts(narrow, experts=4) == 1
    grouped = small.save(tmp_path / "grouped", "deepseek_v3", moe_intermediate_size=512)
    assert parts(grouped, experts=8) == 1
