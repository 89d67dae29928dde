"""The first tokens of a long text are those of the whole text, whatever the kind of tokenizer, and come cheaply."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from compressor.data.demo import load_documents
from compressor.model import tokenizer as module
from compressor.model.tokenizer import first_part
from tests.compressor.answers.test_decoding import sentence_pieces
from tests.support import small

WORDS = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = "<|end|>"
EXTRA = [" ", "  ", "    ", "\n", "\n\n", "aa", "aaaa", "你", "你好", "é", "🙂"]  # in the vocabularies, if seen


def bpe() -> tuple[Tokenizer, Any]:
    inner = Tokenizer(models.BPE())
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), bytes_only])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return inner, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)


def unigram() -> tuple[Tokenizer, Any]:
    """Pieces over all of the text, as if it were one word."""
    inner = Tokenizer(models.Unigram())
    inner.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    unknown = "<unk>"
    return inner, trainers.UnigramTrainer(vocab_size=300, unk_token=unknown, special_tokens=[unknown])


def word_pieces() -> tuple[Tokenizer, Any]:
    inner = Tokenizer(models.WordPiece(unk_token="<unk>"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return inner, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)


def decomposing() -> tuple[Tokenizer, Any]:
    inner, trainer = bpe()
    inner.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Strip()])
    return inner, trainer


TRAINED: dict[str, Callable[[], tuple[Tokenizer, Any]]] = {
    "BPE": bpe, "unigram": unigram, "word pieces": word_pieces, "decomposing": decomposing,
}  # fmt: skip
KINDS = [*TRAINED, "bytes", "sentence pieces", "python"]


@cache
def tokenizer_of(kind: str) -> Any:
    if kind not in TRAINED:
        return {"bytes": small.tokenizer, "sentence pieces": sentence_pieces, "python": ByT5Tokenizer}[kind]()
    inner, trainer = TRAINED[kind]()
    inner.train_from_iterator([*(text for text, _ in load_documents("heldout")[:200]), *(4 * EXTRA)], trainer)
    inner.add_special_tokens([SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=10**9)
    assert 250 < len(made) < 700
    return made


PIECES = [
    *EXTRA, "the ", "of", " quick", "brown ", "12", "3", ",", ".\n", "\r\n", "\t", "'s", "e\u0301", "\u0301", "\ufdfa",
    "\u200b", SPECIAL, SPECIAL[:3], "<unk>", "Question: What ", "def f(x):\n        return x",
]  # fmt: skip
TEXTS = st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 12)), min_size=1, max_size=60).map(
    lambda parts: " so".join(piece * times for piece, times in parts)  # an endless run has no beginning of its own
)


@given(st.sampled_from(KINDS), TEXTS, st.integers(1, 60))
@example("BPE", "a" * 3000, 10)
@example("BPE", " " * 3000 + "the", 10)
def test_they_are_those_of_the_whole_text(kind: str, text: str, most: int) -> None:
    tokenizer = tokenizer_of(kind)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MARGIN", 64)  # so that some texts are long ones
        assert first_part(tokenizer, text, most)[1] == whole[:most]


FLOODS = {
    "words": "the quick brown fox " * 100_000, "no spaces": "thequickbrownfox" * 120_000, "spaces": " " * 2_000_000,
    "line breaks": "\n" * 2_000_000, "special tokens": SPECIAL * 300_000, "marks": "e" + "\u0301" * 2_000_000,
    "ligatures": "\ufdfa" * 2_000_000, "nothing to see": "\u200b" * 2_000_000,
}  # fmt: skip


@pytest.mark.parametrize(
    "flood", [pytest.param(name, marks=() if name in ("words", "spaces") else pytest.mark.full) for name in FLOODS]
)
@pytest.mark.parametrize("kind", TRAINED)
def test_no_more_than_needed_is_read_of_a_flood(kind: str, flood: str) -> None:
    given_letters = list[int]()

    def tokenizer(text: str, **options: Any) -> Any:
        given_letters.append(len(text))
        return tokenizer_of(kind)(text, **options)

    _, found = first_part(tokenizer, FLOODS[flood], 100)
    assert given_letters == [96 * (100 + 4096)]
    assert len(found) == 100 or flood not in ("words", "special tokens")
