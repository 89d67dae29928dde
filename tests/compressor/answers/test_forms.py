"""Tasks asked in lm-eval's own forms, compared with lm-eval's own evaluation item by item."""

import hashlib
import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from compressor.answers.lm_eval_run import plan_evaluation
from compressor.answers.scores import ItemScores
from compressor.answers.server import open_server
from compressor.answers.tasks import EvaluationOptions, quiet_lm_eval, resolve_tasks
from compressor.checkpoint.source import locate
from compressor.progress import Silent
from tests.support import small
from tests.support.command_line import Run, refused, succeeded
from tests.support.eval_tasks import no_stock_tasks, own_tasks
from tests.support.model_server import CHAT, Behaviour, response, serving, stubbed

pytestmark = pytest.mark.usefixtures("offline")

DEMO = str(resources.files("compressor").joinpath("demo", "checkpoint"))
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}"
    "<assistant>{% if enable_thinking is defined and enable_thinking %}hm, {% endif %}{% endif %}"
)
WRITTEN = """
task: written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
output_type: generate_until
test_split: test
fewshot_split: test
doc_to_text: question
doc_to_target: "{{{{choices[0]}}}}"
process_results: !function digest.process
generation_kwargs: {{until: ["\\n"], max_gen_toks: 6}}
metric_list: [{{metric: digest, aggregation: mean, higher_is_better: true}}]
"""
DIGEST = """
import hashlib
def process(doc, results):
    return {"digest": int(hashlib.sha256(results[0].encode()).hexdigest()[:6], 16) / 2**24}
"""
SAMPLING = {"gen_kwargs": "do_sample=true,temperature=1.0", "apply_chat_template": False}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's tasks, and `written`, whose score is another number for each text that a model writes."""
    folder = own_tasks(tmp_path_factory.mktemp("tasks"))
    (folder / "digest.py").write_text(DIGEST)
    (folder / "written.yaml").write_text(WRITTEN.format(data=folder / "sums.jsonl", cache=folder.parent / "cache"))
    return folder


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small.save(tmp_path_factory.mktemp("chatty") / "model", max_position_embeddings=512)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def ours(model: Any, task: str, tasks: Path, store: Path, server: Any = None, **settings: Any) -> ItemScores:
    fields = {"tasks": (task,), "include_path": tasks, "device": "cpu", "dtype": "float32", "limit": 5, **settings}
    options = EvaluationOptions(**fields)
    planned = plan_evaluation(locate(str(model)), resolve_tasks(options), options, store, server)
    return planned.run(Silent())[task]


def theirs(model: Any, task: str, tasks: Path, arguments: dict[str, Any], **settings: Any) -> list[float]:
    """What lm-eval's own model and evaluation give each item."""
    demo = Path(DEMO).parent / "tasks"
    manager = TaskManager(include_path=[str(tasks), str(demo)], include_defaults=False)
    arguments = {"pretrained": str(model), "dtype": "float32", **arguments}
    with quiet_lm_eval():
        found: Any = lm_eval.simple_evaluate(
            "hf", arguments, [task], task_manager=manager, device="cpu", limit=5, bootstrap_iters=0, **settings
        )
    return [float(row[row["metrics"][0]]) for row in found["samples"][task]]


@pytest.mark.parametrize(
    ("task", "asked", "arguments", "settings"),
    [
        ("sums", {"num_fewshot": 2}, {}, {"num_fewshot": 2}),
        ("sums", {"apply_chat_template": True}, {}, {"apply_chat_template": True}),
        ("written", {}, {}, {"apply_chat_template": True}),
        (
            "written",
            {"num_fewshot": 2, "system_instruction": "Be brief.", "fewshot_as_multiturn": False, "seed": 7},
            {},
            {"num_fewshot": 2, "system_instruction": "Be brief.", "apply_chat_template": True,
             "fewshot_as_multiturn": False, "fewshot_random_seed": 7},
        ),
        (
            "written",
            {"enable_thinking": True, "think_end_token": "a", "max_gen_toks": 30, "gen_kwargs": "until=['q']"},
            {"enable_thinking": True, "think_end_token": "a"},
            {"apply_chat_template": True, "gen_kwargs": {"until": ["q"], "max_gen_toks": 30}},
        ),
    ],
)  # fmt: skip
def test_items_score_as_by_lm_evals_own_evaluation(
    chatty: Path, tasks: Path, tmp_path: Path, task: str, asked: Any, arguments: Any, settings: Any
) -> None:
    expected = theirs(chatty, task, tasks, arguments, **settings)
    assert list(ours(chatty, task, tasks, tmp_path / "store", **asked).values) == expected
    if task == "sums":
        assert list(ours(chatty, task, tasks, tmp_path / "streamed", stream=True, **asked).values) == expected
    else:
        assert len(set(expected)) > 1
        plain = ours(chatty, task, tasks, tmp_path / "store", **{**asked, "seed": 8, "system_instruction": "Other."})
        assert list(plain.values) != expected  # and another form is another result


