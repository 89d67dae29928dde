"""Compression with pictures in the calibration, end to end: files in, a checkpoint out, and what the record says."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from tests.support import pictures
from tests.support.command_line import Run, refused

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    pictures.llava(folder / "model")
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": f"line {n} of plain text."}) for n in range(400)))
    rows = [{"image": f"{n}.png", "text": f"it is picture number {n} of noise."} for n in range(120)]
    for n in range(120):
        pictures.picture(n).save(folder / f"{n}.png")
    (folder / "pictures.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def arguments(home: Path, out: Path, *more: str) -> list[str]:
    sources = ("--calibration", str(home / "text.jsonl"), "--calibration", str(home / "pictures.jsonl"))
    sizes = ("--samples", "32", "--sequence-length", "48", "--dtype", "float32", "--device", "cpu")
    return ["compress", str(home / "model"), "-o", str(out), "--experts", "4", *sources, *sizes, *more]


def test_pruning_and_correcting_on_pictures_makes_a_checkpoint_with_its_processor(
    home: Path, tmp_path: Path, run: Run
) -> None:
    result = run(*arguments(home, tmp_path / "out", "--strategy", "reap", "--correct", "ridge"))
    assert result.status == 0, result.err
    plan = json.loads((tmp_path / "out" / "compression.json").read_text())["plan"]
    assert [entry["source"] for entry in plan["calibration"]["sources"]] == ["text.jsonl", "pictures.jsonl"]
    for layer in next(step for step in plan["steps"] if step["name"] == "prune")["plan"]["layers"]:
        assert 0 < layer["figures"]["kept_share_of_media"] <= 1 and "kept_share_of_text" in layer["figures"]
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "out")
    inputs = processor(text="<image> what", images=[pictures.picture(0)], return_tensors="pt")
    with torch.no_grad():
        assert bool(model(**inputs).logits.isfinite().all())
    assert model.config.text_config.num_experts == 4


@pytest.mark.full
def test_routers_and_distillation_train_on_pictures(home: Path, tmp_path: Path, run: Run) -> None:
    training = ("--distill", "experts", "--set", "distill.steps=2", "--set", "distill.tokens_per_step=96")
    methods = (
        (*training, "--set", "distill.sequence_length=48"),
        ("--routers", "router", "--set", "routers.sequence_length=48"),
    )
    for number, more in enumerate(methods):
        result = run(*arguments(home, tmp_path / str(number), "--correct", "none", *more))
        assert result.status == 0, result.err


def test_a_model_without_a_processor_refuses_pictures(home: Path, tmp_path: Path, run: Run) -> None:
    shutil.copytree(home / "model", tmp_path / "model")
    (tmp_path / "model" / "processor_config.json").unlink()
    text = arguments(home, tmp_path / "out")
    text[1] = str(tmp_path / "model")
    refused(run(*text), r"has no usable processor for pictures .*; install Pillow and torchvision, copy")
    assert not (tmp_path / "out").exists()


def test_text_shows_rows_with_pictures_as_the_processor_makes_them(home: Path, run: Run) -> None:
    flags = ("--model", home / "model", "--samples", 4, "--sequence-length", 48, "--documents", 1)
    (shown,) = json.loads(run("text", home / "pictures.jsonl", *flags, "--json").out)
    assert shown["rows"] == len(shown["lengths"]) == 4 and shown["sha256"] and len(shown["shown"]) == 1
    assert "picture number" in "".join(piece for piece, _ in shown["shown"][0])
    unread = run("text", home / "pictures.jsonl")
    assert unread.status == 2 and "pictures" in unread.err
