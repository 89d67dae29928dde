"""Stored results: taken again for the same model, task and options, and for nothing else."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.evaluation.evaluate import ItemScores, ResultStore, evaluate, identity, plan_evaluation
from compressor.evaluation.tasks import EvaluationOptions, resolve_tasks
from compressor.files import default_folder
from tests import small
from tests.evaluations import Steps

pytestmark = pytest.mark.usefixtures("asked")


class Evaluations:
    """The evaluation of one small model with a store, counting the runs of the model."""

    def __init__(self, model: Path, own: Path, store: ResultStore) -> None:
        self.model, self.own, self.store = model, own, store

    def __call__(self, *names: str, **settings: Any) -> tuple[dict[str, ItemScores], bool, int]:
        options = EvaluationOptions(names or ("sums",), **{"include_path": self.own, "limit": 3, **settings})
        steps = Steps()
        source = locate(str(self.model))
        scores, reused = evaluate(plan_evaluation(source, resolve_tasks(options), options, self.store), steps)
        return scores, reused, sum(phase.startswith("Evaluating") for phase, _ in steps.phases)


@pytest.fixture
def stored(tiny: Path, own: Path, tmp_path: Path) -> Evaluations:
    return Evaluations(Path(shutil.copytree(tiny, tmp_path / "model")), own, ResultStore(tmp_path / "store"))


def test_stored_results_are_reused_and_only_missing_tasks_run(stored: Evaluations, tmp_path: Path) -> None:
    first = stored()
    assert first[1:] == (False, 1)
    assert stored() == (first[0], True, 0)
    moved = tmp_path / "elsewhere"
    stored.model.rename(moved)
    stored.model = moved  # the same files in another place are the same model
    assert stored() == (first[0], True, 0)
    both = stored("moe_demo_facts", "sums")
    assert both[1:] == (False, 1)
    assert list(both[0]) == ["moe_demo_facts", "sums"]
    assert both[0]["sums"] == first[0]["sums"]
    assert not [path for path in stored.store.folder.iterdir() if path.name.startswith(".")]


def replaced(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


EDITS: dict[str, Callable[[Evaluations], Any]] = {
    "heavier": lambda on: small.edit_tensors(on.model, lambda tensors: tensors["lm_head.weight"].mul_(2)),
    "tokenizer": lambda on: small.edit_json(on.model / "tokenizer_config.json", lambda c: c.update(model_max_length=9)),
    "data": lambda on: replaced(on.own / "sums.jsonl", "1 and 1:", "one and one:"),
    "definition": lambda on: replaced(on.own / "sums.yaml", 'target_delimiter: " "', 'target_delimiter: "  "'),
}
SETTINGS = [{"limit": 4}, {"num_fewshot": 1}, {"dtype": "bfloat16"}, {"batch_size": 1}, {"seed": 5}]


@pytest.mark.parametrize(("edit", "settings"), [*((name, {}) for name in EDITS), *((None, each) for each in SETTINGS)])
def test_a_stored_result_is_not_reused_when_anything_changes(
    stored: Evaluations, edit: str | None, settings: dict[str, Any]
) -> None:
    assert stored()[1:] == (False, 1)
    if edit is not None:
        EDITS[edit](stored)
    assert stored(**settings)[1:] == (False, 1)
    assert stored(**settings)[1:] == (True, 0)


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"key": 1}'])
def test_a_damaged_file_is_replaced(stored: Evaluations, damage: str) -> None:
    scores = stored()[0]
    (path,) = stored.store.folder.iterdir()
    path.write_text(damage)
    assert stored() == (scores, False, 1)
    assert stored()[1]


def test_a_store_that_cannot_be_written_costs_a_warning_only(
    stored: Evaluations, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    stored.store = ResultStore(tmp_path / "file" / "store")
    assert stored()[1:] == (False, 1)
    assert "the results on sums could not be stored in" in caplog.text


def test_a_task_is_stored_before_the_next_one_fails(stored: Evaluations, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval

    real = lm_eval.simple_evaluate

    def scarce(**settings: Any) -> Any:
        if settings["tasks"][0].task_name == "moe_demo_facts":
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(**settings)

    monkeypatch.setattr(lm_eval, "simple_evaluate", scarce, raising=False)
    with pytest.raises(CompressionError, match=r"model .* on task 'moe_demo_facts': memory ran out; .*--batch-size"):
        stored("sums", "moe_demo_facts")
    assert stored("sums")[1:] == (True, 0)


def test_the_folder_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_COMPRESSOR_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_folder() == Path("/caches/moe-compressor/gate")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache" / "moe-compressor" / "gate"
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", "/mine")
    assert default_folder() == Path("/mine")


def test_a_hub_model_is_its_commit(tiny: Path) -> None:
    source = replace(locate(str(tiny)), name="org/model", revision="abc")
    assert identity(source) == {"repository": "org/model", "commit": "abc"}


def test_options_that_come_to_the_same_device_share_results(stored: Evaluations) -> None:
    stored(device="auto")
    assert stored(device="cuda" if torch.cuda.is_available() else "cpu")[1]
