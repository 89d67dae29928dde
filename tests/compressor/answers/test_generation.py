import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compressor.answers.answering import Answer, Model, Request, answer_all, journal_of, seed_of
from compressor.answers.decoding import choose
from compressor.answers.options import GenerationOptions
from compressor.answers.prompts import Prompt, read_prompts, tokens_of, usable_prompts
from compressor.answers.stock import StockModel
from compressor.checkpoint.source import ModelSource, locate
from compressor.errors import CompressionError
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Progress, Silent
from tests.support import small, zoo

NEW = 12
TEXTS = ("one", "a longer prompt of some words", "four words and more", "héllo", "one two three")
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'fail' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if tools %}[{{ tools[0].name }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("answers") / "mixtral")


@pytest.fixture
def chatting(mixtral: Path) -> Any:
    tokenizer = load_tokenizer(mixtral)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def written(folder: Path, texts: Sequence[str], rows: int, **options: Any) -> dict[str, Answer]:
    prompts = [Prompt.of(text) for text in texts]
    writer = StockModel(locate(str(folder)), "cpu", rows=rows)
    asked = [(prompt, 0) for prompt in prompts]
    made = dict(writer.complete(asked, GenerationOptions(max_new_tokens=NEW, **options), Silent()))
    return {text: made[number] for number, text in enumerate(texts)}


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_batch_writes_what_each_prompt_gets_alone(mixtral: Path, temperature: float) -> None:
    alone = written(mixtral, TEXTS, 1, temperature=temperature)
    assert written(mixtral, TEXTS, 5, temperature=temperature) == alone
    assert len({answer.tokens for answer in alone.values()}) > 1


def test_greedy_answers_are_those_of_generate(mixtral: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(mixtral), load_tokenizer(mixtral)
    for text, answer in written(mixtral, TEXTS, 3).items():
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
        tokens = made[0, ids.shape[1] :].tolist()
        assert answer.tokens == tuple(tokens)
        assert answer.ended == ("end" if tokens[-1] == tokenizer.eos_token_id else "length")
        assert answer.text == tokenizer.decode(tokens).removesuffix(tokenizer.eos_token)


# two write no text, and stock generate() lacks a field of the third's tiny config
@pytest.mark.parametrize("name", zoo.sweep(but=("openai_privacy_filter", "diffusion_gemma", "qwen3_omni_moe")))
def test_families_that_read_padding_like_text_are_batched_by_length(name: str, tmp_path: Path) -> None:
    nested = "text_config" in zoo.family(name).config
    small.save(tmp_path / "model", name, **({"text_config.vocab_size": small.VOCABULARY} if nested else {}))
    assert written(tmp_path / "model", TEXTS, 5) == written(tmp_path / "model", TEXTS, 1)


def test_drawn_tokens_have_the_probabilities_of_the_distribution() -> None:
    chances = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0], dtype=torch.float64)
    seeds = [seed_of((Prompt.of("a"), seed)) for seed in (3, 4)]
    numbers = torch.rand(20_000, generator=torch.Generator().manual_seed(seeds[0]), dtype=torch.float64)
    rows = chances.log().expand(20_000, -1)
    counts = choose(rows, GenerationOptions(temperature=1), numbers).bincount(minlength=6) / 20_000
    assert torch.allclose(counts.double(), chances, atol=0.01) and not counts[chances == 0].any()
    assert len({*seeds, seed_of((Prompt.of("b"), 3))}) == 3


def prompts_of(tmp_path: Path, name: str, content: str, tokenizer: Any = None, **more: Any) -> tuple[Prompt, ...]:
    (tmp_path / name).write_text(content, encoding="utf-8")
    found = read_prompts([f"{tmp_path / name}=code"], **more)
    return found if tokenizer is None else usable_prompts(found, tokenizer)


def test_prompts_of_text_are_documents_or_lines(tmp_path: Path) -> None:
    assert [each.text for each in prompts_of(tmp_path, "a.txt", "one\ntwo\n\nthree\n")] == ["one\ntwo", "three"]
    lines = prompts_of(tmp_path, "b.txt", "one\ntwo\none\n")  # each once
    assert [(each.text, each.domain) for each in lines] == [("one", "code"), ("two", "code")]
    assert len(prompts_of(tmp_path, "b.txt", "one\ntwo\n", limit=1)) == 1


