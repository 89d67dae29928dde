"""Tokenizers that transformers makes up for want of files are refused wherever one is loaded; chat templates."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

import compressor
from compressor.answers.lm_eval_adapter import lm_eval_model
from compressor.answers.prompts import Prompt, tokens_of
from compressor.answers.tasks import EvaluationOptions
from compressor.checkpoint.source import locate
from compressor.data.documents import Document, pack
from compressor.errors import CompressionError
from compressor.model.tokenizer import has_chat_template, load_tokenizer, render_chat
from tests.support import small
from tests.support.texts import run, write

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for which transformers makes up a tokenizer of one token."""
    folder = small.save(tmp_path_factory.mktemp("made-up") / "model", "qwen3_moe")
    for name in TOKENIZER:
        (folder / name).unlink()
    assert AutoTokenizer.from_pretrained(folder)("some text")["input_ids"] == []
    return folder


def test_a_made_up_tokenizer_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    text = small.text_file(tmp_path)
    made_up = pytest.raises(CompressionError, match=r"no file there defines the .* that transformers makes up")
    with made_up:
        compressor.compress(str(checkpoint), tmp_path / "out", experts=4, calibration=[str(text)], samples=2)
    with made_up, lm_eval_model(locate(str(checkpoint)), EvaluationOptions(tasks=("demo-skills",))):
        pass
    assert list(tmp_path.iterdir()) == [text]


def test_a_vocabulary_of_special_tokens_alone_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(CompressionError, match="its vocabulary holds nothing but special tokens"):
        load_tokenizer(folder)


def test_a_tokenizer_of_bytes_needs_no_vocabulary_but_a_name(checkpoint: Path, tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path)
    for path in tmp_path.iterdir():
        if path.name != "tokenizer_config.json":
            path.unlink()
    shutil.copy(checkpoint / "config.json", tmp_path)
    assert load_tokenizer(tmp_path)("a", add_special_tokens=False)["input_ids"] == [ord("a") + 3]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "ByT5Tokenizer"


def words(**special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of four letters and an end token."""
    vocabulary = {"</s>": 0, "<unk>": 1, "G": 2, "A": 3, "T": 4, "C": 5}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=special.get("unk_token")))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", **special)


@pytest.mark.parametrize("special", [{}, {"unk_token": "<unk>"}])
def test_text_that_a_tokenizer_does_not_know_is_refused(special: dict[str, str]) -> None:
    tokenizer = words(**special)
    for strange in (["hello", "world"], ["hello"]):
        with pytest.raises(CompressionError, match="the tokenizer has no token for the text"):
            pack(map(Document, strange), tokenizer, 32)
    with pytest.raises(CompressionError, match="the tokenizer has no token for the prompt"):
        tokens_of(Prompt.of("hello"), tokenizer)
    assert {5, 3, 4} < set(pack(map(Document, ["hello", "CAT", " "]), tokenizer, 32).ids.tolist())
    assert tokens_of(Prompt.of("CAT"), tokenizer) == (5, 3, 4)


def test_a_stream_without_end_is_not_read_for_ever() -> None:
    tokenizer = words()
    tokenizer.eos_token = None
    with pytest.raises(CompressionError, match="has no token for the text"):
        pack(itertools.repeat(Document("hello " * 100)), tokenizer, 32)


# --- chat templates ---

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate:\n' ~ message.role) }}{% endif %}"
    "{{ bos_token + message.content.strip() + eos_token }}{% endfor %}"
)
TALK = [{"role": "user", "content": " ¿Qué? 🙂 <s>\n"}, {"role": "assistant", "content": "Sí."}]


@pytest.mark.parametrize(
    ("template", "ask", "expected"),
    [
        (CHATML, False, "<|im_start|>user\n ¿Qué? 🙂 <s>\n<|im_end|>\n<|im_start|>assistant\nSí.<|im_end|>\n"),
        (STRICT, False, "<s>¿Qué? 🙂 <s></s><s>Sí.</s>"),
        (small.CHAT, False, "<user> ¿Qué? 🙂 <s>\n\n<assistant>Sí.\n"),
        ("{{ messages | length }}{% if add_generation_prompt %}!{% endif %}", True, "2!"),
    ],
)
def test_the_text_by_hand(template: str, ask: bool, expected: str) -> None:
    assert render_chat(small.tokenizer(template), TALK, add_generation_prompt=ask) == expected


def test_a_prompt_is_encoded_as_transformers_does_it() -> None:
    for template in (CHATML, STRICT):
        tokenizer = small.tokenizer(template)
        expected = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
        assert list(tokens_of(Prompt.of("hi"), tokenizer, chat=True)) == expected["input_ids"]
    assert has_chat_template(small.tokenizer(CHATML)) and not has_chat_template(small.tokenizer())


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_a_template_of_the_processor_is_the_tokenizers_and_travels(name: str, tmp_path: Path) -> None:
    folder, out = small.save(tmp_path / "model"), tmp_path / "out"
    assert not has_chat_template(load_tokenizer(folder))
    (folder / name).write_text(json.dumps({"chat_template": CHATML}), encoding="utf-8")
    compressor.compress(str(folder), out, experts=4, strategy="model-centric", evaluate=False)
    expected = tokens_of(Prompt.of("hi"), small.tokenizer(CHATML), chat=True)
    for place in (folder, out):
        tokenizer = load_tokenizer(place)
        assert tokens_of(Prompt.of("hi"), tokenizer, chat=True) == expected
        assert render_chat(tokenizer, TALK) == render_chat(small.tokenizer(CHATML), TALK)
    (folder / "chat_template.jinja").write_text(small.CHAT, encoding="utf-8")
    assert load_tokenizer(folder).chat_template == small.CHAT


def test_a_template_that_fails_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = write(tmp_path, '\n{"messages": [{"role": "assistant", "content": "x"}]}\n', "a.jsonl")
    message = r"line 2: the chat template cannot take its messages \(Roles must alternate: assistant\)"
    with pytest.raises(CompressionError, match=message):
        run(path, small.tokenizer(STRICT))
    failing = small.tokenizer("{{ raise_exception('no') }}")
    with pytest.raises(CompressionError, match=r"the chat template cannot take its messages \(no\)"):
        tokens_of(Prompt.of("hi"), failing, chat=True)


def test_a_template_runs_in_a_sandbox() -> None:
    with pytest.raises(Exception, match="unsafe"):
        render_chat(small.tokenizer("{{ ''.__class__.__mro__[1].__subclasses__() }}"), TALK)
