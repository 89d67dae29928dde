"""Chat templates that write the date: one date for a plan, a run, a baseline, and everything that is kept."""

import json
import re
import shutil
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from compressor.answers.prompts import Prompt, tokens_of
from compressor.data.documents import documents
from compressor.data.media import sequence_of
from compressor.data.sources import WeightedSource
from compressor.errors import CompressionError
from compressor.model.tokenizer import render_chat
from compressor.prompt_date import EPOCH, dated
from tests.support import pictures, small
from tests.support.audit import Moment
from tests.support.command_line import Run, refused, run_killed, succeeded
from tests.support.small import tree

pytestmark = pytest.mark.usefixtures("offline")
DATED = (
    "{{ '[' + strftime_now('%d %b %Y') + ']' }}{% macro show(m) %}<{{ m.role }} {{ strftime_now('%Y-%m-%d') }}>"
    "{{ m.content }}{% endmacro %}{% for m in messages %}{{ show(m) }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DAYS = ["2026-03-01", "2026-03-02"]
ASKED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SMALLER = ["--experts", "4", "--strategy", "count-guided", "--samples", "12", "--sequence-length", "32"]
TASK = ["--tasks", "moe_demo_sorting", "--limit", "4", "--apply-chat-template", "--inconclusive", "pass"]


def go_to(day: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EPOCH, str(int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp())))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "cache"))
    go_to(DAYS[0], monkeypatch)
    folder = small.save(tmp_path / "model", max_position_embeddings=2048)
    small.tokenizer(DATED).save_pretrained(folder)
    rows = [{"messages": [{"role": "user", "content": f"say {n}"}, ASKED[1]]} for n in range(60)]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def stock(tokenizer: Any, messages: Any, day: str, **more: Any) -> Any:
    """What transformers renders of the template with that day's dates in the places of its calls."""
    moment = datetime.fromisoformat(day)
    written = re.sub(r"strftime_now\('(.*?)'\)", lambda call: repr(moment.strftime(call[1])), tokenizer.chat_template)
    return tokenizer.apply_chat_template(messages, chat_template=written, **more)


@pytest.mark.parametrize("form", ["%d %B %Y", "%A, %-d. %b %y", "100%% %j", "%I:%M:%S %p", "%F %T", "%%Y-%Y", "'q'"])
def test_every_form_of_a_date_is_that_of_python(form: str) -> None:
    template = "{% if strftime_now is defined %}\n {{ strftime_now(messages[0].content) + '!' }}{% endif %}"
    with dated(DAYS[0]):
        text = render_chat(small.tokenizer(template), [{"role": "user", "content": form}])
    assert text == f" {datetime.fromisoformat(DAYS[0]).strftime(form)}!"


