import json
import math
import re
import shutil
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest

from compressor.answers import server as server_module
from compressor.answers.lm_eval_run import plan_evaluation
from compressor.answers.options import ServerOptions
from compressor.answers.server import open_server
from compressor.answers.tasks import EvaluationOptions, resolve_tasks
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.progress import Silent
from tests.support import small
from tests.support.audit import Moment
from tests.support.command_line import Run, captured, refused, run_killed, succeeded
from tests.support.eval_tasks import ask, own_tasks, written_task
from tests.support.model_server import (
    CHAT,
    ELSEWHERE,
    MODELS,
    TEXT,
    VERSION,
    Behaviour,
    Stub,
    behaviours,
    response,
    serving,
    stubbed,
    unending,
)

pytestmark = pytest.mark.usefixtures("offline")
PERPLEXITY = """
task: read
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: question
metric_list: [{{metric: bits_per_byte}}]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("served") / "model", max_position_embeddings=512)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = own_tasks(tmp_path_factory.mktemp("tasks"))
    written_task(folder)
    rolling = PERPLEXITY.format(data=folder / "sums.jsonl", cache=folder / "cache")
    (folder / "read.yaml").write_text(rolling)
    return folder


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(server_module, "PAUSE", 0.01)
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.parametrize("forms", [(list, str), (str,)])
def test_a_served_model_answers_as_it_does_in_memory(model: Path, tasks: Path, tmp_path: Path, forms: Any) -> None:
    names = ("sums", "read", "written")
    options = EvaluationOptions(tasks=names, include_path=tasks, batch_size=1)
    source, resolved = locate(str(model)), resolve_tasks(options)
    with serving(model, forms=forms) as served:
        server = open_server(served.address).checked(model, "it")
        found = plan_evaluation(source, resolved, options, tmp_path, server).run(Silent())
        asked = len(served.asked)
        again = plan_evaluation(source, resolved, options, tmp_path, server).run(Silent())
        assert again == found and len(served.asked) == asked  # results are kept by task
    assert not list(tmp_path.glob("served-*"))
    expected = ask(model, *names, include_path=tasks, batch_size=1)
    for name in names:
        ids = [[item.id for item in scores[name].items] for scores in (found, expected)]
        assert ids[0] == ids[1] and found[name].metric == expected[name].metric
        assert found[name].values == pytest.approx(expected[name].values, rel=1e-4)


def test_a_gate_of_a_server_passes_a_copy_and_names_it(model: Path, tasks: Path, tmp_path: Path, run: Run) -> None:
    flags = ["--tasks", "sums", "--include-path", tasks, "--max-drop", 0.9]
    with serving(model, name="org/small") as served:
        out = tmp_path / "gate"
        succeeded(run("gate", model, "--server", f"{served.address}/v1/", *flags, "-o", out))
        content = json.loads((out / "gate.json").read_text())
        assert content["compressed"] == f"org/small ({served.address}/v1)" and content["base"] == "model"
        facts = content["compressed_identity"]
        assert facts["server"] == f"{served.address}/v1" and facts["version"] == "1.2"
        assert facts["owned_by"] == "tests" and "weights" not in facts
        both = ["--server", served.address, "--base-server", served.address, "--base-served-model", "org/small"]
        assert run("gate", model, *both, "--served-model", "org/small", *flags).status == 0


def test_tasks_of_likelihood_need_log_probabilities(model: Path, tasks: Path, run: Run) -> None:
    with serving(model, forms=()) as served:
        flags = ["gate", model, "--server", served.address, "--include-path", tasks, "--max-drop", 0.99]
        refused(run(*flags, "--tasks", "written,sums"), "task 'sums' takes log-probabilities of its prompts")
        assert run(*flags, "--tasks", "written", "--inconclusive", "pass").status == 0


def shifted(choice: dict[str, Any]) -> None:
    """As llama-cpp-python 0.3.36 answers: each token by the distribution after it."""
    if logs := choice.get("logprobs"):
        tops = [*logs["top_logprobs"][1:], {"x": -0.5}]
        values = [top.get(token, -9.0) for top, token in zip(tops, logs["tokens"], strict=True)]
        tops = [top | {token: value} for top, token, value in zip(tops, logs["tokens"], values, strict=True)]
        choice["logprobs"] = {**logs, "token_logprobs": [None, *values[1:]], "top_logprobs": [None, *tops[1:]]}


ODD: list[Any] = [
    3,
    {"tokens": ["a"], "token_logprobs": 3, "top_logprobs": [None]},
    {"tokens": [["a"]], "token_logprobs": [-1.0], "top_logprobs": [None]},
    {"tokens": ["a"], "token_logprobs": ["much"], "top_logprobs": [{"a": -1.0}]},
    {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": {}}]},
    {"tokens": ["a"], "token_logprobs": [math.nan], "top_logprobs": [["a"]]},
]


def test_log_probabilities_of_other_tokens_or_another_form_are_not_taken(model: Path) -> None:
    with serving(model) as served:
        right = served.completion
        assert open_server(served.address).checked(model, "it").scored == "tokens"
        for change in (shifted, *(lambda choice, odd=odd: choice.update(logprobs=odd) for odd in ODD)):

            def answered(payload: Any, change: Any = change) -> dict[str, Any]:
                made = right(payload)
                change(made["choices"][0])
                return made

            served.completion = answered  # type: ignore[method-assign]
            assert open_server(served.address).checked(model, "it").scored is None


def test_a_run_that_a_timeout_ended_goes_on_and_asks_nothing_twice(model: Path, tasks: Path, run: Run) -> None:
    with serving(model, answers=7) as served:
        flags = ["gate", model, "--server", served.address, "--include-path", tasks, "--tasks", "sums"]
        flags += ["--max-drop", 0.9, "--batch-size", 2]
        told = run(*flags, "--timeout", 2)
        assert told.status == 2 and told.err.count("Error: ") == 1, told
        assert "did not answer within 2 seconds; what it has answered is kept" in told.err
        assert len(served.asked) == 7
        served.answers = 10**9
        served.go_on.set()
        assert run(*flags).status == 0
        items = [json.dumps(each["prompt"]) for each in served.asked if each["max_tokens"] == 1]
        assert len(items) == len(set(items)) == 12


def test_a_busy_server_is_asked_again(model: Path) -> None:
    with serving(model, busy=3) as served:
        server = open_server(served.address).checked(model, "model")
        assert server.scored == "tokens"
        served.busy = server_module.TRIES
        with pytest.raises(CompressionError, match=r"answers 503 \(busy\)"):
            server.complete({"prompt": "a"})


def test_wrong_servers_are_one_sentence(
    model: Path, tasks: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["gate", model, "--tasks", "sums", "--include-path", tasks, "--max-drop", 0.9, "--server"]
    refused(run(*flags, "http://127.0.0.1:9"), "http://127.0.0.1:9/v1 cannot be reached .*start the server")
    refused(run(*flags, "somewhere"), "--server 'somewhere' is no address of a server")
    told = run(*flags, "http://me:secret-word@127.0.0.1:9")
    refused(told, "--server holds a user's name or a key")
    assert "secret-word" not in told.err
    refused(run(*flags[:-1], "--served-model", "a"), "--served-model goes with --server")
    other = small.save(tmp_path / "other")
    shifted = small.tokenizer()
    content = json.loads(shifted.backend_tokenizer.to_str())
    names = list(content["model"]["vocab"])
    content["model"]["vocab"] = {name: place for place, name in enumerate([*names[:3], *reversed(names[3:])])}
    (other / "tokenizer.json").write_text(json.dumps(content))
    with serving(model, key="sk-a-very-secret-key") as served:
        refused(run(*flags, served.address), "answers 401 .*put its key into the environment variable OPENAI_API_KEY")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-another-secret-key")
        told = run(*flags, served.address)
        refused(told, "answers 401")
        assert "another-secret" not in told.err
        monkeypatch.setenv("OPENAI_API_KEY", "sk-a-very-secret-key")
        refused(run(*flags, served.address, "--served-model", "serve"), "has no model 'serve'; did you mean 'served'")
        flags[1] = other
        refused(run(*flags, served.address), "has another vocabulary than other")
        flags[1] = model
        out = tmp_path / "gate"
        assert run(*flags, served.address, "-o", out).status == 0
        cached = [path.read_text() for path in (tmp_path / "cache").rglob("*.json")]
        assert not any("very-secret" in text for text in [*cached, *(path.read_text() for path in out.iterdir())])


def test_options_of_servers_are_checked() -> None:
    with pytest.raises(CompressionError, match="--base-server"):
        ServerOptions(base_served_model="a")
    for seconds in (0, -1, math.inf, math.nan, 1e300):
        with pytest.raises(CompressionError, match="timeout should be"):
            ServerOptions(timeout=seconds)
    for url in ("http://a:abc", "http://a:99999", "http://[::1", "file:///etc/passwd", "ftp://a", "http://", "a:1", ""):
        with pytest.raises(CompressionError, match="is no address of a server"):
            open_server(url)


BEHAVIOURS = [str(each) for each in behaviours("")]
FEW = 9  # every so manieth behaviour stands for all
PROMPTS = [
    *({"text": f"Say {word}:"} for word in ("one", "two", "six")),
    *({"messages": [{"role": "user", "content": f"Say {word}."}]} for word in ("low", "abc", "fox")),
]


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with stubbed() as stub:
        yield stub


@pytest.fixture
def traced(model: Path, tmp_path: Path, stub: Stub) -> list[Any]:
    chats = shutil.copytree(model, tmp_path / "chats")
    small.tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}").save_pretrained(chats)
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in PROMPTS))
    stub.asked, stub.strays = [], 0
    out = ["-o", tmp_path / "out.jsonl", "--prompts", tmp_path / "prompts.jsonl"]
    return ["traces", chats, "--server", stub.address, *out, "--max-new-tokens", 8, "--batch-size", 1]


NUMBERED = [
    pytest.param(number, id=name, marks=() if number % FEW == 0 else pytest.mark.full)
    for number, name in enumerate(BEHAVIOURS)
]


@pytest.mark.parametrize("number", NUMBERED)
def test_no_behaviour_of_a_server_does_harm(number: int, traced: Any, tmp_path: Path, stub: Stub, run: Run) -> None:
    stub.behaviour = behaviour = behaviours(stub.elsewhere)[number]
    stub.trigger = {TEXT: "Say two", CHAT: "Say abc"}.get(behaviour.path, "")
    told = run(*traced, "--timeout", 1 if behaviour.how == "silent" else 30)
    assert told.status == (0 if behaviour.taken else 2), told
    assert stub.strays == 0
    if behaviour.taken:
        lines = (tmp_path / "out.jsonl").read_text()
        assert lines.count("\n") == 6 and ELSEWHERE not in lines and "{'" not in lines
        return
    assert told.err.count("Error: ") == told.err.count("\n") == 1 and stub.address in told.err, told
    answered, stub.behaviour, stub.asked = set(stub.asked), None, []
    assert run(*traced).status == 0
    assert len(stub.asked) == len(set(stub.asked)) and not answered & set(stub.asked)
    assert len(answered) + len(stub.asked) == 6
    assert ELSEWHERE not in (tmp_path / "out.jsonl").read_text()


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "no room"}}, {"error": "no room"}, {"message": "no room"},
        {"error": {"code": 5}, "message": "no room"}, {"error": None, "message": "no room"},
        {"error": "", "message": "no room"}, {"error": {"message": ""}, "message": "no room"},
    ],
)  # fmt: skip
def test_the_reason_of_a_refusal_is_told(body: Any, stub: Stub) -> None:
    stub.behaviour, stub.trigger = Behaviour("refuses", MODELS, response(body, 400)), ""
    with pytest.raises(CompressionError, match=r"answers 400 \(no room\)"):
        open_server(stub.address)


@pytest.fixture(scope="module")
def golden(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("golden") / "golden.json"
    succeeded(captured("check", "--write", model, "--output", file))
    return file


ENDLESS = [
    pytest.param(*case, marks=() if case[:2] == ("check", MODELS) else pytest.mark.full)
    for case in product(("check", "gate", "evaluate", "traces"), (MODELS, VERSION, TEXT), range(len(unending(""))))
]


@pytest.mark.parametrize(("command", "path", "number"), ENDLESS)
def test_no_answer_outlasts_its_timeout(
    command: str, path: str, number: int, model: Path, golden: Path, tasks: Path, tmp_path: Path, stub: Stub, run: Run
) -> None:
    stub.behaviour = unending(path)[number]
    stub.trigger = ""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(PROMPTS[0]) + "\n")
    settings = {"check": ["--answers", golden], "evaluate": ["--prompts", prompts]}
    settings["gate"] = ["--tasks", "sums", "--include-path", tasks, "--max-drop", 0.9]
    settings["traces"] = ["--prompts", prompts, "-o", tmp_path / "out.jsonl"]
    told = run(command, model, *settings[command], "--server", stub.address, "--timeout", 0.5)
    assert told.status == 2 and told.err.count("Error: ") == 1, told
    assert re.search(f"did not answer within 0.5 seconds|answers with over {2**25:,} bytes", told.err), told


@pytest.mark.parametrize("event", ["os.rename", "os.remove"])
def test_killed_traces_are_finished_by_a_repeat(event: str, traced: Any, tmp_path: Path, stub: Stub, run: Run) -> None:
    stub.behaviour = None
    out, manifest = tmp_path / "out.jsonl", tmp_path / "out.manifest.json"
    assert run(*traced).status == 0
    whole = out.read_bytes(), manifest.read_bytes()
    for nth in count(1):
        out.unlink()
        manifest.unlink()
        stub.asked = []
        code = run_killed([str(each) for each in traced], Moment(event, nth=nth))
        if code != 0:
            assert run(*traced).status == 0
        assert (out.read_bytes(), manifest.read_bytes()) == whole
        assert len(stub.asked) == len(set(stub.asked)) == 6
        assert not list(tmp_path.glob(".*"))
        if code == 0:
            break
    stub.asked = []
    told = run(*traced, "--json")
    assert told.status == 0 and json.loads(told.out)["kept"] == 6 and not stub.asked
    refused(run(*traced, "--limit", 2), "out.jsonl is there already")
    out.write_text("mine")
    refused(run(*traced), "out.jsonl is there already")


def test_files_beside_traces_are_nobodys(traced: list[Any], tmp_path: Path, stub: Stub, run: Run) -> None:
    stub.behaviour, manifest = None, tmp_path / "out.manifest.json"
    manifest.write_text('{"mine": 1}')
    refused(run(*traced), "out.manifest.json is there already")
    refused(run(*traced, "--overwrite"), "out.manifest.json is no manifest of traces")
    assert manifest.read_text() == '{"mine": 1}' and not stub.asked
    manifest.unlink()
    assert run(*traced).status == run(*traced, "--overwrite").status == 0


def test_unreadable_lines_of_a_journal_are_asked_again(traced: list[Any], tmp_path: Path, stub: Stub, run: Run) -> None:
    stub.behaviour, stub.trigger = Behaviour("broken", CHAT, response("", 500)), "Say fox"
    refused(run(*traced), "answers 500")
    (journal,) = tmp_path.glob(".*/answers-*.jsonl")
    _, first, second, *others = journal.read_bytes().splitlines()
    bad = [first.replace(b"so it is", b"so \xff is"), second[:-9], b"\xff", b"["]
    journal.write_bytes(b"\n".join([*bad, *others]))
    stub.behaviour, stub.asked = None, []
    assert run(*traced).status == 0
    assert len(stub.asked) == 3
    assert [row["text"].partition(":")[2] for row in map(json.loads, (tmp_path / "out.jsonl").open())][:3] == [
        f"so it is.{small.tokenizer().eos_token}"
    ] * 3
