import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from compressor.answers.asking import with_rows
from compressor.answers.items import item_lines
from compressor.comoe.evaluating import IGNORED, collate, examples
from compressor.comoe.layer import adapter_tensors, inject
from compressor.comoe.options import ComoeConfig, TuningOptions
from compressor.comoe.training import Trained, train_comoe
from compressor.errors import CompressionError
from compressor.progress import Silent
from tests.support import small
from tests.support.audit import Moment, happening, press_ctrl_c
from tests.support.command_line import names
from tests.support.tuning_setups import CONFIG, OPTIONS, changed, dense, questions, save, trained_files


@pytest.fixture(scope="module")
def tune(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = save(tmp_path_factory.mktemp("model"))
    items = small.text_file(tmp_path_factory.mktemp("items"), item_lines(questions()))

    def run(out: Path, options: TuningOptions = OPTIONS, config: ComoeConfig = CONFIG, **more: Any) -> Trained:
        return train_comoe(str(model), out, calibration=items, options=changed(options, config=config), **more)

    return run


def lines(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_only_the_tokens_of_the_answer_have_a_loss() -> None:
    item = questions()[0]
    (made,) = examples(with_rows([item], dense(), small.tokenizer()))
    labelled = [token for token, label in zip(made["input_ids"], made["labels"], strict=True) if label != IGNORED]
    assert small.tokenizer().decode(labelled) == item.answer
    assert small.tokenizer().decode(made["input_ids"]).endswith(item.prompt + item.answer)
    batch = collate([made, {"input_ids": [5], "labels": [5]}], pad=9)
    assert batch["input_ids"][1].tolist() == [5] + [9] * (len(made["labels"]) - 1)
    assert batch["attention_mask"].sum(1).tolist() == [len(made["labels"]), 1]
    assert batch["labels"][1].tolist() == [5] + [IGNORED] * (len(made["labels"]) - 1)


@pytest.mark.parametrize("accumulation", [2, pytest.param(1, marks=pytest.mark.full)])
def test_without_weight_it_is_plain_tuning_bit_for_bit(tmp_path: Path, tune: Any, accumulation: int) -> None:
    tune(tmp_path / "out", changed(OPTIONS, contrastive=0.0, accumulation=accumulation))
    plain = inject(dense(), CONFIG)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "plain"), max_steps=OPTIONS.steps or 0, per_device_train_batch_size=4, use_cpu=True,
        gradient_accumulation_steps=accumulation, learning_rate=OPTIONS.learning_rate, seed=OPTIONS.seed,
        data_seed=OPTIONS.seed, report_to="none", disable_tqdm=True, save_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    data: Any = examples(with_rows(questions(), plain, small.tokenizer()))
    Trainer(plain, arguments, train_dataset=data, data_collator=partial(collate, pad=0)).train()
    trained, expected = load_file(tmp_path / "out" / "adapters.safetensors"), adapter_tensors(plain)
    assert trained.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in trained.items())
    assert any(value.any() for name, value in trained.items() if name.endswith("up"))


def test_the_log_tells_the_loss_by_its_parts_and_the_gap(tmp_path: Path, tune: Any) -> None:
    made = tune(tmp_path / "out", changed(OPTIONS, contrastive=0.5, steps=5))
    assert [line["step"] for line in made.log] == [2, 4, 5] and lines(tmp_path / "out") == [dict(x) for x in made.log]
    for line in made.log:
        assert line["loss"] == pytest.approx(line["cross_entropy"] + 0.5 * line["contrastive"], rel=1e-5)
        assert line["information_gap"] == pytest.approx(math.log(2) - line["contrastive"])


