"""Prompts to tokens and tokens to pieces of text: whole characters, the tokenizer's spaces, bytes that are no text."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compressor.errors import CompressionError
from compressor.evaluation.generate import UNFINISHED, TextStream, encode_prompt
from tests import small


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Letters after marks for spaces, bytes for all else, and a decoder that drops the space that opens a text."""
    alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh"]
    merges = [("▁", letter) for letter in "abcdefgh"]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


TOKENIZERS = {"bytes": small.tokenizer(), "sentence pieces": sentence_pieces()}


def streamed(tokenizer: Any, tokens: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    stream = TextStream(tokenizer, before)
    return [*(stream.push(token) for token in tokens), stream.finish()]


@settings(deadline=None, max_examples=80)
@given(
    kind=st.sampled_from(sorted(TOKENIZERS)),
    text=st.text(st.sampled_from(["a", "b", "c", " ", "\n", "é", "你", "🙂", "ﷺ", "́"]), min_size=1, max_size=12),
    split=st.integers(0, 40),
)
def test_pieces_join_to_the_whole_and_hold_no_half_character(kind: str, text: str, split: int) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer(text)["input_ids"]
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    pieces = streamed(tokenizer, tokens)
    assert "".join(pieces) == whole and UNFINISHED not in "".join(pieces) and pieces[-1] == ""
    starts = [cut for cut in range(len(tokens)) if UNFINISHED not in tokenizer.decode(tokens[:cut])]
    cut = starts[split % len(starts)]  # after a prompt that ends with a whole character
    prompt = tokenizer.decode(tokens[:cut], skip_special_tokens=True)
    assert prompt + "".join(streamed(tokenizer, tokens[cut:], tokens[:cut])) == whole


@settings(deadline=None, max_examples=80)
@given(data=st.lists(st.sampled_from([0x61, 0xC3, 0xA9, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0xFF]), max_size=14))
def test_bytes_that_are_no_text_show_as_the_decoder_shows_them(data: list[int]) -> None:
    tokenizer, tokens = TOKENIZERS["bytes"], [byte_token(byte) for byte in data]
    assert "".join(streamed(tokenizer, tokens)) == bytes(data).decode("utf-8", errors="replace")


def test_what_is_out_stays_when_a_decoder_takes_it_back() -> None:
    tokenizer = sentence_pieces()
    good, bad = tokenizer("é", add_special_tokens=False)["input_ids"][-2:], tokenizer.convert_tokens_to_ids("<0xFF>")
    assert tokenizer.decode([*good, bad]) == 3 * UNFINISHED  # the whole run of bytes, of which é was out already
    assert streamed(tokenizer, [*good, bad]) == ["", "é", "", UNFINISHED]
    letter = tokenizer.convert_tokens_to_ids("a")
    assert "".join(streamed(tokenizer, [*good, bad, letter])) == f"é{UNFINISHED}a"
    assert "".join(streamed(tokenizer, [*good, *[bad] * 6, letter])) == f"é{6 * UNFINISHED}a"


def byte_token(byte: int) -> int:
    """The byte-level tokenizer's id of one byte: its alphabet is sorted, after the special tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    letter = chr(byte) if byte in printable else chr(256 + others.index(byte))
    return int(TOKENIZERS["bytes"].convert_tokens_to_ids(letter))


def test_text_comes_as_soon_as_it_is_whole() -> None:
    tokens = TOKENIZERS["bytes"]("né🙂")["input_ids"]
    assert streamed(TOKENIZERS["bytes"], tokens) == ["n", "", "é", "", "", "", "🙂", ""]
    assert streamed(TOKENIZERS["bytes"], tokens[:-1]) == ["n", "", "é", "", "", "", UNFINISHED]


def test_a_long_text_is_not_decoded_again_and_again() -> None:
    class Counting:
        longest = 0

        def decode(self, tokens: list[int], **options: Any) -> str:
            self.longest = max(self.longest, len(tokens))
            return str(TOKENIZERS["bytes"].decode(tokens, **options))

    counting = Counting()
    streamed(counting, TOKENIZERS["bytes"]("some text, 你好 " * 30)["input_ids"])
    assert counting.longest <= 8


def test_special_tokens_do_not_show_nor_eat_a_space() -> None:
    tokenizer = sentence_pieces()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokens = tokenizer("ab<turn> cd", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_tokens_to_ids("<turn>") in tokens
    assert "".join(streamed(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_prompts_become_token_ids() -> None:
    plain, chatting = small.tokenizer(), small.tokenizer(small.CHAT)
    assert encode_prompt(plain, "", chat=False) == (plain.bos_token_id,)
    assert plain.decode(encode_prompt(chatting, "hi", chat=True)) == "<user>hi\n"
    with pytest.raises(CompressionError, match="no chat template"):
        encode_prompt(plain, "hi", chat=True)
    with pytest.raises(CompressionError, match="the prompt is empty"):
        encode_prompt(sentence_pieces(), "", chat=False)
    failing = small.tokenizer("{{ raise_exception('system first') }}")
    with pytest.raises(CompressionError, match=r"chat template fails \(.*system first"):
        encode_prompt(failing, "hi", chat=True)
