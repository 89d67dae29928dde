"""Evaluation through lm-eval: agreement with plain forwards, metrics, refusals, silence, no network."""

import json
import math
import shutil
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compressor.checkpoint.source import locate
from compressor.data.demo import load_documents
from compressor.errors import CompressionError
from compressor.evaluation.decoders import stock_decoder
from compressor.evaluation.evaluate import ItemScores, item_scores, run_tasks
from compressor.evaluation.tasks import EvaluationOptions, EvaluationTask, quiet_lm_eval, resolve_tasks
from compressor.progress import Silent
from tests import small
from tests.evaluations import Steps, ask, evaluate

pytestmark = pytest.mark.usefixtures("asked")

DEMO = Path(str(resources.files("compressor").joinpath("demo", "checkpoint")))
WRITTEN = """
task: written
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
  cache_dir: {cache}
output_type: generate_until
test_split: test
doc_to_text: question
doc_to_target: answer
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 8
filter_list:
  - name: all
    filter:
      - function: regex
        regex_pattern: "([0-9]+)"
      - function: take_first
  - name: first-digit
    filter:
      - function: regex
        regex_pattern: "([0-9])"
      - function: take_first
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
"""


def nan_copy(folder: Path) -> Path:
    """The demo checkpoint with NaN in the norm before its head, so that all logits are NaN."""
    shutil.copytree(DEMO, folder)
    small.edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))
    return folder


def rolling(model: Any, tokens: list[int]) -> float:
    """Summed log-likelihood of all tokens but the first, from one forward."""
    with torch.no_grad():
        predicted = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    return float(predicted[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].sum())


def test_text_scores_equal_a_plain_forward(tiny: Path) -> None:
    scores = ask(tiny, "moe_demo_text", limit=5, batch_size=2)["moe_demo_text"]
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    texts = [text for text, _ in load_documents("heldout")[:5]]
    tokenizer = small.tokenizer()
    for value, text in zip(scores.values, texts, strict=True):
        tokens = [1, *tokenizer.encode(text, add_special_tokens=False)]
        assert value == pytest.approx(rolling(model, tokens), rel=1e-5)
    assert (scores.kind, scores.metric, scores.clusters) == ("likelihood", "word_perplexity", ())
    assert scores.ids == ("0", "1", "2", "3", "4")
    assert scores.weights == tuple(float(len(text.split()) + 1) for text in texts)  # lm-eval counts the empty last word


def test_log_likelihoods_are_summed_in_float32_whatever_the_weights_are() -> None:
    scores = ask(DEMO, "moe_demo_text", limit=6)["moe_demo_text"]
    rounded = [float(torch.tensor(value).to(torch.bfloat16)) for value in scores.values]
    assert rounded != list(scores.values)


def test_a_users_task_and_the_sign_of_its_metric(tiny: Path, own: Path) -> None:
    found = ask(tiny, "sums", include_path=own)["sums"]
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    tokenizer = small.tokenizer()

    def likelihood(question: str, choice: str) -> float:
        context = tokenizer.encode(question, add_special_tokens=False)
        tokens = tokenizer.encode(f"{question} {choice}", add_special_tokens=False)
        return rolling(model, tokens) - rolling(model, context)

    expected = [
        float(likelihood(f"{n} and {n}:", f"{2 * n}") > likelihood(f"{n} and {n}:", f"{2 * n + 1}")) for n in range(6)
    ]
    assert list(found.values) == expected
    assert found.version.startswith("3+")
    turned = ask(tiny, "sums_worse", include_path=own)["sums_worse"]
    assert [-value for value in turned.values] == expected


def test_a_users_group_may_name_the_demos_tasks(tiny: Path, own: Path) -> None:
    scores = ask(tiny, "both", include_path=own, limit=2)["both"]
    assert scores.ids == ("sums/0", "sums/1", "moe_demo_sorting/0", "moe_demo_sorting/1")
    assert scores.clusters == ("sums", "sums", "moe_demo_sorting", "moe_demo_sorting")


