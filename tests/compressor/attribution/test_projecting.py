from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.attribution.figures import Output, Sender
from compressor.attribution.measure import attribute
from compressor.checkpoint.source import locate
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Silent
from tests.support import zoo
from tests.support.ablation import TOKEN, Frozen, ranking_change
from tests.support.opened_models import batches, calibration

TWO = {"rel": 1e-4, "abs": 1e-6}
CORRECTED = ("beam", "deepseek_v3", "nemotron_h")  # rank by sigmoid scores and a correction bias, others by logits
OTHERS = ("mixtral", "granitemoe", "minimax", "phimoe", "flex_olmo", "gemma4", "gpt_oss", "cohere2_moe", "qwen2_moe")
DEEPER: dict[str, dict[str, Any]] = {  # layers that lie between a component and a router
    "mixtral": {"num_hidden_layers": 3},
    "granitemoe": {"num_hidden_layers": 3},
    "phimoe": {"num_hidden_layers": 3},
    "minimax": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
}
PARTS = ("self_attn", "mlp", "mixer", "mlp.experts", "mlp.shared_experts", "mixer.experts", "mixer.shared_experts",
         "block_sparse_moe.experts", "experts", "mlp.shared_expert", "mlp.shared_expert_gate")  # fmt: skip


def frozen(stock: PreTrainedModel, model: OpenModel, ids: Tensor) -> Frozen:
    """The brute force: the stock model in float64, its components by name."""
    stock.double().set_experts_implementation("eager")
    layer_names, layers = model.architecture.decoder_layers, model.architecture.layers
    modules = dict(stock.named_modules())
    blocks = {layer.block for layer in layers if layer.block not in layer_names}
    parts = [
        f"{decoder_layer}.{part}"
        for decoder_layer in layer_names
        for part in PARTS
        if f"{decoder_layer}.{part}" in modules
    ]
    scored = {layer.name: f"{layer.router}.proj" if hasattr(modules[layer.router], "proj") else layer.router
              for layer in layers}  # fmt: skip
    return Frozen(stock, layer_names, layers, [part for part in parts if part not in blocks], scored, ids)


def removal(reference: Frozen, sender: Sender) -> dict[str, Tensor]:
    if sender.kind == "token":
        return reference.whole(TOKEN)
    if sender.kind == "moe":
        decoder_layer = sender.module
        within = [part for part in reference.parts if part.startswith(f"{decoder_layer}.") and "attn" not in part]
        return reference.whole(*within)
    if sender.kind == "expert":
        assert sender.number is not None
        return reference.expert(sender.module, sender.number)
    if sender.kind == "head":
        assert sender.number is not None
        return reference.head(sender.module, sender.number, reference.model.config.num_attention_heads)
    return reference.whole(sender.module)


@pytest.mark.parametrize("name", [*CORRECTED, *OTHERS])
def test_sub_scores_are_what_a_removal_takes_from_the_logits(name: str, tmp_path: Path) -> None:
    stock = zoo.build(name, **DEEPER.get(name, {}))
    stock.save_pretrained(tmp_path)
    model = open_model(locate(str(tmp_path)), "float32", "cpu")
    parts = batches(stock)
    found = attribute(model, calibration(parts), Silent())
    reference = frozen(stock, model, torch.cat(parts))
    checked = set()
    for sender in found.senders:
        some = sender.number in (None, 1, 6)
        unprojected = sender.kind == "head" and sender.module not in reference.projected
        if sender.kind in ("other", "bias") or not some or unprojected:
            continue
        lost = reference.sub_scores(removal(reference, sender))
        checked.add(sender.kind)
        for number, layer in enumerate(model.architecture.layers):
            if sender.influence[number] is not None:
                compare(sender, number, lost[layer.name], reference, layer.router if name in CORRECTED else None)
            else:
                assert float(lost[layer.name].abs().max()) < 1e-9
    assert {"token", "attention", "head", "moe", "expert"} <= checked
    for output in found.outputs:
        check_size(output, reference)


def check_size(output: Output, reference: Frozen) -> None:
    """How large an expert's outputs are, from the stock module on the tokens that came to it."""
    norms = reference.alone(output.module, output.expert).norm(dim=-1)
    assert output.tokens == len(norms)
    if len(norms):
        assert output.mean_norm == pytest.approx(float(norms.mean()), rel=1e-4)
        assert output.max_norm == pytest.approx(float(norms.max()), rel=1e-4)
        entry = reference.alone(output.module, output.expert).abs().max()
        assert output.max_entry == pytest.approx(float(entry), rel=1e-4)


def compare(sender: Sender, number: int, scores: Tensor, reference: Frozen, corrected: str | None) -> None:
    """One sender's figures for one receiver are those of these sub-scores [T, E]; the router may be `corrected`."""
    name = reference.layers[number].name
    where = f"{sender.name} on {name}"
    assert sender.influence[number] == pytest.approx(float(scores.var(-1, correction=0).mean()), **TWO), where
    assert sender.positive[number] == pytest.approx(float(scores.clamp(min=0).mean()), **TWO), where
    assert sender.negative[number] == pytest.approx(float(scores.clamp(max=0).mean()), **TWO), where
    logits = reference.logits[name]
    together = (scores * (logits - logits.mean(-1, keepdim=True))).mean()
    assert sender.covariance[number] == pytest.approx(float(together), **TWO), where
    if sender.kind == "head":
        assert sender.rank_change[number] is None
        return
    both = [logits, logits - scores]
    if corrected is not None:
        both = [values.sigmoid() + reference.model.get_submodule(corrected).e_score_correction_bias for values in both]
    expected = ranking_change(*both, reference.chosen[name])
    one_swap = 2.1 / reference.chosen[name].numel()  # nearly equal experts may change places with the rounding
    assert sender.rank_change[number] == pytest.approx(expected, abs=one_swap), where
