"""What the stock model is asked: every kind of case, and ordinary tokens."""

from types import SimpleNamespace

import pytest

from compressor.errors import CompressionError
from exporters.onnx.reference import CONTINUED, SHAPES, Reference, random_tokens, special_tokens
from tests import zoo
from tests.exporters.answers import observe


@pytest.fixture(scope="module")
def reference() -> Reference:
    """What a tiny Mixtral says."""
    return observe(zoo.build("mixtral", max_position_embeddings=512), past=True, tokens=12)


def test_every_required_case_is_asked(reference: Reference) -> None:
    names = {case.name: case for case in reference.cases}
    shapes = {tuple(case.tokens.shape) for name, case in names.items() if name.startswith("prefill")}
    assert shapes == set(SHAPES) and len(shapes) >= 5
    assert 1 in names["chunked prefill"].chunks and len(names["chunked prefill"].chunks) > 2
    assert names["left padding"].mask.sum(-1).tolist() == [12, 9, 6]
    assert names["left padding, cached decode"].chunks == (8, 1, 1, 1, 1)
    assert names[CONTINUED].chunks == (8, *[1] * 11)
    for case in reference.cases:
        assert sum(case.chunks) == case.tokens.shape[1] == case.logits.shape[1]


def test_tokens_with_a_meaning_are_not_drawn() -> None:
    text = SimpleNamespace(vocab_size=8, unpadded_vocab_size=None, pad_token_id=0, eos_token_id=[2, 3])
    config = SimpleNamespace(image_token_id=5, get_text_config=lambda decoder: text)
    assert special_tokens(config) == {0, 2, 3, 5}
    assert set(random_tokens(config, 20, 20, 0).flatten().tolist()) == {1, 4, 6, 7}


def test_a_short_context_cuts_what_is_generated() -> None:
    model = zoo.build("mixtral", num_hidden_layers=1, max_position_embeddings=40)
    reference = observe(model, past=False, tokens=64)
    assert reference.cases[-1].tokens.shape == (1, 39) and reference.cases[-1].name == CONTINUED
    assert max(case.tokens.shape[1] for case in reference.cases[:-1]) == 40


def test_a_model_of_another_kind_is_refused() -> None:
    message = "DiffusionGemmaForBlockDiffusion cannot be exported: it does not give one row of logits"
    with pytest.raises(CompressionError, match=message):
        observe(zoo.build("diffusion_gemma"), past=False)