@pytest.mark.parametrize("task", ["moe_demo_facts", "written"])
def test_the_demo_scores_as_by_lm_evals_own_evaluation(tasks: Path, tmp_path: Path, task: str) -> None:
    expected = theirs(DEMO, task, tasks, {}, num_fewshot=1)
    assert list(ours(DEMO, task, tasks, tmp_path, num_fewshot=1).values) == expected  # it has no chat template


def test_repeats_are_averaged_by_item(chatty: Path, tasks: Path, tmp_path: Path) -> None:
    single = [ours(chatty, "written", tasks, tmp_path, seed=seed, **SAMPLING).values for seed in (5, 6)]
    repeated = ours(chatty, "written", tasks, tmp_path, seed=5, repeats=2, **SAMPLING).values
    assert single[0] != single[1]
    assert repeated == pytest.approx([(first + second) / 2 for first, second in zip(*single, strict=True)])


def test_each_repeat_counts_its_own_cut_answers(chatty: Path, tasks: Path, tmp_path: Path) -> None:
    sampling = {"gen_kwargs": {"do_sample": True, "temperature": 1.0, "until": list("abcdefghijklmnopqrstuvwxyz")}}
    sampling["apply_chat_template"] = False
    asked = [{"seed": 5}, {"seed": 6}, {"seed": 5, "repeats": 2}]
    runs = [ours(chatty, "written", tasks, tmp_path, **settings, **sampling).items for settings in asked]
    single, repeated = [[item.cut for item in items] for items in runs[:2]], [item.cut for item in runs[2]]
    assert (1.0, 0.0) in zip(*single, strict=True)
    assert repeated == [(first + second) / 2 for first, second in zip(*single, strict=True)]


