import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from tests.support import small
from tests.support.command_line import Run, succeeded
from tests.support.eval_tasks import ask

SCRIPT = Path(__file__).parents[1] / "examples" / "search_by_tasks.py"
TASK = "moe_demo_text"  # whose scores, log-likelihoods, tell any two models apart

pytestmark = pytest.mark.usefixtures("offline")


def search(model: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, model, "--tasks", TASK, "--limit", "4", "--most", "3", "-o", out, *more]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


@pytest.mark.full
def test_the_sets_of_highest_score_stay_and_the_last_score_is_the_compressed_models(run: Run, tmp_path: Path) -> None:
    model, kept, smaller = tmp_path / "model", tmp_path / "kept.json", tmp_path / "smaller"
    small.save(model)
    first = search(model, kept, "--experts", "6")
    assert first.returncode == 0, first.stderr
    (journal,) = tmp_path.glob("kept.json.*.jsonl")
    scores: dict[str, dict[tuple[int, ...], float]] = {}
    for line in filter(None, journal.read_text().splitlines()):
        decoder_layer, experts, score = json.loads(line)
        scores.setdefault(decoder_layer, {})[tuple(experts)] = score
    chosen: dict[int, list[int]] = {}
    for entry in json.loads(kept.read_text()):
        chosen.setdefault(entry["layer"], []).append(entry["expert"])
    for (decoder_layer, tried), experts in zip(scores.items(), chosen.values(), strict=True):
        assert len(tried) == 3 and tuple(experts) == max(tried, key=lambda kept: tried[kept]), decoder_layer
    options = ("--experts", 6, "--strategy", "aimer", "--protect", kept, "--correct", "none", "--no-evaluate")
    succeeded(run("compress", model, "-o", smaller, *options))
    (alone,) = ask(smaller, TASK, limit=4).values()
    assert fmean(alone.values) == pytest.approx(max(list(scores.values())[-1].values()), rel=1e-5)
    journal.write_text("\n".join(journal.read_text().splitlines()[:-2]))  # as if it had been killed
    assert search(model, kept, "--experts", "6").stdout == first.stdout
    refused = search(model, kept, "--experts", "8")
    assert refused.returncode == 1 and "has 8 experts and a top-k of 2" in refused.stderr
