"""A model that stays on its device: the same bytes as layer by layer, each layer read once, where it fits."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import compressor
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.opened import fits, memory_budget, open_alike, open_model
from compressor.model.streaming import Pass
from compressor.recipe.recipe import read_recipe
from tests.support import small, zoo
from tests.support.command_line import Run
from tests.support.fake_device import DISTILL, ROUTERS
from tests.support.opened_models import logits
from tests.support.quantized import save_fp8
from tests.support.small import tree

pytestmark = pytest.mark.usefixtures("offline", "hasty")

SIZES = {"samples": 8, "sequence_length": 32, "device": "cpu"}


def quantised(folder: Path) -> Path:
    save_fp8(folder, sizes={"vocab_size": small.VOCABULARY})
    small.tokenizer().save_pretrained(folder)
    return folder


CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "drop and tune": (small.save, {"ratio": 0.25, "strategy": "count-guided", "correct": "tune"}),
    "split": (small.save, {"ratio": 0.25, "strategy": "auto", "split": 2, "correct": "ridge"}),
    "quantised": (quantised, {"ratio": 0.25, "strategy": "count-guided", "correct": "tune"}),
    "whole steps": (small.save, {"ratio": 0.25, "distill": DISTILL, "routers": ROUTERS}),
}


@pytest.mark.parametrize("case", ["drop and tune", *map(zoo.full, [*CASES][1:])])
def test_the_bytes_are_those_of_a_streamed_run(case: str, tmp_path: Path) -> None:
    save, options = CASES[case]
    model, text = save(tmp_path / "model"), small.text_file(tmp_path, 4 * small.TEXT)
    for resident in ("yes", "no"):
        asked = {"resident": resident, "calibration": str(text), **SIZES, **options}
        compressor.compress(str(model), tmp_path / resident, **asked)
    assert tree(tmp_path / "yes") == tree(tmp_path / "no")


def test_a_model_that_stays_is_read_once(tmp_path: Path) -> None:
    source, ids = locate(str(small.save(tmp_path / "model"))), [torch.ones(1, 8, dtype=torch.long)]
    models = {resident: open_model(source, "float32", "cpu", resident) for resident in ("yes", "no")}
    first = {resident: logits(Pass(model, ids, to_end=True))[0] for resident, model in models.items()}
    assert torch.equal(first["yes"], first["no"])
    (tmp_path / "model").rename(tmp_path / "away")
    assert torch.equal(logits(Pass(models["yes"], ids, to_end=True))[0], first["yes"])
    with pytest.raises((OSError, CompressionError)):
        Pass(models["no"], ids, to_end=True).run()


def test_a_model_stays_where_it_fits(tmp_path: Path) -> None:
    source = locate(str(small.save(tmp_path)))
    for resident, stays in (("auto", True), ("yes", True), ("no", False)):
        model = open_model(source, resident=resident)
        assert model.partial.resident is stays and open_alike(source, model).partial.resident is stays
    budget = int(memory_budget(model.partial.device) or 0)
    assert fits(model) and fits(model, budget // 2) and not fits(model, 2 * budget)
    with pytest.raises(CompressionError, match="'maybe' is not known; give auto, yes or no"):
        open_model(source, resident="maybe")


@pytest.mark.parametrize(("resident", "message"), [
    ("auto", r"keeping [\d.]+ kB on cpu"), ("no", r"one layer at a time on cpu: [\d.]+ kB, .* free"),
])  # fmt: skip
def test_the_run_says_once_where_the_model_is(resident: str, message: str, tmp_path: Path, run: Run) -> None:
    model, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    ask = ("plan", model, "-o", tmp_path / "plan.json", "--experts", 4, "--strategy", "reap", "--calibration", text)
    ask = (*ask, "--samples", 8, "--sequence-length", 32, "--device", "cpu", "--resident", resident)
    lines = run(*ask).err.splitlines()
    assert [bool(re.fullmatch(message, line)) for line in lines[:2]] == [True, False]
    assert lines[1].startswith("calibrate and plan"), lines
    assert run(*ask, "--overwrite", "--json").err == ""


def test_a_run_goes_on_with_another_residency(tmp_path: Path) -> None:
    model, text, written = small.save(tmp_path / "model"), small.text_file(tmp_path), set[int]()
    for resident in ("yes", "no"):
        compressor.compress(
            str(model), tmp_path / "out", experts=4, correct="none", calibration=str(text), resident=resident,
            **SIZES,
        )  # fmt: skip
        written.add((tmp_path / "out" / "model.safetensors").stat().st_ino)
    assert len(written) == 1, "the output that was in place was made again"


def test_yes_and_no_of_yaml(tmp_path: Path) -> None:
    for word in ("yes", "no", "auto"):
        (tmp_path / "recipe.yaml").write_text(f"model: here\nresident: {word}\n")
        assert read_recipe(tmp_path / "recipe.yaml").resident == word