def test_cut_answers_of_chats_that_a_server_alone_can_write_out(chatty: Path, tasks: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(chatty, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    small.edit_json(
        plain / "tokenizer_config.json", lambda content: [content.pop("bos_token"), content.pop("eos_token")]
    )
    asked = {"apply_chat_template": True, "gen_kwargs": {"until": list("abcd")}}
    ended = dict[str, str]()
    with serving(chatty) as served:
        server = open_server(served.address).checked(plain, "it")
        begin = len(served.asked)
        items = ours(plain, "written", tasks, tmp_path / "served", server, **asked).items
        for payload in served.asked[begin:]:
            if payload["max_tokens"] == 6:
                (message,) = payload["messages"]
                ended[message["content"]] = served.chat(payload)["choices"][0]["finish_reason"]
        # whose choices are scored by tokens that nothing opens
        scores = ours(plain, "sums", tasks, tmp_path / "served", server).values
    assert set(ended.values()) == {"length", "stop"}
    assert [item.cut for item in items] == [float(ended[f"{n} and {n}:"] == "length") for n in range(5)]
    assert scores == ours(chatty, "sums", tasks, tmp_path / "store").values


def test_a_server_is_asked_for_chats(chatty: Path, tasks: Path, tmp_path: Path) -> None:
    asked = {"enable_thinking": True, "think_end_token": "a", "num_fewshot": 1, "gen_kwargs": {"until": ["q"]}}
    with serving(chatty) as served:
        server = open_server(served.address).checked(chatty, "it")
        found = ours(chatty, "written", tasks, tmp_path / "served", server, **asked)
        payload = served.asked[-1]
        scored = ours(chatty, "sums", tasks, tmp_path / "served", server, apply_chat_template=True, num_fewshot=1)
    assert [message["role"] for message in payload["messages"]] == ["user", "assistant", "user"]
    assert payload["chat_template_kwargs"] == {"enable_thinking": True}
    assert found.values == ours(chatty, "written", tasks, tmp_path / "store", **asked).values
    again = ours(chatty, "sums", tasks, tmp_path / "store", apply_chat_template=True, num_fewshot=1)
    assert scored.values == again.values


def test_a_server_without_chats_is_refused(
    chatty: Path, tasks: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_stock_tasks(monkeypatch)
    flags = ("--tasks", "written", "--include-path", tasks, "--inconclusive", "pass")
    with stubbed() as stub:
        stub.behaviour = Behaviour("no chat", CHAT, response({"error": "not here"}, 404))
        result = run("gate", chatty, "--server", stub.address, *flags, "--json")
    refused(result, "task 'written' is asked as a chat, and stub .* takes none .*not here.*--no-apply-chat-template")


def test_a_template_is_chosen_by_name(chatty: Path, tasks: Path, tmp_path: Path) -> None:
    loud = TEMPLATE.replace("<assistant>", "<ASSISTANT>")
    single = shutil.copytree(chatty, tmp_path / "single")
    (single / "chat_template.jinja").write_text(loud)
    several = shutil.copytree(chatty, tmp_path / "several")
    (several / "additional_chat_templates").mkdir()
    (several / "additional_chat_templates" / "loud.jinja").write_text(loud)
    expected = theirs(single, "written", tasks, {}, apply_chat_template=True)
    assert list(ours(several, "written", tasks, tmp_path / "store", apply_chat_template="loud").values) == expected
    assert list(ours(several, "written", tasks, tmp_path / "store").values) != expected


def test_the_record_says_how_models_were_asked(
    chatty: Path, tasks: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "cache"))
    copy = shutil.copytree(chatty, tmp_path / "copy")
    flags = ("--include-path", tasks, "--limit", 5, "--inconclusive", "pass", "-o", tmp_path / "gate", "--overwrite")
    result = succeeded(run("gate", "--apply-chat-template", chatty, copy, "--tasks", "sums,written", *flags))
    digest = hashlib.sha256(TEMPLATE.encode()).hexdigest()
    forms = json.loads((tmp_path / "gate" / "gate.json").read_text())["asked"]
    assert {forms[task]["chat_template_sha256"] for task in ("sums", "written")} == {digest}
    assert forms["written"]["gen_kwargs"] == {"until": ["\n"], "max_gen_toks": 6}
    assert result.out.count(f"in the chat template default (sha256 {digest[:12]})") == 4  # before, and by the verdict
    succeeded(run("gate", chatty, copy, "--tasks", "sums,written", "--no-apply-chat-template", *flags))
    content = json.loads((tmp_path / "gate" / "gate.json").read_text())
    assert {form["chat_template"] for form in content["asked"].values()} == {None}
    assert min(content["items_per_second"].values()) > 0


@pytest.mark.parametrize(
    "case",
    [
        ("written", (), "'written' would be asked of model in the chat template .* and of other plainly"),
        ("sums", ("--apply-chat-template",), "other has no chat template 'default'; .* --no-apply-chat-template"),
        ("sums", ("--apply-chat-template", "tool_use"), "model has no chat template 'tool_use'.*known are default"),
        ("written", ("--enable-thinking",), "add --think-end-token"),
        ("sums", ("--enable-thinking", "--think-end-token", "x"), "task 'sums' is scored by likelihood"),
        ("sums", ("--fewshot-as-multiturn",), "are of a chat template, and model is asked without one"),
        ("written", ("--gen-kwargs", "temperature"), "--gen-kwargs 'temperature' cannot be read"),
        ("written", ("--gen-kwargs", '{"temperature": 1'), "write key=value,key=value or JSON"),
        ("written", ("--gen-kwargs", "temperature=hot"), "temperature of --gen-kwargs should be a number"),
        ("written", ("--gen-kwargs", "max_new_tokens=3", "--max-gen-toks", 5), "say the same"),
        ("written", ("--repeats", 3), "--repeats has no effect without sampling"),
    ],
)
def test_forms_that_cannot_be_asked_are_refused(
    chatty: Path, tasks: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, case: Any
) -> None:
    task, flags, message = case
    no_stock_tasks(monkeypatch)
    other = shutil.copytree(chatty, tmp_path / "other", ignore=shutil.ignore_patterns("*.jinja", "*.safetensors"))
    shared = ("--include-path", tasks, "--inconclusive", "pass", "-o", tmp_path / "gate")
    refused(run("gate", chatty, other, "--tasks", task, *shared, *flags), message)
    assert [path.name for path in (tmp_path / "gate").iterdir()] == ["gate.xml"]  # which has the error
