"""Whether a text suffices: both halves of one pass against passes of their own."""

import json
from pathlib import Path

import pytest
import torch

from compressor.data.batches import Calibration, calibrate
from compressor.pipeline.resolve import open_run
from compressor.progress import SILENT
from compressor.recipe.step import TextOptions
from compressor.report.text_check import check_text
from compressor.steps.prune.options import Prune
from compressor.steps.prune.planning import Planner, spec_of
from tests.support import small
from tests.support.command_line import Run

pytestmark = pytest.mark.usefixtures("offline")


def test_one_pass_plans_each_half_as_a_pass_of_its_own_and_counts_all_tokens(tmp_path: Path) -> None:
    folder = small.save(tmp_path / "m")
    text = TextOptions(data=(str(small.text_file(tmp_path)),), samples=11, sequence_length=16)
    with open_run(str(folder), device="cpu") as session:
        read = calibrate(
            str(tmp_path / "calibration.txt"), small.tokenizer(), samples=11, length=16, seed=0, vocab=small.VOCABULARY
        )
        check = check_text(session, text, read)
        model = session.model
        rows = torch.cat(read.batches)
        assert [len(batch) for batch in read.batches] == [8, 3]
        spec = spec_of(Prune(ratio=0.25), model)
        for half, numbers in enumerate(((0, 1, 2, 3, 8, 9), (4, 5, 6, 7, 10))):
            alone = Calibration((rows[list(numbers)],), read.identity)
            planned = Planner(model, alone, SILENT).plans([spec])[0].plan
            kept = [tuple(group.members[0] for group in layer.groups) for layer in planned.layers]
            assert kept == [layer.kept[half] for layer in check.layers]
        top_k = model.architecture.layers[0].top_k
    assert check.tokens == rows.numel()
    assert [sum(layer.tokens) for layer in check.layers] == [top_k * rows.numel()] * len(check.layers)
    few = sum(tokens < check.enough for layer in check.layers for tokens in layer.tokens)
    assert len(check.starved) == few
    assert check.seconds > check.pass_seconds


def test_the_command_shows_verdicts_and_refuses_a_single_sequence(tmp_path: Path, run: Run) -> None:
    folder, text = small.save(tmp_path / "m"), small.text_file(tmp_path)
    command = ("inspect", folder, "--calibration", text, "--sequence-length", 16)
    done = run(*command, "--samples", 64)
    assert "suffices: every expert saw at least 24 tokens" in " ".join(done.out.split())
    first, second = json.loads(run(*command, "--samples", 2, "--json").out)["text"]["verdicts"]
    assert first.startswith("Give more text: ") and "kept experts in common" in second
    refused = run(*command, "--samples", 1)
    assert refused.status == 2 and "too short" in refused.err
    assert "text" not in json.loads(run("inspect", folder, "--json").out)
