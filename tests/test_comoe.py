"""`moe-compress comoe` as it is typed: training and asking, what is refused, and that nothing is left behind."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from compressor.answers.items import Item, item_lines
from compressor.answers.tasks import EvaluationOptions, task_items
from compressor.comoe.layer import inject, save_adapters
from tests.support.command_line import Run, names, refused
from tests.support.eval_tasks import own_tasks
from tests.support.tuning_setups import CONFIG, dense, questions, save, trained_files

QUICK = ("--rank", "4", "--steps", "4", "--batch-size", "4", "--log-every", "2", "--save-every", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


def data(folder: Path) -> Path:
    path = folder / "items.jsonl"
    path.write_text(item_lines(questions(6)))
    return path


@pytest.mark.full
def test_what_is_trained_can_be_asked(run: Run, tmp_path: Path, model: Path) -> None:
    items, out, report = data(tmp_path), tmp_path / "out", tmp_path / "report"
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text('{"prompt": "no answer"}\n' + items.read_text())
    done = run("comoe", "train", model, "--calibration", mixed, "-o", out, *QUICK)
    assert done.status == 0 and "12 items for 4 steps" in " ".join(done.out.split()), done
    assert "1 of 13 items" in done.err and "mixed.jsonl, line 1: answer is missing" in done.err
    refused(run("comoe", "train", model, "--calibration", mixed, "-o", tmp_path / "no", "--strict"), "line 1: answer")
    assert names(out) == ["adapters.safetensors", "comoe.json", "cost.json", "log.jsonl"]
    facts = json.loads((out / "comoe.json").read_text())
    own = sum(value.numel() for value in dense().parameters())
    added = sum(value.numel() for value in load_file(out / "adapters.safetensors").values())
    assert facts["config"]["rank"] == 4 and facts["training"]["share"] == added / own
    done = run("comoe", "evaluate", model, "--adapters", out, "--heldout", items, "-o", report, "--with-base", "--json",
               "--timed-tokens", 3, "--projection", "tsne")  # fmt: skip
    assert done.status == 0, done.err
    content = json.loads(done.out)
    assert [each["items"] for each in content["tasks"]] == [each["items"] for each in content["base"]] == [6, 6]
    assert content["answering"]["seconds"] > 0 and (report / "scatter.png").is_file()
    assert content == json.loads((report / "evaluation.json").read_text()) and content["adapters"] == "out"
    again = run("comoe", "train", model, "--calibration", items, "-o", tmp_path / "again", *QUICK)
    assert again.status == 0 and trained_files(tmp_path / "again") == trained_files(out)
    assert names(tmp_path) == ["again", "items.jsonl", "mixed.jsonl", "out", "report"]


def test_tasks_are_trained_on_their_training_split(tmp_path: Path, run: Run, model: Path) -> None:
    folder = own_tasks(tmp_path)
    rows = [{"question": f"{n} or {n}:", "choices": [f"{n}", f"{n + 1}"], "answer": 0} for n in range(5)]
    (folder / "learn.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = folder / "sums.yaml"
    text = task.read_text().replace("data_files:\n", f"data_files:\n    train: {folder / 'learn.jsonl'}\n")
    task.write_text(text.replace("test_split: test", "test_split: test\ntraining_split: train\nnum_fewshot: 2"))
    options = EvaluationOptions(tasks=("sums",), include_path=folder)
    learnt, asked = task_items(options, training=True), task_items(options)
    assert learnt[3] == Item("3 or 3:", " 3", (" 3", " 4"), "sums") and len(learnt) == 5
    assert len(asked) == 6 and asked[0].prompt.endswith("0 and 0:")
    words = ("--tasks", "sums", "--include-path", folder, *QUICK)
    assert run("comoe", "train", model, *words, "-o", tmp_path / "out").status == 0
    refused(run("comoe", "train", model, "--tasks", "moe_demo_facts", "-o", tmp_path / "no"), "has no training split")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--calibration", "items.jsonl", "--layers", "upper"), "--layers has 'upper'; write low, middle, high or num"),
        (
            ("--calibration", "items.jsonl", "--layers", "5-9"),
            "in decoder layers 5-9 has a name that ends",
        ),
        ((), "either --tasks with lm-eval tasks, or --calibration"),
        (("--calibration", "none.jsonl"), "cannot be read"),
        (("--calibration", "items.jsonl", "--top-k", "5"), "5 of 4 experts are to be activated"),
        (("--calibration", "items.jsonl", "--steps", "0"), "steps should be .*, it is 0"),
    ],
)
def test_refusals(
    run: Run, tmp_path: Path, model: Path, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data(tmp_path)
    refused(run("comoe", "train", model, "-o", "out", *words), message)
    assert names(tmp_path) == ["items.jsonl"]


def test_adapters_that_are_none_are_refused(run: Run, tmp_path: Path, model: Path) -> None:
    words = ("--heldout", data(tmp_path), "--adapters", tmp_path)
    refused(run("comoe", "evaluate", model, *words), r"holds no comoe\.json")
    save_adapters(inject(dense(), CONFIG), tmp_path / "two")
    words = ("--heldout", data(tmp_path), "--adapters", tmp_path / "two", "--scatter-layer", "lm_head")
    refused(run("comoe", "evaluate", model, *words), "--scatter-layer lm_head has no experts; name one of model")
    refused(run("comoe", "evaluate", model, *words, "--batch-size", 0), "batch_size should be greater")
