"""Calibration with pictures: rows as data sets have them, the model's own processor, and what is said of bad ones."""

import base64
import json
import os
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch import Tensor
from transformers import AutoProcessor

from compressor.data.batches import Calibration, TextSpec, calibrate, evaluation_sets, read_text, repeat_text
from compressor.data.media import MEDIA_VARIABLE
from compressor.data.sources import GivenTexts, TextPart, WeightedSource, parse_sources
from compressor.errors import CompressionError
from compressor.model.inputs import Inputs
from tests.support import pictures


def encoded(seed: int) -> bytes:
    stream = BytesIO()
    pictures.picture(seed).save(stream, "PNG")
    return stream.getvalue()


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def read(source: Path, count: int = 1, length: int = 64, tokenizer: Any = None, **options: Any) -> Calibration:
    given = {"seed": 0, "vocab": 96, "strict": True} | options
    return calibrate(str(source), tokenizer or pictures.llava_tokenizer(), samples=count, length=length, **given)


def chat(image: dict[str, str], text: str = "what is it") -> dict[str, Any]:
    part = {"type": "image", **image}
    return {"messages": [
        {"role": "user", "content": [part, {"type": "text", "text": text}]}, {"role": "assistant", "content": "dot"}
    ]}  # fmt: skip


def beside(image: Any, text: str = "what is it", name: str = "image") -> dict[str, Any]:
    """The same conversation with its picture in a column, as LLaVA's data sets have it."""
    turns = [{"from": "human", "value": f"<image>\n{text}"}, {"from": "gpt", "value": "dot"}]
    return {name: image, "conversations": turns}


def test_every_form_of_a_row_gives_what_the_processor_makes_of_the_conversation(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(0))
    letters = base64.b64encode(encoded(0)).decode()
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image", "image": pictures.picture(0)}]},
        {"role": "assistant", "content": [{"type": "text", "text": "dot"}]},
    ]
    messages[0]["content"].append({"type": "text", "text": "what is it"})
    expected = AutoProcessor.from_pretrained(pictures.llava_tokenizer().name_or_path).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt"
    )
    rows = [
        *(chat({key: "a.png"}) for key in ("image", "path", "url")),
        chat({"image": str(tmp_path / "a.png")}),
        chat({"image": letters}),
        chat({"url": f"data:image/png;base64,{letters}"}),
        {"images": ["a.png"], **chat({})},
        beside("a.png"),
        beside(["a.png"], name="images"),
        {"image": "a.png", "prompt": "what is it", "completion": "dot"},
    ]
    for row in rows:
        [batch] = read(write(tmp_path / "rows.jsonl", row)).batches
        assert isinstance(batch, Inputs)
        given = {"input_ids": batch.as_subclass(Tensor), **batch.more}
        assert given.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in given.items())


def test_a_table_with_a_column_of_pictures_is_read_like_files(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"image": base64.b64encode(encoded(1)).decode(), "text": "a dot"})
    table = pyarrow.Table.from_pylist([{"image": {"bytes": encoded(1), "path": None}, "text": "a dot"}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert read(path).identity["sha256"] == read(tmp_path / "rows.parquet").identity["sha256"]


def test_without_a_chat_template_a_placeholder_and_the_text_are_read(tmp_path: Path) -> None:
    tokenizer = pictures.llava_tokenizer(chat=False)
    (tmp_path / "a.png").write_bytes(encoded(0))
    [batch] = read(write(tmp_path / "rows.jsonl", {"image": "a.png", "text": "dot"}), tokenizer=tokenizer).batches
    assert batch[0].tolist() == [tokenizer.image_token_id] * 4 + tokenizer("dot</s>")["input_ids"]
    with pytest.raises(CompressionError, match="chat template"):
        read(write(tmp_path / "rows.jsonl", chat({"path": "a.png"})), tokenizer=tokenizer)


def test_parts_and_held_out_sequences_are_disjoint_and_repeat(tmp_path: Path) -> None:
    rows = [{"image": base64.b64encode(encoded(seed)).decode(), "text": "dot"} for seed in range(80)]
    source, tokenizer = WeightedSource(str(write(tmp_path / "rows.jsonl", *rows)), 1.0), pictures.llava_tokenizer()
    text = tmp_path / "plain.txt"
    text.write_text("a line of plain text to read here. " * 500, encoding="utf-8")
    sources = (source, WeightedSource(str(text), 1.0))
    spec = TextSpec(sources, 16, 32, heldout=0.25, reserve=4, parts={"train": TextPart(8, 32)})
    made = read_text(spec, tokenizer, 96)

    pictured = [batch for batch in made.fit.batches if isinstance(batch, Inputs)]
    others = [*made.parts["train"], *made.fit.reserved[0].batches, *made.heldout[0].batches]
    own = {batch.more["pixel_values"].sum().item() for batch in pictured}
    assert len(pictured) == len(own) == 8
    held = [b for n, b in enumerate(made.fit.batches) if n in made.fit.heldout and isinstance(b, Inputs)]
    assert len(held) == 2
    counted = [batch.more["pixel_values"].sum().item() for batch in others if isinstance(batch, Inputs)]
    again = {batch.more["pixel_values"].sum().item() for batch in held}  # they are held out for all
    assert len(counted) == len(set(counted)) and set(counted) & own == again
    assert repeat_text(json.loads(json.dumps(made.identity)), tokenizer, 96).identity == made.identity
    write(tmp_path / "rows.jsonl", *reversed(rows))
    with pytest.raises(CompressionError, match="no longer gives"):
        repeat_text(made.identity, tokenizer, 96)


def test_too_few_rows_are_shared_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"image": base64.b64encode(encoded(seed)).decode(), "text": "dot"} for seed in range(6)]
    source = WeightedSource(str(write(tmp_path / "rows.jsonl", *rows)), 1.0)
    made = read_text(TextSpec((source,), 8, 32, heldout=0.2, reserve=4), pictures.llava_tokenizer(), 96)
    assert (len(made.fit.batches), len(made.fit.heldout), len(made.fit.reserved[0].batches)) == (4, 1, 2)
    assert "6 of 12 sequences" in caplog.text
    with pytest.raises(CompressionError, match="one sequence with pictures"):
        read(write(tmp_path / "rows.jsonl", rows[0]), heldout=0.5)


