"""A head and an embedding that the config ties, or does not: what is stored decides, as in stock transformers."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import compressor
from compressor.checkpoint.reader import CONFIG
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.opened import open_model, served_model
from compressor.model.streaming import Pass
from tests.support import opened_models, small, zoo

pytestmark = pytest.mark.usefixtures("offline", "hasty")

FLAG = "tie_word_embeddings"
STORED = ("embedding", "head", "equal", "different")
FLAGS: dict[str, dict[str, Any]] = {
    "tied": {"": True}, "untied": {"": False}, "absent": {}, "text": {"text_config": True},
}  # fmt: skip
WITH_PICTURES = ("qwen3_vl_moe", "ernie4_5_vl_moe")
FAST = [*product(("mixtral",), STORED, ("tied",)), ("mixtral", "different", "untied")]
CASES = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.full)
    for case in product(("mixtral", "gemma4", *WITH_PICTURES), STORED, FLAGS)
    if case[2] != "text" or case[0] in WITH_PICTURES
]


def write(folder: Path, family: str, stored: str, flags: str) -> None:
    zoo.build(family, **{FLAG: False}).save_pretrained(folder)
    small.tokenizer().save_pretrained(folder)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
        if stored == "head":
            del tensors[embedding]
        elif stored == "equal":
            tensors["lm_head.weight"] = tensors[embedding].clone()
        elif stored == "embedding":
            tensors.pop("lm_head.weight", None)
        else:
            tensors["lm_head.weight"] = tensors[embedding].flip(0).contiguous()

    small.edit_tensors(folder, change)

    def flag(config: dict[str, Any]) -> None:
        for node in (config, config.get("text_config", {})):
            node.pop(FLAG, None)
        for name, value in FLAGS[flags].items():
            (config[name] if name else config)[FLAG] = value

    small.edit_json(folder / CONFIG, flag)


def ends(model: Any) -> list[torch.Tensor]:
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


@pytest.mark.parametrize(("family", "stored", "flags"), zoo.few(CASES, 6))
def test_what_stock_transformers_loads_runs_and_is_written(
    family: str, stored: str, flags: str, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    write(base, family, stored, flags)
    stock = zoo.reload(family, base)
    loads = type(stock).from_pretrained(base, output_loading_info=True)[1]
    if loads["missing_keys"]:  # stock draws one of the two at random
        with pytest.raises(CompressionError, match=r"lacks 1 tensors .*(embed_tokens|lm_head)\.weight"):
            open_model(locate(str(base)), "float32", "cpu")
        return
    tokens = zoo.tokens(stock)
    model = open_model(locate(str(base)), "float32", "cpu")
    streamed = opened_models.logits(Pass(model, (tokens,), to_end=True))[0]
    torch.testing.assert_close(streamed, zoo.logits(stock, tokens), rtol=1e-4, atol=1e-4)
    embedding, head = ends(stock)
    assert served_model(model).tied == (embedding.data_ptr() == head.data_ptr())

    outputs = {"disk": base, "memory": stock}
    for place, source in outputs.items():
        out = tmp_path / place
        more: dict[str, Any] = {} if place == "disk" else {"tokenizer": small.tokenizer()}
        compressor.compress(source, out, experts=4, strategy="model-centric", correct="none", evaluate=False, **more)
        smaller = zoo.reload(family, out)
        for before, after in zip(ends(stock), ends(smaller), strict=True):
            assert torch.equal(before, after)
        streamed = opened_models.logits(Pass(open_model(locate(str(out)), "float32", "cpu"), (tokens,), to_end=True))[0]
        torch.testing.assert_close(streamed, zoo.logits(smaller, tokens), rtol=1e-4, atol=1e-4)
        tied = ends(smaller)[0].data_ptr() == ends(smaller)[1].data_ptr()
        assert tied or not smaller.config.tie_word_embeddings  # which servers believe