def test_a_chat_is_asked_without_its_last_answer(tmp_path: Path, chatting: Any) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    rows = [
        {"messages": turns, "tools": json.dumps([{"name": "look"}])},
        {"conversations": [*sharegpt, {"from": "human", "value": "More"}, {"from": "gpt", "value": "No"}]},
        {"prompt": "Hi", "completion": "Ho"},
        {"text": "Plain"},
    ]
    found = prompts_of(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)), chatting)
    shown = [chatting.decode(tokens_of(prompt, chatting)) for prompt in found]
    assert shown == [
        "<user>Hi[look]<assistant>",
        "<user>Hi<assistant>Ho<user>More<assistant>",
        "<user>Hi<assistant>",
        "Plain",
    ]
    assert chatting.decode(tokens_of(found[3], chatting, chat=True)) == "<user>Plain<assistant>"


def test_bad_prompts_are_left_out(tmp_path: Path, chatting: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"prompt": " "},
        {"other": 1},
        {"messages": [{"role": "fail", "content": "a"}]},
        {"messages": [{"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a"}]},
    ]
    found = prompts_of(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n{", chatting)
    assert [prompt.shown for prompt in found] == ["a"]
    first, second = (record.message for record in caplog.records)
    assert "4 of 6 prompts of" in first and "has no text" in first
    assert "1 of 2 prompts are left out" in second and "no such role" in second


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        ('{"prompt": ""}', TEMPLATE, "line 1 has no text"),
        ('{"messages": [{"role": "fail", "content": "a"}]}', TEMPLATE, "cannot take its messages .no such role"),
        ('{"messages": [{"role": "user", "content": "a"}]}', None, "has no chat template"),
        ("", TEMPLATE, "has no prompts; give it some text"),
    ],
)
def test_nothing_but_bad_prompts_is_refused(rows: str, template: str | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match=message):
        prompts_of(tmp_path, "a.jsonl", rows, small.tokenizer(template))


def test_an_end_token_that_the_model_lacks(tmp_path: Path) -> None:
    folder = small.save(tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        small.edit_json(folder / name, lambda content: content.update(eos_token_id=None))
    writer = StockModel(locate(str(folder)))
    assert writer.opened()[1].stops == {2}  # the tokenizer's
    small.edit_json(folder / "tokenizer_config.json", lambda content: content.pop("eos_token"))
    with pytest.raises(CompressionError, match="has no end token"):
        writer.opened()


class Scripted(Model):
    facts = MappingProxyType({"model": 1})  # type: ignore[assignment]

    def __init__(self, folder: Path, stop_after: int | None = None) -> None:
        self.asked, self.stop_after = list[Request](), stop_after
        self.source = ModelSource(str(folder), None, folder)  # of the tokenizer

    def complete(self, requests: Sequence[Request], options: Any, progress: Progress) -> Iterator[tuple[int, Answer]]:
        for number, (prompt, seed) in enumerate(requests):
            if number == self.stop_after:
                raise CompressionError("it timed out")
            self.asked.append((prompt, seed))
            yield number, Answer(prompt.id, seed, (1, 2), f"{prompt.text} {seed}", "end")


def test_nothing_is_asked_twice(tmp_path: Path) -> None:
    options = GenerationOptions(max_new_tokens=4)
    asked = [(Prompt.of(text), seed) for text in ("a", "b") for seed in (0, 1)]
    small.tokenizer().save_pretrained(tmp_path)
    first, second = Scripted(tmp_path, stop_after=2), Scripted(tmp_path)
    journal = journal_of(first, options, tmp_path)
    with pytest.raises(CompressionError, match="timed out"):
        answer_all(first, asked, options, tmp_path, Silent())
    with journal.path.open("a") as stream:
        stream.write('\n{"prompt": "prom')  # killed while it wrote
    answers = answer_all(second, asked, options, tmp_path, Silent())
    assert [answer.text for answer in answers] == ["a 0", "a 1", "b 0", "b 1"]
    assert first.asked + second.asked == asked
    assert answer_all(Scripted(tmp_path, stop_after=0), asked, options, tmp_path, Silent()) == answers
    assert not list(journal_of(first, GenerationOptions(max_new_tokens=5), tmp_path).read())
