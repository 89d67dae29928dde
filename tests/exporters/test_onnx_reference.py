"""What the stock model is asked: every kind of case, ordinary tokens, and the same greedy tokens as `generate`."""

from types import SimpleNamespace

import pytest
import torch

from compressor.errors import CompressionError
from exporters import onnx_reference
from exporters.onnx_reference import Reference
from tests import zoo


@pytest.fixture(scope="module")
def reference() -> Reference:
    """What a tiny Mixtral says."""
    return onnx_reference.observe(zoo.build("mixtral", max_position_embeddings=512), past=True, tokens=12)


def test_every_required_case_is_asked(reference: Reference) -> None:
    names = {case.name: case for case in reference.cases}
    shapes = {tuple(case.tokens.shape) for name, case in names.items() if name.startswith("prefill")}
    assert shapes == set(onnx_reference.SHAPES) and len(shapes) >= 5
    assert 1 in names["chunked prefill"].chunks and len(names["chunked prefill"].chunks) > 2
    assert names["left padding"].mask.sum(-1).tolist() == [12, 9, 6]
    assert names["left padding, cached decode"].chunks == (8, 1, 1, 1, 1)
    for case in reference.cases:
        assert sum(case.chunks) == case.tokens.shape[1] == case.logits.shape[1]


def test_greedy_tokens_are_those_of_generate(reference: Reference) -> None:
    model = zoo.build("mixtral", max_position_embeddings=512)
    output = model.generate(
        reference.prompt, attention_mask=torch.ones_like(reference.prompt), max_new_tokens=12, do_sample=False,
        eos_token_id=10**6, pad_token_id=0,
    )  # fmt: skip
    assert output[0, 8:].tolist() == reference.greedy.tolist()


def test_tokens_with_a_meaning_are_not_drawn() -> None:
    text = SimpleNamespace(vocab_size=8, unpadded_vocab_size=None, pad_token_id=0, eos_token_id=[2, 3])
    config = SimpleNamespace(image_token_id=5, get_text_config=lambda decoder: text)
    assert onnx_reference.special_tokens(config) == {0, 2, 3, 5}
    assert set(onnx_reference.random_tokens(config, 20, 20, 0).flatten().tolist()) == {1, 4, 6, 7}


def test_a_short_context_cuts_what_is_generated() -> None:
    model = zoo.build("mixtral", num_hidden_layers=1, max_position_embeddings=40)
    reference = onnx_reference.observe(model, past=False, tokens=64)
    assert len(reference.greedy) == 32
    assert max(case.tokens.shape[1] for case in reference.cases) == 40


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(CompressionError, match="DiffusionGemmaForBlockDiffusion does not give one row of logits"):
        onnx_reference.observe(zoo.build("diffusion_gemma"), past=False)
