import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.answers.prompts import read_prompts, usable_prompts
from compressor.checkpoint.source import locate
from compressor.data.batches import EvaluationSet
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel, load_whole, open_model
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Silent
from compressor.quality_gate.options import BehaviourOptions
from compressor.quality_gate.teacher_forced import (
    END,
    THINKING_END,
    TeacherForcedAnswer,
    answer_sets,
    measure_divergence,
    read_answers,
    stop_tokens_of,
    text_sets,
)
from tests.support import small, zoo

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% if message.role == 'assistant' %}"
    "{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("judging")
    other = small.save(folder / "other")
    small.edit_tensors(other, lambda tensors: [value.mul_(1.1) for name, value in tensors.items() if "w2" in name])
    return small.save(folder / "base"), other


@pytest.fixture(scope="module")
def tokenizer(folders: tuple[Path, Path]) -> Any:
    return load_tokenizer(folders[0])


def opened(folders: tuple[Path, Path]) -> tuple[OpenModel, OpenModel]:
    base, other = (open_model(locate(str(folder)), "float32", "cpu") for folder in folders)
    return base, other


def reading(*texts: Any, **options: Any) -> BehaviourOptions:
    return BehaviourOptions(text=tuple(map(str, texts)), **options)


def write(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_texts_and_answers_have_the_figures_of_stock_models_alone(folders: tuple[Path, Path], tokenizer: Any) -> None:
    stop = int(tokenizer.eos_token_id)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 200, (2, 9, 20), generator=generator)
    texts = [EvaluationSet(name, tuple(part.split(4))) for name, part in zip("ab", ids, strict=True)]
    answers = [
        TeacherForcedAnswer(
            str(n), "xy"[n % 2], tuple(ids[0, n, : 3 + n].tolist()), (*ids[1, n, : 9 - n].tolist(), stop)
        )
        for n in range(6)
    ]
    text, by_answer, found = measure_divergence(*opened(folders), texts, answers, {END: [stop]}, 0.9, Silent())
    stocks = [load_whole(folder, dtype="float32") for folder in folders]

    @torch.no_grad()
    def logs(number: int, row: torch.Tensor, begin: int) -> torch.Tensor:
        return stocks[number](input_ids=row[None]).logits[0, begin - 1 : -1].double().log_softmax(-1)

    assert text is not None and by_answer is not None and text.confidence == 0.9
    for number, row in enumerate(sorted(text.domains, key=lambda row: row.domain)):
        pairs = [[logs(model, each, 1) for model in (0, 1)] for each in ids[number]]
        losses = [-sum(pair[m].gather(1, x[1:, None]).mean() for pair, x in zip(pairs, ids[number], strict=True)) / 9
                  for m in (0, 1)]  # fmt: skip
        assert row.domain == "ab"[number] and (row.sequences, row.tokens) == (9, 9 * 19)
        assert [row.loss.base, row.loss.compressed] == pytest.approx([float(loss) for loss in losses], rel=1e-5)
        kl = sum(float((p.exp() * (p - q)).sum(-1).mean()) for p, q in pairs) / 9
        flips = sum(float((p.argmax(-1) != q.argmax(-1)).double().mean()) for p, q in pairs) / 9
        assert row.kl.change == pytest.approx(kl, rel=1e-3, abs=1e-7) and row.flips.change == pytest.approx(flips)
    assert {row.domain for row in by_answer.domains} == {"x", "y"} and len(found) == 6
    for each in found:
        answer = answers[int(each.id)]
        whole = torch.tensor(answer.prompt + answer.answer)
        p, q = (logs(model, whole, len(answer.prompt)).exp() for model in (0, 1))
        assert each.domain == answer.domain and each.tokens == len(answer.answer) == len(p)
        assert each.end == pytest.approx((float(p[-1, stop]), float(q[-1, stop])), rel=1e-4)
        assert each.elsewhere == pytest.approx((float(p[:-1, stop].mean()), float(q[:-1, stop].mean())), rel=1e-4)
        assert each.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-3, abs=1e-7)
    (mark,) = by_answer.together.stop_tokens if by_answer.together is not None else ()
    assert mark.name == END and mark.count == 6


def test_text_is_cut_shorter_where_it_is_short(tokenizer: Any, tmp_path: Path) -> None:
    path = small.text_file(tmp_path, "some words to read\n\n" * 60)
    (whole,) = text_sets(reading(path), tokenizer, 10**6)
    assert whole.name == "calibration" and sum(map(len, whole.batches)) >= 8 and whole.batches[0].shape[1] < 512
    first, second = text_sets(
        reading(f"{path}=one", f"{path}=two", f"{path}=two", text_samples=10, text_length=16), tokenizer, 10**6
    )
    assert (first.name, second.name) == ("one", "two") and sum(map(len, second.batches)) == 10


