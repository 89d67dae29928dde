"""Blends of sources: the default one, copies of it, and sources that cannot be read."""

import logging
from pathlib import Path
from typing import Any

import pytest

from compressor.data.batches import TextSpec as Spec
from compressor.data.batches import read_text, repeat_text
from compressor.data.sources import hub_id, parse_sources, read_blend, short_names
from compressor.errors import CompressionError
from tests.support import small
from tests.support.blends import local_blend
from tests.support.texts import TOKENIZER, decode, run, write

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
)
WEIGHTS = [0.25, 0.2, 0.15, 0.15, 0.15, 0.1]


def spec(blend: Path | str, samples: int = 20, **more: Any) -> Spec:
    return Spec(parse_sources([str(blend)]), samples, 8, **more)


def test_the_default_blend_is_public_sets_at_pinned_commits() -> None:
    sources = parse_sources(["blend"])
    assert [entry.weight for entry in sources] == pytest.approx(WEIGHTS)
    assert all(hub_id(entry.source) and entry.is_optional for entry in sources)
    assert short_names([sources[0].source]) == ("HuggingFaceFW/fineweb-edu:sample-10BT@train#text",)
    assert all(entry.domain and entry.licence for entry in read_blend())
    mixed = parse_sources(["blend=3", "mine.jsonl=1"])
    assert [entry.weight for entry in mixed] == pytest.approx([*(0.75 * weight for weight in WEIGHTS), 0.25])
    with pytest.raises(CompressionError, match="is given twice"):
        parse_sources(["blend", sources[2].source])


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_each_layout_is_read_and_rendered(template: str | None, tmp_path: Path, offline: None) -> None:
    tokenizer = small.tokenizer(template) if template else small.tokenizer()
    sources = parse_sources([str(local_blend(tmp_path))])
    texts = [decode(run([entry], tokenizer, samples=60, length=64)) for entry in sources]
    assert "prose 3 says 21</s>" in texts[0]
    names = ("Magicoder-Evol-Instruct-110K", "NuminaMath-CoT", "ultrachat_200k", "aya_dataset", "Synth-APIGen-v0.1")
    for name, text in zip(names, texts[1:], strict=True):
        asked = f"question 3 of {name}"
        assert (f"<user>{asked}\n<assistant>" if template else f"user: {asked}\nassistant: ") in text
        assert ("answer 21" in text) is (name != names[-1])
    called = '<assistant>look{"key": 7}' if template else 'assistant: [{"type": "function", "function": {"name": "look"'
    assert called in texts[-1] and (texts[-1].count("[look]") > 9) is bool(template)


def test_a_source_that_is_gone_leaves_the_others(
    tmp_path: Path, offline: None, caplog: pytest.LogCaptureFixture
) -> None:
    blend = local_blend(tmp_path, missing="ultrachat")
    text = read_text(spec(blend), TOKENIZER, small.VOCABULARY)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "gone@train_sft" in record.message and "count for more" in record.message
    entries = text.identity["sources"]
    assert [entry["weight"] for entry in entries] == pytest.approx([w / 0.85 for w in (*WEIGHTS[:3], *WEIGHTS[4:])])
    assert [entry["samples"] for entry in entries] == [6, 5, 4, 3, 2]  # 5.9, 4.7, 3.5, 3.5 and 2.4
    (left_out,) = text.identity["left_out"]
    assert left_out.startswith(str(tmp_path / "gone"))
    again = repeat_text(text.identity, TOKENIZER, small.VOCABULARY)
    assert again.identity == text.identity
    with pytest.raises(CompressionError, match=r"gone.*cannot be read as a data set"):
        read_text(spec(blend, strict=True), TOKENIZER, small.VOCABULARY)
    bare = write(tmp_path, "[{source: a.txt, weight: 1}, {source: b.txt, weight: 2}]", "bare.yaml")
    with pytest.raises(CompressionError, match=r"no source of the blend can be read; of the first one, .*a\.txt does"):
        read_text(spec(bare), TOKENIZER, small.VOCABULARY)


def test_of_too_few_sequences_the_heaviest_sources_have_all(
    tmp_path: Path, offline: None, caplog: pytest.LogCaptureFixture
) -> None:
    text = read_text(spec(local_blend(tmp_path), samples=4), TOKENIZER, small.VOCABULARY)
    names = [Path(entry["source"].partition("@")[0]).name for entry in text.identity["sources"]]
    assert names == ["fineweb-edu:sample-10BT", "Magicoder-Evol-Instruct-110K", "NuminaMath-CoT", "ultrachat_200k"]
    assert [entry["samples"] for entry in text.identity["sources"]] == [1, 1, 1, 1]
    assert "only the heaviest are read (--samples adds others)" in caplog.text
    files = [write(tmp_path, "some text", f"{number}.txt") for number in range(5)]
    with pytest.raises(CompressionError, match=r"4 samples .* are too few for 5"):
        Spec(parse_sources(list(map(str, files))), 4, 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no list of sources; give it a list of sources with weights, as in .*blend.yaml"),
        ("[a.txt]", "is no list of sources"),
        ("[{source: a.txt, weight: 1", "is not valid YAML .*line 1.*; give it a list"),
        ("[{source: a.txt}]", "weight"),
        ("[{source: a.txt, weight: 0}]", "'a.txt' has weight 0.0; give a positive number"),
        ("[{source: a.txt, wait: 1}]", "'wait'.*weight"),
        (None, "cannot be read .*No such file"),
    ],
)
def test_bad_blends_are_refused(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        write(tmp_path, content, "my.yaml")
    with pytest.raises(CompressionError, match=message) as fault:
        parse_sources([str(tmp_path / "my.yaml")])
    assert "\n" not in str(fault.value)
