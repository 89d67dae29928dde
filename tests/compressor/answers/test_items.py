import json
import re
from pathlib import Path
from typing import Any

import pytest

from compressor.answers.items import Item, item_lines, read_items, rows_of, tokenised
from compressor.answers.tasks import EvaluationOptions, task_items
from compressor.errors import CompressionError, ItemError
from tests.support import small
from tests.support.eval_tasks import own_tasks

ITEM = Item("Two and two are", " 4", (" 4", " 5\u2028"), "sums")


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "items.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def test_items_are_read_as_they_were_written(tmp_path: Path) -> None:
    items = [ITEM, Item("a\nb", "c"), Item("", " 漢")]
    path = tmp_path / "items.jsonl"
    path.write_text(item_lines(items), encoding="utf-8")
    assert read_items(path) == items
    assert ITEM.right == 0 and items[1].continuations == ("c",) and items[1].right == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2 is not valid JSON"),
        (b"[" * 3000, "line 2 is not valid JSON"),
        ({"answer": "b"}, "line 2: prompt is missing"),
        ({"prompt": "a", "answer": "b", "choices": ["c", "d"]}, "the answer is none of the choices"),
        ({"prompt": "a", "answer": "b", "choices": ["b", ""]}, "an answer is empty"),
        ({"prompt": "a", "answer": ""}, "an answer is empty"),
        ({"prompt": "a\ud800", "answer": "b"}, "is half a character"),
        (b'{"prompt": "\xff", "answer": "b"}', "line 2: .* is half a character"),
    ],
)
def test_a_line_that_is_no_item_is_told(line: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match=message) as error:
        read_items(written(tmp_path, {"prompt": "a", "answer": "b"}, line), strict=True)
    assert "\n" not in str(error.value)


def test_bad_items_are_left_out_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(
        tmp_path, {"prompt": "a", "answer": "b"}, {"prompt": "no answer"}, b"{", {"prompt": "a", "answer": "ccc"}
    )
    items = read_items(path)
    assert [item.answer for item in items] == ["b", "ccc"]
    found = tokenised(items, small.tokenizer(), small.VOCABULARY, 2)
    assert [item.answer for item, _ in found] == ["b"] and "where" not in item_lines(items)
    lines, tokens = (record.message for record in caplog.records)
    assert re.search("2 of 4 items of .*: .*line 2: answer is missing; .*line 3 is not valid JSON", lines)
    assert re.search("1 of 2 items are left out: .*items.jsonl, line 4: prompt or answer have no token", tokens)
    with pytest.raises(CompressionError, match="line 4: prompt or answer"):
        tokenised(items, small.tokenizer(), small.VOCABULARY, 2, strict=True)


def test_a_file_without_items_or_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match="has no items"):
        read_items(written(tmp_path, b"", b"  "))
    with pytest.raises(CompressionError, match="is no file"):
        read_items(tmp_path)


def test_tokens_are_those_of_lm_eval() -> None:
    """Blanks at a prompt's end go with the answer; one token stands for an empty prompt; the last ones are kept."""
    tokenizer = small.tokenizer()
    row, other = rows_of(Item("ab ", "cd", ("cd", "e")), tokenizer, small.VOCABULARY)
    encode = tokenizer.encode
    assert (row.tokens, row.start) == (tuple(encode("ab cd")), 2) and other.tokens == tuple(encode("ab e"))
    (opened,) = rows_of(Item("", "cd"), tokenizer, small.VOCABULARY)
    assert (opened.tokens, opened.start) == ((tokenizer.bos_token_id, *encode("cd")), 1)
    (cut,) = rows_of(Item("abcdef", "gh"), tokenizer, small.VOCABULARY, most=4)
    assert (cut.tokens, cut.start) == (tuple(encode("defgh")), 3)  # the model is given four of them


def test_what_cannot_be_tokens_is_told() -> None:
    tokenizer = small.tokenizer()
    with pytest.raises(ItemError, match="longer than the model takes"):
        rows_of(Item("ab", "cdefgh"), tokenizer, small.VOCABULARY, most=4)
    with pytest.raises(CompressionError, match="they do not belong together"):
        rows_of(Item("ab", "cd"), tokenizer, 20)


def test_items_of_tasks_are_what_lm_eval_asks(tmp_path: Path) -> None:
    items = task_items(EvaluationOptions(tasks=("sums", "moe_demo_facts"), limit=3, include_path=own_tasks(tmp_path)))
    assert [item.task for item in items] == ["sums"] * 3 + ["moe_demo_facts"] * 3
    assert items[2] == Item("2 and 2:", " 4", (" 4", " 5"), "sums")
    assert all(item.answer in item.choices for item in items)
