"""Tokenizers that transformers makes up for want of files are refused wherever one is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

import compressor
from compressor.answers.prompts import encode_text
from compressor.answers.tasks import EvaluationOptions
from compressor.data.documents import Document, pack
from compressor.errors import CompressionError
from compressor.model.tokenizer import load_tokenizer
from tests.support import small

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for which transformers makes up a tokenizer of one token."""
    folder = small.save(tmp_path_factory.mktemp("made-up") / "model", "qwen3_moe")
    for name in TOKENIZER:
        (folder / name).unlink()
    assert AutoTokenizer.from_pretrained(folder)("some text")["input_ids"] == []
    return folder


def compress(folder: Path, text: Path) -> Any:
    return compressor.compress(str(folder), text.parent / "out", experts=4, calibration=[str(text)], samples=2)


def lm_eval(folder: Path, text: Path) -> Any:
    from compressor.answers.lm_eval_models import loaded_model
    from compressor.checkpoint.source import locate

    with loaded_model(locate(str(folder)), EvaluationOptions(tasks=("demo-skills",))) as model:
        return model


USERS: dict[str, Callable[[Path, Path], Any]] = {
    "compress": compress,
    "gate": lm_eval,
}


@pytest.mark.parametrize("user", USERS)
def test_a_made_up_tokenizer_is_refused(user: str, checkpoint: Path, tmp_path: Path) -> None:
    text = small.text_file(tmp_path)
    with pytest.raises(CompressionError, match=r"no file there defines the .* that transformers makes up"):
        USERS[user](checkpoint, text)
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
    """Knows four letters, and what ends a text."""
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
        encode_text(tokenizer, "hello")
    assert {5, 3, 4} < set(pack(map(Document, ["hello", "CAT", " "]), tokenizer, 32).ids.tolist())
    assert encode_text(tokenizer, "CAT") == (5, 3, 4)


def test_a_stream_without_end_is_not_read_for_ever() -> None:
    taken = 0

    def stream() -> Any:
        nonlocal taken
        while taken < 10**6:
            taken += 1
            yield Document("hello " * 100)

    tokenizer = words()
    tokenizer.eos_token = None
    with pytest.raises(CompressionError, match="has no token for the text"):
        pack(stream(), tokenizer, 32)
    assert taken < 1000
