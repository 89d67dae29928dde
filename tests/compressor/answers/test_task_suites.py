import json
import logging
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from compressor.answers.tasks import EvaluationOptions, resolve_tasks
from compressor.errors import CompressionError
from compressor.options import validated
from compressor.quality_gate.options import GateOptions
from compressor.recipe.recipe import Recipe, recipe_yaml
from tests.support.eval_tasks import ask, written_task

DEMO = Path(str(resources.files("compressor").joinpath("demo", "checkpoint")))

VLLM = """
model_name: org/model
tasks:
- name: gsm8k
  metrics:
  - name: "exact_match,strict-match"
    value: 0.9
  - name: "exact_match,flexible-extract"
    value: 0.8
limit: 250
num_fewshot: 5
max_model_len: 4096
rtol: 0.1
"""


def read(**values: Any) -> GateOptions:
    return validated(GateOptions, values, "the command line")


def test_suites_of_the_package() -> None:
    reap = "arc_challenge arc_easy boolq hellaswag mmlu openbookqa rte winogrande"
    base = read(suite="base")
    assert base.tasks == tuple(reap.split()) and base.num_fewshot == 0 and base.apply_chat_template is None
    chat = read(suite="chat", apply_chat_template=False, fewshot_as_multiturn=False, tasks="ifeval,gsm8k_cot_llama")
    assert chat.tasks == ("ifeval", "gsm8k_cot_llama") and chat.apply_chat_template is False
    assert chat.settings["gsm8k_cot_llama"].num_fewshot == 8
    assert read(suite="math", num_fewshot=2).settings["gsm8k"].num_fewshot is None
    with pytest.raises(CompressionError, match=r"the suite code runs code .*--confirm-run-unsafe-code"):
        read(suite="code")
    assert read(suite="code", confirm_run_unsafe_code=True).tasks == ("humaneval_instruct", "mbpp_instruct")


def test_a_task_file_of_vllms(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(VLLM)
    options = read(suite=str(file), limit=20)
    assert (options.tasks, options.limit, options.num_fewshot) == (("gsm8k",), 20, 5)
    assert (options.apply_chat_template, options.fewshot_as_multiturn) == (False, False)  # as vLLM asks
    assert options.settings["gsm8k"].metric == "exact_match,strict-match"
    assert options.expectations["gsm8k"].value == 0.9
    assert options.expectations["gsm8k"].tolerance == pytest.approx(0.09)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.getMessage().endswith("not used here: max_model_len")
    assert read(suite=str(file), expect="gsm8k=0.5").expectations["gsm8k"].value == 0.5
    recipe = Recipe.of({"model": "m", "gate": {"suite": str(file)}})
    file.unlink()  # the recipe of an output has what the file says
    again = Recipe.of(yaml.safe_load(recipe_yaml(recipe)))
    assert again.gate == recipe.gate and again.gate is not None and again.gate.limit == 250


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no suite '.*own.yaml'; name base, chat, code or math, or a YAML file"),
        ("a: [", "is not valid YAML"),
        ("- a", "is no suite; give it a list of tasks"),
        ("tasks: []", "is no suite"),
        ("tasks: [a]\nnum_fewshots: 1", "has no key 'num_fewshots'; did you mean 'num_fewshot'"),
        ("tasks: [{name: a, shots: 1}]", r"has no key 'shots' in tasks\[0\]"),
        ("tasks: [{limit: 1}]", r"tasks\[0\]: name is missing; add it"),
        ("tasks: [{name: a, limit: 0}]", r"tasks\[0\]: limit should be .*, it is 0"),
        ("tasks: [a]\nlimit: many", "own.yaml: limit should be .*, it is 'many'"),
        ("tasks: [a]\nconfirm_run_unsafe_code: true", "has no key .confirm_run_unsafe_code'"),
    ],
)
def test_what_is_no_suite_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(CompressionError, match=message):
        read(suite=str(tmp_path / "own.yaml"))


@pytest.mark.usefixtures("asked")
def test_settings_of_single_tasks(tmp_path: Path) -> None:
    entries = [{"name": "moe_demo_facts", "limit": 2, "num_fewshot": 1}, "moe_demo_sorting"]
    (tmp_path / "own.yaml").write_text(json.dumps({"tasks": entries, "limit": 3}))
    options = EvaluationOptions(suite=str(tmp_path / "own.yaml"))
    facts, sorting = resolve_tasks(options)
    assert (facts.items(3), sorting.items(3)) == (2, 3)
    shots = [task.loaded.get_config("num_fewshot") for task in (facts, sorting)]
    assert shots == [1, None]
    both = ask(DEMO, suite=str(tmp_path / "own.yaml"), device="cpu")
    assert [len(both[task.name].items) for task in (facts, sorting)] == [2, 3]
    streamed = ask(DEMO, suite=str(tmp_path / "own.yaml"), device="cpu", stream=True)
    assert [scores.values for scores in streamed.values()] == [scores.values for scores in both.values()]
    alone = ask(DEMO, "moe_demo_facts", limit=2, num_fewshot=1, device="cpu")
    assert alone["moe_demo_facts"] == both["moe_demo_facts"] and both["moe_demo_facts"].chance == 0.25


@pytest.mark.usefixtures("asked")
def test_the_metric_of_a_filter_and_code_that_is_run(tmp_path: Path) -> None:
    filters = "filter_list:\n  - name: upper\n    filter:\n      - function: uppercase\n      - function: take_first\n"
    written_task(tmp_path, (("1+1=", "2"),), filters)
    for metric, message in (("exact_match,lower", "no filter 'lower'; it has upper"), ("f1", "no metric 'f1'")):
        settings = {"written": {"metric": metric}}
        with pytest.raises(CompressionError, match=message):
            resolve_tasks(EvaluationOptions(tasks=("written",), include_path=tmp_path, settings=settings))
    (tmp_path / "coded.yaml").write_text("include: written.yaml\ntask: coded\nunsafe_code: true\n")
    with pytest.raises(CompressionError, match=r"task 'coded' runs code .*--confirm-run-unsafe-code"):
        resolve_tasks(EvaluationOptions(tasks=("coded",), include_path=tmp_path))
