import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from compressor.answers.lm_eval_run import item_scores, plan_evaluation
from compressor.answers.models import identity
from compressor.answers.scores import AnsweredItem, ItemScores
from compressor.answers.tasks import EvaluationOptions, EvaluationTask, quiet_lm_eval, resolve_tasks
from compressor.checkpoint.source import locate
from compressor.data.demo import load_documents
from compressor.errors import CompressionError
from compressor.files import default_folder
from tests.support import small
from tests.support.eval_tasks import Steps, ask, evaluate, written_task

pytestmark = pytest.mark.usefixtures("asked")

DEMO = Path(str(resources.files("compressor").joinpath("demo", "checkpoint")))
FILTERS = """
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
filter_list:
  - name: all
    filter: [{function: regex, regex_pattern: "([0-9]+)"}, {function: take_first}]
  - name: first-digit
    filter: [{function: regex, regex_pattern: "([0-9])"}, {function: take_first}]
"""


def rolling(model: Any, tokens: list[int]) -> float:
    with torch.no_grad():
        predicted = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    return float(predicted[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].sum())


def test_text_scores_equal_a_plain_forward_and_nothing_is_printed_nor_anybody_asked(
    tiny: Path, capfd: pytest.CaptureFixture[str], asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # outside any repository, where lm-eval's call of git would complain
    steps, options = Steps(), EvaluationOptions(tasks=("moe_demo_facts", "moe_demo_text"), limit=5, batch_size=2)
    scores = evaluate(str(tiny), None, options, steps)["moe_demo_text"]
    with quiet_lm_eval():
        print("what lm-eval says of its batch size")
    assert capfd.readouterr() == ("", "") and asked == []
    assert steps.phases == [
        ("Loading model", 1),
        ("Evaluating model on moe_demo_facts", 20),
        ("Evaluating model on moe_demo_text", 5),
    ]
    assert steps.advanced == 26
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    texts = [text for text, _ in load_documents("heldout")[:5]]
    tokenizer = small.tokenizer()
    for value, text in zip(scores.values, texts, strict=True):
        tokens = [1, *tokenizer.encode(text, add_special_tokens=False)]
        assert value == pytest.approx(rolling(model, tokens), rel=1e-5)
    assert (scores.kind, scores.metric) == ("likelihood", "word_perplexity")
    expected = [(str(number), len(text.split()) + 1) for number, text in enumerate(texts)]
    assert [(item.id, item.weight) for item in scores.items] == expected  # lm-eval counts the empty last word


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


def test_written_answers_are_scored_by_the_first_filter(tmp_path: Path) -> None:
    rows = [("sort 7391 ->", "1379"), ("sort 4208 ->", "0248"), ("sort 4208 ->", "0"), ("sort 9631 ->", "9631")]
    written_task(tmp_path, rows, FILTERS)
    scores = ask(DEMO, "written", include_path=tmp_path)["written"]
    assert (scores.values, scores.metric, scores.kind) == ((1.0, 1.0, 0.0, 0.0), "exact_match", "score")


def test_answers_that_reach_the_token_limit_are_known_and_may_count_as_wrong(tmp_path: Path) -> None:
    rows = [("sort 7391 ->", "1379"), ("sort 42 ->", "24"), ("sort 4208 ->", "0248"), ("sort 963 ->", "369")]
    written_task(tmp_path, rows, FILTERS.replace("max_gen_toks: 8", "max_gen_toks: 5"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(DEMO), AutoTokenizer.from_pretrained(DEMO)
    cut = []
    for question, _ in rows:
        tokens = tokenizer(question, return_tensors="pt").input_ids
        written = model.generate(tokens, max_new_tokens=5, do_sample=False)[0, tokens.shape[1] :]
        text = tokenizer.decode(written)
        cut.append(float(len(written) == 5 and "\n" not in text and tokenizer.eos_token not in text))
    scores = ask(DEMO, "written", include_path=tmp_path)["written"]
    assert [item.cut for item in scores.items] == cut
    assert scores.cut == sum(cut) / 4
    strict = ask(DEMO, "written", include_path=tmp_path, cut_counts_as_wrong=True)["written"]
    expected = [0.0 if is_cut else value for value, is_cut in zip(scores.values, cut, strict=True)]
    assert list(strict.values) == expected
    with pytest.raises(CompressionError, match="--cut-counts-as-wrong is of written answers"):
        ask(DEMO, "moe_demo_sorting", cut_counts_as_wrong=True)


def test_broken_models_are_refused(tiny: Path, tmp_path: Path) -> None:
    written_task(tmp_path)
    broken = shutil.copytree(DEMO, tmp_path / "broken")  # with NaN in the norm before its head: all logits are NaN
    small.edit_tensors(broken, lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))
    for name in ("moe_demo_facts", "moe_demo_text"):
        with pytest.raises(CompressionError, match=rf"^broken gives a log-likelihood of nan on task '{name}'"):
            ask(broken, name, limit=2)
    with pytest.raises(CompressionError, match=r"^broken gives logits that are NaN .* on task 'written'"):
        ask(broken, "written", include_path=tmp_path)
    mute = shutil.copytree(tiny, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(CompressionError, match=r"mute has no usable tokenizer [^\n]+; copy those of the original"):
        ask(mute, "moe_demo_facts", limit=1)
    holed = shutil.copytree(tiny, tmp_path / "holed")
    small.edit_tensors(holed, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CompressionError, match=r"^holed lacks 1 tensors .* such as 'lm_head.weight'"):
        ask(holed, "moe_demo_facts", limit=1)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def perplexity(values: list[float]) -> float:
    return math.exp(-mean(values))


def fake(metrics: dict[str, Any], rows: list[dict[str, Any]], **parts: Any) -> ItemScores:
    made = SimpleNamespace(aggregation=lambda: metrics, higher_is_better=lambda: dict.fromkeys(metrics, True))
    told = [{"doc_id": n, "filter": "none", "metrics": list(metrics), **row} for n, row in enumerate(rows)]
    return item_scores(EvaluationTask("t", "1", {"t": made}, False, made, (1,)), {"t": told})


def test_the_metric_that_is_taken_and_its_kind() -> None:
    scores = fake({"mcc": mean, "acc": mean}, [{"mcc": (0, 1), "acc": True}, {"mcc": (1, 1), "acc": False}])
    assert (scores.metric, scores.values, scores.kind) == ("acc", (1.0, 0.0), "score")
    scores = fake({"perplexity": perplexity, "acc": mean}, [{"perplexity": -2.5, "acc": 1}])
    assert (scores.kind, scores.items) == ("likelihood", (AnsweredItem("0", -2.5),))
    with pytest.raises(CompressionError, match=r"no metric of single items \(it has mcc\)"):
        fake({"mcc": mean}, [{"mcc": (0, 1)}])
    with pytest.raises(CompressionError, match="gives item 1 a f1 of nan"):
        fake({"f1": mean}, [{"f1": 0.5}, {"f1": math.nan}])


class Evaluations:
    def __init__(self, model: Path, own: Path, store: Path) -> None:
        self.model, self.own, self.store = model, own, store

    def __call__(self, *names: str, **settings: Any) -> tuple[dict[str, ItemScores], bool, int]:
        options = EvaluationOptions(tasks=names or ("sums",), **{"include_path": self.own, "limit": 3, **settings})
        steps = Steps()
        source = locate(str(self.model))
        planned = plan_evaluation(source, resolve_tasks(options), options, self.store)
        return planned.run(steps), not planned.missing, sum(phase.startswith("Evaluating") for phase, _ in steps.phases)


@pytest.fixture
def stored(tiny: Path, own: Path, tmp_path: Path) -> Evaluations:
    return Evaluations(Path(shutil.copytree(tiny, tmp_path / "model")), own, tmp_path / "store")


def test_stored_results_are_reused_and_only_missing_tasks_run(stored: Evaluations, tmp_path: Path) -> None:
    first = stored()
    assert first[1:] == (False, 1)
    assert stored() == (first[0], True, 0)
    moved = tmp_path / "elsewhere"
    stored.model.rename(moved)
    stored.model = moved  # the same files in another place are the same model
    assert stored(device="cuda" if torch.cuda.is_available() else "cpu") == (first[0], True, 0)  # which auto comes to
    both = stored("moe_demo_facts", "sums")
    assert both[1:] == (False, 1)
    assert list(both[0]) == ["moe_demo_facts", "sums"]
    assert both[0]["sums"] == first[0]["sums"]
    assert not [path for path in stored.store.iterdir() if path.name.startswith(".")]
    commit = replace(locate(str(moved)), name="org/model", revision="abc")
    assert identity(commit) == {"repository": "org/model", "commit": "abc"}


def replaced(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


EDITS: dict[str, Callable[[Evaluations], Any]] = {
    "heavier": lambda on: small.edit_tensors(on.model, lambda tensors: tensors["lm_head.weight"].mul_(2)),
    "tokenizer": lambda on: small.edit_json(on.model / "tokenizer_config.json", lambda c: c.update(model_max_length=9)),
    "data": lambda on: replaced(on.own / "sums.jsonl", "1 and 1:", "one and one:"),
    "definition": lambda on: replaced(on.own / "sums.yaml", 'target_delimiter: " "', 'target_delimiter: "  "'),
}
SETTINGS = [{"limit": 4}, {"num_fewshot": 1}, {"dtype": "bfloat16"}, {"batch_size": 1}, {"seed": 5}]


@pytest.mark.full
@pytest.mark.parametrize(("edit", "settings"), [*((name, {}) for name in EDITS), *((None, each) for each in SETTINGS)])
def test_a_stored_result_is_not_reused_after_a_change(stored: Evaluations, edit: str | None, settings: Any) -> None:
    assert stored()[1:] == (False, 1)
    if edit is not None:
        EDITS[edit](stored)
    assert stored(**settings)[1:] == (False, 1)
    assert stored(**settings)[1:] == (True, 0)


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"key": 1}'])
def test_a_damaged_file_is_replaced(stored: Evaluations, damage: str) -> None:
    scores = stored()[0]
    (path,) = stored.store.iterdir()
    path.write_text(damage)
    assert stored() == (scores, False, 1)
    assert stored()[1]


def test_a_store_that_cannot_be_written(stored: Evaluations, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    stored.store = tmp_path / "file" / "store"
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
