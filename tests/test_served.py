"""The gate of served models: a loopback server's answers are those in memory, and faults are sentences."""

import json
from pathlib import Path
from typing import Any

import pytest

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.evaluation import server_client
from compressor.evaluation.evaluate import plan_evaluation
from compressor.evaluation.options import ServerOptions
from compressor.evaluation.server import open_server, served_answerer
from compressor.evaluation.tasks import EvaluationOptions, resolve_tasks
from compressor.progress import Silent
from tests import small
from tests.command_line import Run, refused
from tests.evaluations import ask, own_tasks, written_task
from tests.served import serving

pytestmark = pytest.mark.usefixtures("offline")
PERPLEXITY = """
task: read
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
  cache_dir: {cache}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: question
metric_list:
  - metric: bits_per_byte
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
    monkeypatch.setattr(server_client, "PAUSE", 0.01)
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.parametrize("forms", [(list, str), (str,)])
def test_a_served_model_answers_as_it_does_in_memory(model: Path, tasks: Path, tmp_path: Path, forms: Any) -> None:
    names = ("sums", "read", "written")
    options = EvaluationOptions(names, include_path=tasks, batch_size=1)
    source, resolved = locate(str(model)), resolve_tasks(options)
    with serving(model, forms=forms) as served:
        answerer = served_answerer(open_server(served.address).checked(model, "it"), source, resolved, tmp_path)
        found = plan_evaluation(source, resolved, options, tmp_path, answerer).run(Silent())
        asked = len(served.asked)
        again = plan_evaluation(source, resolved, options, tmp_path, answerer).run(Silent())
        assert again == found and len(served.asked) == asked  # results are kept by task
    assert not list(tmp_path.glob("served-*"))
    expected = ask(model, *names, include_path=tasks, batch_size=1)
    for name in names:
        assert found[name].ids == expected[name].ids and found[name].metric == expected[name].metric
        assert found[name].values == pytest.approx(expected[name].values, rel=1e-4)


def test_a_gate_of_a_server_passes_a_copy_and_names_it(model: Path, tasks: Path, tmp_path: Path, run: Run) -> None:
    flags = ["--tasks", "sums", "--include-path", tasks, "--max-drop", 0.9]
    with serving(model, name="org/small") as served:
        out = tmp_path / "gate"
        told = run("gate", model, "--server", f"{served.address}/v1/", *flags, "-o", out)
        assert told.status == 0, told
        content = json.loads((out / "gate.json").read_text())
        assert content["compressed"] == f"org/small ({served.address}/v1)" and content["base"] == "model"
        facts = content["compressed_identity"]
        assert facts["server"] == f"{served.address}/v1" and facts["version"] == "1.2"
        assert facts["owned_by"] == "tests" and "weights" not in facts
        both = ["--server", served.address, "--base-server", served.address, "--base-served-model", "org/small"]
        assert run("gate", model, *both, "--served-model", "org/small", *flags).status == 0


def test_tasks_of_likelihood_are_refused_by_name_where_there_are_no_log_probabilities(
    model: Path, tasks: Path, run: Run
) -> None:
    with serving(model, forms=()) as served:
        flags = ["gate", model, "--server", served.address, "--include-path", tasks, "--max-drop", 0.99]
        refused(run(*flags, "--tasks", "written,sums"), "task 'sums' takes log-probabilities of its prompts")
        assert run(*flags, "--tasks", "written", "--inconclusive", "pass").status == 0


def test_log_probabilities_of_tokens_after_themselves_are_not_taken(model: Path) -> None:
    with serving(model) as served:
        right = served.completion

        def shifted(payload: Any) -> dict[str, Any]:
            """As llama-cpp-python 0.3.36 answers: each token by the distribution after it."""
            made = right(payload)
            if logs := made["choices"][0].get("logprobs"):
                count = len(logs["tokens"])
                tops = [*logs["top_logprobs"][1:], {"x": -0.5}]
                values = [top.get(token, -9.0) for top, token in zip(tops, logs["tokens"], strict=True)]
                tops = [top | {token: value} for top, token, value in zip(tops, logs["tokens"], values, strict=True)]
                made["choices"][0]["logprobs"] |= {
                    "token_logprobs": [None, *values[1:]],
                    "top_logprobs": [None, *tops[1:]],
                }
                assert count == len(values)
            return made

        assert open_server(served.address).checked(model, "it").scored == "tokens"
        served.completion = shifted  # type: ignore[method-assign]
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
        served.busy = server_client.TRIES
        with pytest.raises(CompressionError, match=r"answers 503 \(busy\)"):
            server.ask("/completions", server_client.Completion, {"model": "served", "prompt": "a"})


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
    for wrong, message in (({"timeout": 0}, "timeout"), ({"base_served_model": "a"}, "--base-server")):
        with pytest.raises(CompressionError, match=message):
            ServerOptions(**wrong)