def test_written_answers_are_scored_by_the_first_filter(tmp_path: Path) -> None:
    rows = [("sort 7391 ->", "1379"), ("sort 4208 ->", "0248"), ("sort 4208 ->", "0"), ("sort 9631 ->", "9631")]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))
    (tmp_path / "written.yaml").write_text(WRITTEN.format(data=data, cache=tmp_path / "cache"))
    scores = ask(DEMO, "written", include_path=tmp_path)["written"]
    assert (scores.values, scores.metric, scores.kind) == ((1.0, 1.0, 0.0, 0.0), "exact_match", "score")
    nan_model = nan_copy(tmp_path / "broken")
    with pytest.raises(CompressionError, match=r"^broken gives logits that are NaN .* on task 'written'"):
        ask(nan_model, "written", include_path=tmp_path)


@pytest.mark.parametrize("task", ["moe_demo_facts", "moe_demo_text"])
def test_a_model_that_emits_nan_is_refused(tmp_path: Path, task: str) -> None:
    with pytest.raises(CompressionError, match=rf"^broken gives a log-likelihood of nan on task '{task}'"):
        ask(nan_copy(tmp_path / "broken"), task, limit=2)


def test_nothing_is_printed_and_nobody_is_asked(
    tiny: Path,
    capfd: pytest.CaptureFixture[str],
    asked: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # outside any repository, where lm-eval's call of git would complain
    steps = Steps()
    evaluate(str(tiny), None, EvaluationOptions(("moe_demo_facts", "moe_demo_text"), limit=2), steps)
    with quiet_lm_eval():
        print("what lm-eval says of its batch size")
    assert capfd.readouterr() == ("", "")
    assert asked == []
    assert steps.phases == [
        ("Loading model", 1),
        ("Evaluating model on moe_demo_facts", 8),
        ("Evaluating model on moe_demo_text", 2),
    ]
    assert steps.advanced == 11


def test_a_model_without_a_tokenizer_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mute"
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    options = EvaluationOptions(("moe_demo_facts",), limit=1)
    with pytest.raises(CompressionError, match=r"mute has no usable tokenizer [^\n]+; copy those of the original"):
        run_tasks(locate(str(folder)), resolve_tasks(options), options, Silent())


def test_a_model_that_lacks_weights_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny, tmp_path / "holed")
    small.edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CompressionError, match=r"^holed lacks 1 tensors .* such as 'lm_head.weight'"):
        ask(folder, "moe_demo_facts", limit=1)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def perplexity(values: list[float]) -> float:
    return math.exp(-mean(values))


def fake(metrics: dict[str, Any], rows: list[dict[str, Any]], **parts: Any) -> ItemScores:
    """Item scores of one task with these metrics and aggregations."""
    made = SimpleNamespace(aggregation=lambda: metrics, higher_is_better=lambda: dict.fromkeys(metrics, True))
    told = [{"doc_id": n, "filter": "none", "metrics": list(metrics), **row} for n, row in enumerate(rows)]
    return item_scores(EvaluationTask("t", "1", {"t": made}, False, made), {"t": told})


def test_a_metric_of_the_whole_sample_is_passed_over() -> None:
    scores = fake({"mcc": mean, "acc": mean}, [{"mcc": (0, 1), "acc": True}, {"mcc": (1, 1), "acc": False}])
    assert (scores.metric, scores.values, scores.kind) == ("acc", (1.0, 0.0), "score")
    with pytest.raises(CompressionError, match=r"no metric of single items \(it has mcc\)"):
        fake({"mcc": mean}, [{"mcc": (0, 1)}])


def test_the_perplexity_of_single_answers_is_a_likelihood() -> None:
    scores = fake({"perplexity": perplexity, "acc": mean}, [{"perplexity": -2.5, "acc": 1}])
    assert (scores.kind, scores.values, scores.weights) == ("likelihood", (-2.5,), (1.0,))


def test_a_score_that_is_no_number_is_refused() -> None:
    with pytest.raises(CompressionError, match="gives item 1 a f1 of nan"):
        fake({"f1": mean}, [{"f1": 0.5}, {"f1": math.nan}])


def test_a_config_that_its_files_could_not_fill_is_refused_wherever_a_whole_model_is_loaded(tmp_path: Path) -> None:
    from compressor.evaluation.model import WatchedModel

    folder = small.save(tmp_path / "model")
    small.edit_json(folder / "config.json", lambda content: content.update(num_hidden_layers=9_000))
    for load in (
        lambda: WatchedModel.AUTO_MODEL_CLASS.from_pretrained(str(folder)),
        lambda: stock_decoder(folder, "cpu", "auto"),
    ):
        with pytest.raises(CompressionError, match=r"a model of more than [0-9,]+ modules and tensors"):
            load()