@pytest.mark.parametrize("day", DAYS)
def test_text_prompts_and_pictures_have_the_date_that_is_fixed(day: str, model: Path, tmp_path: Path) -> None:
    tokenizer = small.tokenizer(DATED)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": ASKED}))
    with dated(day) as date:
        (document,) = documents(WeightedSource(str(tmp_path / "a.jsonl"), 1.0), 0, tokenizer)
        prompt = tokens_of(Prompt.of(ASKED[:1]), tokenizer)
    assert document.text == stock(tokenizer, ASKED, day, tokenize=False) and date.is_used
    expected = stock(tokenizer, ASKED[:1], day, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(prompt) == expected
    processor = pictures.processor("qwen3_vl_moe")
    processor.chat_template = DATED.split("{%")[0] + processor.chat_template
    picture = pictures.picture(0)
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": "dot"}]
    with dated(day):
        row = {"messages": [{"role": "user", "content": parts}]}
        sequence = sequence_of(row, None, processor, tmp_path, 512, "row")
    whole = stock(processor, row["messages"], day, tokenize=True, return_dict=True, return_tensors="pt")
    assert sequence.tolist() == whole["input_ids"].tolist()


def test_a_plan_keeps_its_date_and_is_applied_on_any_day(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    text = ["--calibration", tmp_path / "chats.jsonl", *SMALLER]
    succeeded(run("compress", model, "-o", tmp_path / "first", *text, "--correct", "ridge"))
    monkeypatch.chdir(tmp_path)
    record = json.loads((tmp_path / "first" / "compression.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(record["plan"]))
    assert record["plan"]["calibration"]["date"] == DAYS[0]
    go_to(DAYS[1], monkeypatch)
    succeeded(run("apply", tmp_path / "plan.json", "-o", tmp_path / "second"))
    succeeded(run("compress", model, "-o", tmp_path / "third", *text, "--correct", "ridge"))
    weights = [small.tensors_of(tmp_path / name) for name in ("first", "second", "third")]
    same = [all(weights[0][name].equal(other[name]) for name in other) for other in weights[1:]]
    assert same == [True, False], "another day is another text"
    record["plan"]["calibration"]["date"] = "noon"
    (tmp_path / "plan.json").write_text(json.dumps(record["plan"]))
    refused(run("apply", tmp_path / "plan.json", "-o", tmp_path / "fourth"), "'noon' is no date")


def test_text_without_a_date_names_none(model: Path, tmp_path: Path, run: Run) -> None:
    small.tokenizer(small.CHAT).save_pretrained(model)
    text = ["--calibration", tmp_path / "chats.jsonl", *SMALLER, "--correct", "none"]
    succeeded(run("compress", model, "-o", tmp_path / "out", *text))
    record = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert "date" not in record["plan"]["calibration"]


@pytest.mark.full
def test_runs_that_go_on_on_another_day_keep_their_date(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    def compress(name: str) -> list[str]:
        text = ["--calibration", str(tmp_path / "chats.jsonl"), *SMALLER, "--correct", "ridge"]
        return ["compress", str(model), "-o", str(tmp_path / name), *text]

    def traces(name: str) -> list[str]:
        prompts = ["--prompts", str(tmp_path / "chats.jsonl"), "--limit", "6", "--batch-size", "2"]
        return ["traces", str(model), "-o", str(tmp_path / name), *prompts, "--max-new-tokens", "40"]

    # about every second answer ends, as any of many tokens ends one
    ends = list(range(2, small.VOCABULARY, 9))
    small.edit_json(model / "generation_config.json", lambda config: config.update(eos_token_id=ends))
    succeeded(run(*compress("whole")))
    succeeded(run(*traces("whole.jsonl")))
    assert run_killed(compress("out"), Moment(pattern=r"/kept/.*/model\.layers\.1\.")) == -signal.SIGKILL
    assert run_killed(traces("out.jsonl"), Moment("open", r"/answers-[^/]*\.jsonl$", 5)) == -signal.SIGKILL
    go_to(DAYS[1], monkeypatch)
    succeeded(run(*compress("out")))
    succeeded(run(*traces("out.jsonl")))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert json.loads((tmp_path / "out.manifest.json").read_text())["date"] == DAYS[0]
    assert f"[01 Mar 2026]<user {DAYS[0]}>" in (tmp_path / "out.jsonl").read_text()


def test_golden_answers_are_compared_on_their_own_date(model: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    succeeded(run("check", "--write", model))
    assert json.loads((model / "golden_answers.json").read_text())["date"] == DAYS[0]
    go_to(DAYS[1], monkeypatch)
    succeeded(run("check", model))
    small.tokenizer(DATED.replace("%d %b", "%b %d")).save_pretrained(model)
    assert run("check", model).status == 1


def test_a_gate_asks_both_models_on_one_date_and_a_baseline_on_its_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    saved = tmp_path / "base.json"
    succeeded(run("gate", "baseline", model, saved, *TASK[:-2]))
    go_to(DAYS[1], monkeypatch)
    today = json.loads(run("gate", model, copy, *TASK, "--json").out)
    kept = json.loads(run("gate", "--baseline", saved, copy, "--inconclusive", "pass", "--json").out)
    for result, day in ((today, DAYS[1]), (kept, DAYS[0])):
        assert result["asked"]["moe_demo_sorting"]["date"] == day
        assert result["pooled"]["lost"] == result["pooled"]["gained"] == 0
    small.edit_json(saved, lambda baseline: baseline["asked"]["moe_demo_sorting"].pop("date"))
    result = run("gate", "--baseline", saved, copy, "--inconclusive", "pass")
    refused(result, "not known in prompts of model and 2026-03-02 in those of copy; evaluate both on one day")


def test_answers_to_prompts_are_kept_by_date(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    ask = ["evaluate", model, model, "--prompts", tmp_path / "chats.jsonl", "--limit", 3, "--max-new-tokens", 4]
    for day in (DAYS[0], DAYS[1], DAYS[0]):
        go_to(day, monkeypatch)
        content = json.loads(succeeded(run(*ask, "--json")).out)
        assert content["written"]["options"]["date"] == day
    journals = [path.stem[-10:] for path in (tmp_path / "cache").glob("answers-*.jsonl")]
    assert sorted(journals) == DAYS


def test_what_is_no_date_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EPOCH, "tomorrow")
    with pytest.raises(CompressionError, match=r"SOURCE_DATE_EPOCH is tomorrow.*give it seconds since 1970"), dated():
        pass