def test_answers_are_read_from_rows_with_and_without_a_template(tokenizer: Any, tmp_path: Path) -> None:
    stop = int(tokenizer.eos_token_id)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    rows = [{"prompt": "one", "answer": "two"}, {"prompt": "a", "completion": "b", "ended": "length"}, {"prompt": "c"}]
    plain = read_answers([write(tmp_path / "plain.jsonl", *rows) + "=words"], tokenizer, {stop})
    assert [(each.domain, each.prompt, each.answer) for each in plain] == [
        ("words", ids("one"), (*ids("two"), stop)),
        ("words", ids("a"), ids("b")),
    ]
    chatting = load_tokenizer(Path(tokenizer.name_or_path))
    chatting.chat_template = TEMPLATE
    talk = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    path = write(
        tmp_path / "chat.jsonl", {"messages": talk}, {"messages": talk[:1]}, {"prompt": "one", "answer": "two"}
    )
    own = {"messages": talk, "domain": "talk"}
    assert [each.domain for each in read_answers([write(tmp_path / "own.jsonl", own)], chatting, {stop})] == ["talk"]
    assert read_answers([write(tmp_path / "own.jsonl", own) + "=other"], chatting, {stop})[0].domain == "other"
    first, second = read_answers([path], chatting, {stop})
    assert first.domain == "chat" and first == second
    assert first.prompt == ids("<user>one\n<assistant>") and first.answer == (*ids("two"), stop)
    with pytest.raises(CompressionError, match="does not end with the assistant's answer"):
        read_answers([write(tmp_path / "none.jsonl", {"messages": talk[:1]})], chatting, {stop})
    with pytest.raises(CompressionError, match="has no answers"):
        read_answers([write(tmp_path / "empty.jsonl")], chatting, {stop})
    with pytest.raises(CompressionError, match="empty answer"):
        read_answers([write(tmp_path / "blank.jsonl", {"prompt": "one", "answer": " "})], tokenizer, {stop})


def test_batches_are_padded_on_the_right_and_only_answers_count() -> None:
    answers = [TeacherForcedAnswer(str(n), "a", (1,) * (n + 1), (2,) * (n + 2)) for n in range(10)]
    (only,), order = answer_sets(answers, 10)
    assert [each.id for each in order] == [str(n) for n in reversed(range(10))]
    rows = [row for batch in only.batches for row in batch]
    masks = [row for mask in only.counted for row in mask]
    for each, row, mask in zip(order, rows, masks, strict=True):
        assert row[mask].tolist() == list(each.answer)
        assert row[: len(each.prompt)].tolist() == list(each.prompt) and not mask[: len(each.prompt)].any()
    with pytest.raises(CompressionError, match="makes token 2, the model knows 2"):
        answer_sets(answers, 2)


def test_marks_are_tokens_that_end_answers_and_thinking(tokenizer: Any) -> None:
    assert stop_tokens_of(tokenizer, {3, 1}) == {END: (1, 3)}
    thinking = load_tokenizer(Path(tokenizer.name_or_path))
    thinking.add_tokens(["<think>", "</think>"])
    assert stop_tokens_of(thinking, {1}) == {END: (1,), THINKING_END: (thinking.convert_tokens_to_ids("</think>"),)}
    assert stop_tokens_of(tokenizer, ()) == {}


def test_models_of_other_tokenizers_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    zoo.save("mixtral", tmp_path / "other")
    other = open_model(locate(str(tmp_path / "other")), "float32", "cpu")
    with pytest.raises(CompressionError, match=r"knows \d+ tokens"):
        measure_divergence(opened(folders)[0], other, (), (), {}, 0.95, Silent())


def test_long_texts_are_tokenised_as_far_as_positions_allow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer, longest = small.tokenizer(small.CHAT), 0

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, text: str, **options: Any) -> Any:
            nonlocal longest
            longest = max(longest, len(text))
            return tokenizer(text, **options)

    endless = "a b " * 2_000_000
    rows = [{"prompt": endless, "answer": "x"}, {"prompt": "x", "answer": endless}, {"prompt": "x", "answer": "y"}]
    path = write(tmp_path / "long.jsonl", *rows, {"messages": [{"role": "user", "content": endless}]})
    assert [each.id for each in read_answers([path], Watched(), {1}, 64)]
    assert "3 of 4 answers" in caplog.text
    assert len(usable_prompts(read_prompts([path]), Watched(), most=32)) == 1
    assert "1 of 2 prompts are left out" in caplog.text and "has more than 32 tokens" in caplog.text
    assert 0 < longest < 1_000_000
