"""A model that stays on its device: the same bytes as layer by layer, each layer read once, where it fits."""

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import compressor
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.formatting import human_bytes
from compressor.model import loading, opened
from compressor.model.loading import PartialModel
from compressor.model.opened import open_alike, open_model
from compressor.model.streaming import Pass
from compressor.recipe.recipe import Recipe, read_recipe
from tests.support import small, zoo
from tests.support.command_line import Run
from tests.support.fake_device import DISTILL, ROUTERS
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
    model, text, kept = save(tmp_path / "model"), small.text_file(tmp_path, 4 * small.TEXT), list[PartialModel]()
    made = PartialModel.__init__

    def noted(partial: PartialModel, *arguments: Any) -> None:
        made(partial, *arguments)
        kept.append(partial)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialModel, "__init__", noted)
        patch.setattr(PartialModel, "stream", lambda partial: None)
        for resident in ("yes", "no"):
            compressor.compress(
                str(model), tmp_path / resident, resident=resident, calibration=str(text), **SIZES, **options
            )
    assert tree(tmp_path / "yes") == tree(tmp_path / "no")
    found = [partial for partial in kept if partial.kept and partial.checkpoint.folder == model]
    assert found and all(partial.resident for partial in found)
    for partial in found:  # nobody has written into what is kept
        own, fresh = dict(partial.kept), PartialModel(partial.checkpoint, partial.config, partial.dtype, partial.device)
        for key, value in own.items():
            fresh.load([key])
            torch.testing.assert_close(value, fresh.model.state_dict()[key], rtol=0, atol=0, equal_nan=True)


def test_each_layer_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(locate(str(small.save(tmp_path))), "float32", "cpu", "yes")
    stream = open_model(locate(str(tmp_path)), "float32", "cpu")
    read, real = Counter[str](), loading.load_converted

    def counting(whole: Any, tensors: dict[str, torch.Tensor], *more: Any, **named: Any) -> Any:
        read.update([*tensors])
        return real(whole, tensors, *more, **named)

    monkeypatch.setattr(loading, "load_converted", counting)
    for each, times in ((model, 1), (stream, 3)):
        read.clear()
        for _ in range(3):
            Pass(each, [torch.ones(1, 8, dtype=torch.long)], to_end=True).run()
        assert read and set(read.values()) == {times}


def test_a_model_stays_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = zoo.build("mixtral", vocab_size=small.VOCABULARY)
    source = locate(str(small.save(tmp_path)))
    layer = sum(value.nbytes for value in stock.model.layers[0].parameters())
    needed = sum(value.nbytes for value in stock.parameters()) + 2 * layer
    for free, stays in ((needed / 0.8 + 1, True), (needed / 0.8 - 1, False), (None, False)):
        monkeypatch.setattr(opened, "free_memory", lambda device, free=free: free)
        assert open_model(source, resident="auto").partial.resident is stays
        assert open_model(source, resident="yes").partial.resident
        assert not open_model(source, resident="no").partial.resident
    monkeypatch.setattr(opened, "free_memory", lambda device: needed / 0.8 + 1)
    assert not open_alike(source, open_model(source, resident="auto")).partial.resident  # which has yet to be read
    with pytest.raises(CompressionError, match="'maybe' is not known; give auto, yes or no"):
        open_model(source, resident="maybe")


def test_the_run_says_where_the_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    recipe = Recipe.of({"model": str(model), "steps": [{"prune": {"experts": 4}}], "calibration": {"data": str(text)}})
    caplog.set_level(logging.INFO, "compressor")
    size = sum(value.nbytes for value in zoo.build("mixtral", vocab_size=small.VOCABULARY).parameters())
    compressor.plan(recipe, device="cpu")
    monkeypatch.setattr(opened, "free_memory", lambda device: 1000)
    compressor.plan(recipe, device="cpu")
    first, second = (each.getMessage() for each in caplog.records if each.levelno == logging.INFO)
    assert first.startswith("keeping ") and first.endswith(" kB on cpu")
    assert float(first.split()[1]) == pytest.approx(size / 1000, rel=0.01)
    assert second == f"one layer at a time on cpu: {first.split()[1]} kB, {human_bytes(1000)} free"


def test_the_run_says_so_once_when_work_begins(tmp_path: Path, run: Run) -> None:
    model, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    ask = ("plan", model, "-o", tmp_path / "plan.json", "--experts", 4, "--strategy", "reap", "--calibration", text)
    lines = run(*ask, "--samples", 8, "--sequence-length", 32).err.splitlines()
    assert [number for number, line in enumerate(lines) if line.startswith("keeping ")] == [0]
    assert lines[1].startswith("calibrate and plan"), lines
    assert run(*ask, "--samples", 8, "--sequence-length", 32, "--overwrite", "--json").err == ""


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