def test_what_follows_the_pictures_is_evaluated(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", chat({"image": base64.b64encode(encoded(0)).decode()}))
    [own] = evaluation_sets([str(path)], pictures.llava_tokenizer(), length=64, seed=0, vocab=96, most=2)
    [batch] = own.batches
    assert isinstance(batch, Inputs)
    last = int((batch[0] == pictures.llava_tokenizer().image_token_id).nonzero().max())
    assert batch.counted[0].tolist() == [place > last for place in range(batch.shape[1])]


@pytest.mark.parametrize(
    ("row", "length", "fault"),
    [
        (chat({"path": "none.png"}), 64, r"line 1: none.png is no file in the folder of the data; put a copy there"),
        (chat({"path": "broken.png"}), 64, r"line 1: the picture 'broken.png' cannot be read"),
        (chat({"url": "https://a.b/c.png"}), 64, r"c.png is no file in the folder of the data; put a copy there"),
        (chat({"image": "@" * 400}), 64, r"line 1: the picture .* cannot be read"),
        (chat({"path": "a.png"}), 4, r"line 1 takes 5 tokens .* more than a sequence's 4; raise --sequence-length"),
        ({"images": [], **chat({})}, 64, r"more parts of type image than it has images"),
        ({"image": "a.png"}, 64, r"has no column messages, "),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_in_one_sentence(row: Any, length: int, fault: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(0))
    (tmp_path / "broken.png").write_bytes(encoded(0)[:40])
    path = write(tmp_path / "rows.jsonl", row)
    with pytest.raises(CompressionError, match=fault):
        read(path, length=length)


def test_a_named_column_of_text_is_read_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"image": "none.png", "text": "a line of text"})
    [batch] = read(Path(f"{path}#text"), length=4).batches
    assert not isinstance(batch, Inputs)


def test_long_text_is_cut_with_what_goes_by_its_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", chat({"image": base64.b64encode(encoded(0)).decode()}, "dot " * 50))
    [batch] = read(path, length=40).batches
    assert isinstance(batch, Inputs)
    assert batch.shape == batch.media.shape == batch.more["attention_mask"].shape == (1, 40)
    assert batch.more["pixel_values"].shape == (1, 3, 16, 16)


def test_rows_given_in_python_hold_pictures_and_are_named_by_them() -> None:
    first, again, other = (GivenTexts.of([{"image": pictures.picture(seed), "text": "dot"}]) for seed in (0, 0, 1))
    assert first.name == again.name != other.name
    [batch] = calibrate(
        parse_sources([first]), pictures.llava_tokenizer(), samples=1, length=64, seed=0, vocab=96
    ).batches
    assert isinstance(batch, Inputs) and batch.more["pixel_values"].shape == (1, 3, 16, 16)


def test_pictures_lie_in_the_folder_of_the_data_or_where_the_user_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data, elsewhere):
        folder.mkdir()
        (folder / "a.png").write_bytes(encoded(0))
    (data / "link.png").symlink_to(elsewhere / "a.png")
    inside, *outside = [
        *(data / "a.png", elsewhere / "a.png", "../elsewhere/a.png", "link.png", "../elsewhere/none.png"),
        *("/proc/self/environ", "/none.png"),
    ]
    assert read(write(data / "rows.jsonl", chat({"path": str(inside)}))).tokens
    for place in map(str, outside):  # one sentence, whether there is such a file or not
        sentence = f"line 1: {place} is no file in the folder of the data; put a copy there, or name its folder in MOE_"
        with pytest.raises(CompressionError, match=re.escape(sentence)):
            read(write(data / "rows.jsonl", chat({"path": place})))
    monkeypatch.setenv(MEDIA_VARIABLE, str(elsewhere))
    for place in (str(inside), str(elsewhere / "a.png"), "a.png"):
        assert read(write(data / "rows.jsonl", chat({"path": place}))).tokens
    with pytest.raises(CompressionError, match="is no file in the folder of the data"):
        read(write(data / "rows.jsonl", chat({"path": "../rows.jsonl"})))


def test_no_program_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    pictures.picture(0).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    with pytest.raises(CompressionError, match=r"the picture 'a.png' cannot be read .*cannot identify image file"):
        read(write(tmp_path / "rows.jsonl", chat({"path": "a.png"})))
    assert not (tmp_path / "ran").exists()


def test_a_folder_of_pictures_is_a_data_set(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(encoded(number))
    write(tmp_path / "metadata.jsonl", *({"file_name": f"{number}.png", "text": "dot"} for number in range(3)))
    assert len(read(tmp_path, 3).batches) == 3