def test_the_gap_of_all_anchors_is_their_mean_and_items_are_cut_on_the_left(tmp_path: Path, tune: Any) -> None:
    made = tune(tmp_path / "out", changed(OPTIONS, anchors="all", cutoff=6))
    assert made.log[-1]["information_gap"] == pytest.approx(math.log(2) - made.log[-1]["contrastive"] / 2)
    rows = [rows for _, rows in with_rows(questions(), dense(), small.tokenizer(), cutoff=6)]
    whole = [rows for _, rows in with_rows(questions(), dense(), small.tokenizer())]
    assert all(short[0].tokens == long[0].tokens[-6:] for short, long in zip(rows, whole, strict=True))


def test_the_contrastive_loss_falls_where_it_counts(tmp_path: Path, tune: Any) -> None:
    options = changed(OPTIONS, steps=20, contrastive_tokens=0)
    without = tune(tmp_path / "without", changed(options, contrastive=0.0))
    with_it = tune(tmp_path / "with", changed(options, contrastive=0.5))
    assert with_it.log[-1]["contrastive"] < 0.8 * without.log[-1]["contrastive"]


class Broken(Silent):
    def __init__(self, steps: int) -> None:
        self.left = steps

    def advance(self, detail: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.full
@pytest.mark.parametrize("contrastive", [0.0, 0.3])
def test_a_run_that_breaks_off_goes_on_to_the_same_bytes(tmp_path: Path, tune: Any, contrastive: float) -> None:
    options = changed(OPTIONS, contrastive=contrastive, accumulation=2)
    tune(tmp_path / "whole", options)
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path / "broken", options, progress=Broken(5))
    assert names(tmp_path) == [".broken.moe-compressor", "whole"]
    seen = Broken(100)
    tune(tmp_path / "broken", options, progress=seen)
    assert seen.left == 100 - 6  # which counts those that were done before
    assert names(tmp_path) == ["broken", "whole"]
    assert trained_files(tmp_path / "broken") == trained_files(tmp_path / "whole")


@pytest.mark.full
def test_another_run_does_not_go_on_from_it(tmp_path: Path, tune: Any) -> None:
    tune(tmp_path / "whole", changed(OPTIONS, learning_rate=1e-3))
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path / "broken", progress=Broken(5))
    tune(tmp_path / "broken", changed(OPTIONS, learning_rate=1e-3))
    assert trained_files(tmp_path / "broken") == trained_files(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        (OPTIONS, changed(CONFIG, top_k=1), "no positives"),
        (OPTIONS, changed(CONFIG, top_k=4), "no negatives"),
        (OPTIONS, changed(CONFIG, targets=("qkv",)), "'qkv'"),
        (changed(OPTIONS, learning_rate=1e38), CONFIG, r"the loss is (nan|inf) at step [2-6]; lower"),
    ],
)
def test_refusals_leave_no_output(
    tmp_path: Path, tune: Any, options: TuningOptions, config: ComoeConfig, message: str
) -> None:
    with pytest.raises(CompressionError, match=message):
        tune(tmp_path / "out", options, config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("contrastive", -1), ("learning_rate", math.nan), ("temperature", 0), ("warmup", 2), ("seed", -1)],
)
def test_options_that_cannot_be_meant(name: str, value: float) -> None:
    with pytest.raises(CompressionError, match=f"{name} should be"):
        changed(OPTIONS, **{name: value})
    with pytest.raises(CompressionError, match="--save-every 5 is no multiple"):
        changed(OPTIONS, save_every=5)


@pytest.mark.parametrize("steps", [5, pytest.param(6, marks=pytest.mark.full)])
def test_a_run_that_breaks_off_while_it_writes_trains_no_further(tmp_path: Path, tune: Any, steps: int) -> None:
    options = changed(OPTIONS, steps=steps, accumulation=2)
    tune(tmp_path / "whole", options)
    with happening(Moment("open", r"/comoe\.json$"), press_ctrl_c), pytest.raises(KeyboardInterrupt):
        tune(tmp_path / "broken", options)
    assert names(tmp_path) == [".broken.moe-compressor", "whole"]
    tune(tmp_path / "broken", options)
    assert trained_files(tmp_path / "broken") == trained_files(tmp_path / "whole")
