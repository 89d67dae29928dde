import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from compressor.answers.answering import read_facts
from compressor.answers.decoding import choose, probabilities
from compressor.answers.onnx import UNFINISHED, stream_text
from compressor.answers.options import GenerationOptions
from compressor.answers.prompts import Prompt, tokens_of
from compressor.answers.stock import load_writing
from compressor.errors import CompressionError
from tests.support import small, zoo


@pytest.mark.parametrize(
    ("generation", "config", "stops"),
    [
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 5}, {3, 4}),
        ({}, {"eos_token_id": 0}, {0}),
        (None, {"text_config": {"eos_token_id": 7}}, {7}),
        (None, {"eos_token_id": None}, set()),
    ],
)
def test_where_end_tokens_are_looked_for(generation: Any, config: Any, stops: set[int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_facts(tmp_path).stops == stops
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(CompressionError, match="no token id"):
        read_facts(tmp_path)


def test_sampling_at_its_limits() -> None:
    assert probabilities(torch.tensor([0.1, 0.4, 0.2, 0.3]).log(), 1e-300, None, None).tolist() == [0, 1, 0, 0]
    assert probabilities(torch.zeros(4), 1.0, 1, None).tolist() == [1, 0, 0, 0]


@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.2, 3),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.none() | st.floats(0.05, 1),
)
def test_distribution_is_that_of_the_stock_warpers(seed: int, temperature: float, top_k: Any, top_p: Any) -> None:
    logits = 3 * torch.randn(24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scores = TemperatureLogitsWarper(temperature)(None, logits[None])
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None:
        scores = TopPLogitsWarper(top_p)(None, scores)
    torch.testing.assert_close(probabilities(logits, temperature, top_k, top_p), scores.softmax(-1)[0])


def test_logits_that_are_not_finite_are_refused() -> None:
    number = torch.zeros(1, dtype=torch.float64)
    for value in (torch.nan, torch.inf):
        with pytest.raises(CompressionError, match="not finite"):
            choose(torch.tensor([[0.0, value]]), GenerationOptions(), number)
    assert choose(torch.tensor([[-torch.inf, 0.0]]), GenerationOptions(), number) == 1  # ruled out, which is no fault


def test_models_that_cannot_write_text_are_refused(tmp_path: Path) -> None:
    zoo.save("openai_privacy_filter", tmp_path / "filter")
    zoo.save("diffusion_gemma", tmp_path / "diffusion")
    small.edit_tensors(small.save(tmp_path / "holed"), lambda tensors: tensors.pop("model.norm.weight"))
    for name, message in (
        ("filter", "does not generate text"),
        ("diffusion", "does not generate token by token"),
        ("holed", "lacks 1 tensors that its .*, such as 'model.norm.weight'"),
    ):
        with pytest.raises(CompressionError, match=message):
            load_writing(tmp_path / name, "cpu", "auto")


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
    return list(stream_text(tokenizer, before, tokens))


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


def test_what_is_out_stays_when_a_decoder_takes_it_back() -> None:
    tokenizer = sentence_pieces()
    good, bad = tokenizer("é", add_special_tokens=False)["input_ids"][-2:], tokenizer.convert_tokens_to_ids("<0xFF>")
    assert tokenizer.decode([*good, bad]) == 3 * UNFINISHED  # the whole run of bytes, of which é was out already
    assert streamed(tokenizer, [*good, bad]) == ["", "é", "", 2 * UNFINISHED]
    letter = tokenizer.convert_tokens_to_ids("a")
    assert "".join(streamed(tokenizer, [*good, bad, letter])) == f"é{2 * UNFINISHED}a"
    more = tokenizer("🙂", add_special_tokens=False)["input_ids"][-4:]
    assert streamed(tokenizer, [*good, *more]) == ["", "é", "", "", "", "🙂", ""]


def test_text_comes_as_soon_as_it_is_whole() -> None:
    tokens = TOKENIZERS["bytes"]("né🙂")["input_ids"]
    assert streamed(TOKENIZERS["bytes"], tokens) == ["n", "", "é", "", "", "", "🙂", ""]
    assert streamed(TOKENIZERS["bytes"], tokens[:-1]) == ["n", "", "é", "", "", "", UNFINISHED]


def test_special_tokens_do_not_show_nor_eat_a_space() -> None:
    tokenizer = sentence_pieces()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokens = tokenizer("ab<turn> cd", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_tokens_to_ids("<turn>") in tokens
    assert "".join(streamed(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_prompts_become_token_ids() -> None:
    tokenizer = small.tokenizer()
    assert tokens_of(Prompt.of(""), tokenizer) == (tokenizer.bos_token_id,)
    with pytest.raises(CompressionError, match="the prompt is empty"):
        tokens_of(Prompt.of(""), sentence_pieces())
