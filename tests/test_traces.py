import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compressor.answers.prompts import Prompt
from compressor.answers.server import Message, message_text
from compressor.data.documents import documents
from compressor.data.sources import WeightedSource
from tests.support import small
from tests.support.command_line import Run, refused, succeeded
from tests.support.model_server import serving

pytestmark = pytest.mark.usefixtures("offline")
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)

WORDS = ("one", "fox", "Pi", "42", "yes", "low", "Q", "mu", "abc")
TEXTS = [*(f"{word * 3}:" for word in WORDS), *(f"[user]Say {word}.[assistant]" for word in WORDS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends some of its answers, with a chat template."""
    folder = small.save(tmp_path_factory.mktemp("traces") / "model", max_position_embeddings=512, seed=1)
    small.tokenizer(TEMPLATE).save_pretrained(folder)
    rows: list[dict[str, Any]] = [{"text": f"{word * 3}:"} for word in WORDS]
    rows += [{"messages": [{"role": "user", "content": f"Say {word}."}]} for word in WORDS]
    (folder.parent / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    answers = written(folder, end=-1)
    # the end token comes where the token comes that follows the first one in most answers, of texts and of chats
    later = [{token for token in answer if token != answer[0]} for answer in answers]
    texts, chats = (Counter(token for tokens in half for token in tokens) for half in (later[:9], later[9:]))
    most = max(sorted(texts), key=lambda token: (min(texts[token], chats[token]), texts[token] + chats[token]))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][2] = tensors["lm_head.weight"][most] * 1.01

    small.edit_tensors(folder, change)
    return folder


def written(folder: Path, end: int = 2) -> list[list[int]]:
    """What stock `generate` writes to the texts that the prompts are."""
    stock, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(folder), small.tokenizer()
    found = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        made = stock.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=0)
        found.append(made[0, ids.shape[1] :].tolist())
    return found


def asked(model: Path, out: Path, *more: Any) -> list[Any]:
    return [
        *("traces", model, "--prompts", model.parent / "prompts.jsonl", "-o", out, "--max-new-tokens", 12),
        *("--batch-size", 4, *more),
    ]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_traces_are_what_the_model_writes_and_ends(model: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "traces.jsonl"
    succeeded(run(*asked(model, out), "--json"))
    tokenizer, answers = small.tokenizer(TEMPLATE), written(model)
    expected = [
        text + tokenizer.decode(own) for text, own in zip(TEXTS, answers, strict=True) if own[-1] == 2 and len(own) > 1
    ]
    rows = rows_of(out)
    assert [row["text"] for row in rows] == expected and 2 < len(rows) < 18
    chat = next(row for row in rows if "messages" in row)
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant"]
    manifest = json.loads((tmp_path / "traces.manifest.json").read_text())
    assert manifest["asked"] == 18 and manifest["kept"] == len(rows)
    assert manifest["kept"] + sum(manifest["dropped"].values()) == 18
    assert manifest["made_by"]["model"]["weights"] and manifest["options"]["max_new_tokens"] == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["traces.jsonl", "traces.manifest.json"]
    read = documents(WeightedSource(str(out), 1.0), 0, tokenizer)
    assert sorted(document.text for document in read) == sorted(expected)
    flags = ["--experts", 4, "--calibration", out, "--samples", 4, "--sequence-length", 16, "--emphasis", "end=8"]
    assert run("compress", model, "-o", tmp_path / "small", *flags, "--correct", "ridge").status == 0


@pytest.mark.full
def test_a_server_writes_the_same_traces_and_is_asked_nothing_twice(model: Path, tmp_path: Path, run: Run) -> None:
    assert run(*asked(model, tmp_path / "memory.jsonl")).status == 0
    out = tmp_path / "served.jsonl"
    with serving(model, answers=10) as served:
        told = run(*asked(model, out, "--server", served.address, "--served-model", "served", "--timeout", 2))
        refused(told, "did not answer within 2 seconds; what it has answered is kept")
        assert not out.exists()
        served.answers = 10**9
        served.go_on.set()
        assert run(*asked(model, out, "--server", served.address)).status == 0
        questions = [
            json.dumps([each.get("prompt"), each.get("messages")]) for each in served.asked if not each.get("echo")
        ]
        assert len(questions) == len(set(questions)) == 18
    assert out.read_bytes() == (tmp_path / "memory.jsonl").read_bytes()
    assert json.loads((tmp_path / "served.manifest.json").read_text())["made_by"]["server"] == f"{served.address}/v1"


@pytest.mark.full
def test_loops_and_endings_of_a_served_model(model: Path, tmp_path: Path, run: Run) -> None:
    looper = shutil.copytree(model, tmp_path / "looper")
    small.edit_tensors(looper, lambda tensors: tensors["lm_head.weight"][2].zero_())
    flags = ["--prompts", model.parent / "prompts.jsonl", "--max-new-tokens", 12]
    with serving(looper) as served:
        flags += ["--server", served.address]
        result = succeeded(run("evaluate", model, *flags, "--json"))
        content = json.loads(result.out)
        assert content["smaller"] == f"served ({served.address}/v1)"
        rates = {rate["measure"]: rate for rate in content["written"]["rates"]}
        assert rates["missed ends"]["smaller"] == 1.0 > rates["missed ends"]["base"]
        count = len(served.asked)
        gated = run("gate", model, *flags, "--max-loop-rise", 1, "--max-missed-rise", 0.2, "--inconclusive", "fail")
        assert gated.status == 1, gated
        assert all(each.get("echo") for each in served.asked[count:])  # answers are kept


def test_bad_requests_are_one_sentence(model: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "traces.jsonl"
    refused(run("traces", model, "-o", out), "nothing is asked; name --prompts")
    refused(run(*asked(model, tmp_path / "traces.txt")), "should end in .jsonl")
    out.write_text("mine")
    refused(run(*asked(model, out)), "is there already; name another file, or pass --overwrite")
    assert run(*asked(model, out), "--overwrite").status == 0
    endless = shutil.copytree(model, tmp_path / "endless")
    small.edit_tensors(endless, lambda tensors: tensors["lm_head.weight"][2].zero_())
    shutil.copyfile(model.parent / "prompts.jsonl", tmp_path / "prompts.jsonl")
    told = run(*asked(endless, tmp_path / "none.jsonl"))
    assert told.status == 2 and "none of 18 answers of endless is complete (18 not ended by itself)" in told.err
    refused(run(*asked(model, out, "--overwrite", "--server", "http://127.0.0.1:9")), "cannot be reached")


def test_what_a_server_takes_apart_is_put_together() -> None:
    tokenizer = small.tokenizer("{{ messages[0].content }}{% if add_generation_prompt %}<think>{% endif %}</think>")
    prompt = Prompt.of([{"role": "user", "content": "a"}])
    calls = [{"function": {"name": "add", "arguments": '{"x": 1}'}}, {"function": {"name": "say", "arguments": "{"}}]
    message = {"content": "So be it.", "reasoning_content": " Hm. ", "tool_calls": calls}
    assert message_text(Message.model_validate(message), prompt, tokenizer, False) == (
        '<think>\nHm.\n</think>\n\nSo be it.\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
        '\n<tool_call>\n{"name": "say", "arguments": "{"}\n</tool_call>'
    )
    assert message_text(Message(content="a"), prompt, tokenizer, False) == "a"
