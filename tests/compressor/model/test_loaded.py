"""A model in memory gives the bytes of its folder, computes with its own tensors where it is, and stays as it is."""

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import compressor
from compressor import CompressionError
from compressor.model.tokenizer import load_tokenizer
from compressor.recipe.recipe import on_text
from compressor.recipe.step import TextOptions
from tests.support import small
from tests.support.small import tensors_of

pytestmark = pytest.mark.usefixtures("offline", "hasty")

SIZES: dict[str, Any] = {"samples": 8, "sequence_length": 32}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in one.items()
    )


FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
FAST = [("mixtral", "tune"), ("deepseek_v3", "none")]
CASES = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.full) for case in product(FAMILIES, ("none", "tune"))
]


@pytest.mark.parametrize(("family", "correct"), CASES)
def test_the_weights_are_those_of_its_folder(family: str, correct: str, tmp_path: Path) -> None:
    folder, text = small.save(tmp_path / "model", family), small.text_file(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if family == "mixtral":  # of all others the stored dtype is the model's
        model.save_pretrained(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    before, config = copy.deepcopy(model.state_dict()), copy.deepcopy(model.config.to_dict())
    asked = {"ratio": 0.25, "strategy": "count-guided", "correct": correct, "calibration": str(text), **SIZES}
    compressor.compress(folder, tmp_path / "of folder", **asked)
    outcome = compressor.compress(model, tmp_path / "of model", tokenizer=small.tokenizer(), **asked)
    assert same(tensors_of(tmp_path / "of folder"), tensors_of(tmp_path / "of model"))
    assert same(dict(model.state_dict()), before) and model.config.to_dict() == config
    assert all(value.requires_grad for value in model.parameters()) and not model.training
    assert Path(outcome.plan.source.model).name == "model" and outcome.expert_plan.experts < outcome.experts_before
    AutoModelForCausalLM.from_pretrained(tmp_path / "of model")
    assert load_tokenizer(tmp_path / "of model").get_vocab() == small.tokenizer().get_vocab()


def test_a_model_that_was_changed_in_memory_is_another_one(tmp_path: Path) -> None:
    folder, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    out = tmp_path / "out"

    def compress(overwrite: bool = False) -> dict[str, torch.Tensor]:
        compressor.compress(
            model, out, tokenizer=small.tokenizer(), experts=4, correct="none", calibration=str(text),
            overwrite=overwrite, **SIZES,
        )  # fmt: skip
        return tensors_of(out)

    first, written = compress(), (out / "model.safetensors").stat().st_ino
    assert same(compress(), first)
    assert (out / "model.safetensors").stat().st_ino == written, "an equal model in memory was compressed twice"
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)  # no router, whose bytes every fingerprint holds
    with pytest.raises(CompressionError, match="--overwrite"):
        compress()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(compress(overwrite=True)[name], 2 * first[name])


def test_every_function_takes_it(tmp_path: Path) -> None:
    folder, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    model, more = AutoModelForCausalLM.from_pretrained(folder), {"tokenizer": small.tokenizer()}
    folder.rename(tmp_path / "away")  # nothing is read from there any more
    smaller = compressor.compress(model, tmp_path / "one", experts=4, correct="none", calibration=str(text), **more)
    again = compressor.apply(smaller.plan, tmp_path / "two", model=model, **more)
    assert same(tensors_of(Path(smaller.out)), tensors_of(Path(again.out)))
    options = compressor.compare(
        model, experts=[4], strategies=["reap"], corrections=["none"], random_seeds=1, evaluation_samples=4,
        calibration=str(text), **more,
    )  # fmt: skip
    senders = compressor.attribute(model, calibration=str(text), **more)
    assert options.rows and senders.senders
    step = on_text("prune", {"ratio": 0.0, "split": 2}, TextOptions(data=(str(text),), **SIZES))
    split = compressor.compress(model, tmp_path / "split", [step], **more)
    assert split.experts_after == 2 * split.experts_before


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(small.save(tmp_path / "model"))
    with pytest.raises(CompressionError, match="a Linear is no model of transformers"):
        compressor.compress(torch.nn.Linear(2, 2), tmp_path / "out", tokenizer=small.tokenizer(), experts=4)  # type: ignore[arg-type]
    with pytest.raises(CompressionError, match="pass tokenizer="):
        compressor.compress(model, tmp_path / "out", experts=4)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(CompressionError, match="holds NaN"):
        compressor.compress(model, tmp_path / "out", tokenizer=small.tokenizer(), experts=4, calibration="demo")
    assert not (tmp_path / "out").exists()
