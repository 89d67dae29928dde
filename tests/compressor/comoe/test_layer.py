import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compressor.comoe.layer import (
    LoraExperts,
    comoe_layers,
    inject,
    load_adapters,
    model_contrast,
    save_adapters,
    watching,
)
from compressor.comoe.options import ComoeConfig, TuningOptions
from compressor.errors import CompressionError
from tests.support import zoo
from tests.support.command_line import names
from tests.support.small import edit_json
from tests.support.tuning_setups import changed


def layer(experts: int = 5, top_k: int = 2, seed: int = 0) -> LoraExperts:
    generator = torch.Generator().manual_seed(seed)
    made = LoraExperts(nn.Linear(7, 6), ComoeConfig(rank=3, experts=experts, top_k=top_k, dropout=0.0), generator)
    made.up.data.normal_(generator=generator)
    return made


def tokens(count: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(count, 7, generator=torch.Generator().manual_seed(seed))


def by_the_equations(made: LoraExperts, token: Tensor) -> list[float]:
    """Equations 2 and 3 for one token, in plain numbers."""
    x = token.double().tolist()
    router, down, up = (getattr(made, name).double().tolist() for name in ("router", "down", "up"))
    scores = [math.exp(sum(a * b for a, b in zip(row, x, strict=True))) for row in router]
    top = sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))[: made.top_k]
    gates = {expert: scores[expert] / sum(scores[each] for each in top) for expert in top}
    out = made.base(token).double().tolist()
    for expert, gate in gates.items():
        inner = [sum(a * b for a, b in zip(row, x, strict=True)) for row in down[expert]]
        for place, row in enumerate(up[expert]):
            out[place] += made.scaling * gate * sum(a * b for a, b in zip(row, inner, strict=True))
    return out


@pytest.mark.parametrize(("experts", "top_k"), [(5, 2), (4, 1), (3, 3)])
def test_a_layer_is_what_the_equations_say(experts: int, top_k: int) -> None:
    made, hidden = layer(experts, top_k), tokens()
    expected = torch.tensor([by_the_equations(made, token) for token in hidden], dtype=torch.float32)
    torch.testing.assert_close(made(hidden), expected, rtol=1e-4, atol=1e-5)
    assert made(hidden.reshape(2, 4, 7)).shape == (2, 4, 6)


def test_of_equally_important_experts_the_first_are_chosen() -> None:
    made = layer()
    made.router.data.zero_()
    gates, chosen = made.gates(tokens(3))
    assert chosen.tolist() == [[0, 1]] * 3 and gates.tolist() == [[0.5, 0.5, 0, 0, 0]] * 3


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_injected_model_is_its_base_exactly(name: str, dtype: torch.dtype) -> None:
    model = zoo.build(name).to(dtype)
    batch = zoo.tokens(model, 2, 9, seed=3)
    with torch.no_grad():
        before = model(batch).logits
        inject(model, ComoeConfig(rank=4, experts=3))
        after, training = model(batch).logits, model.train()(batch).logits
    assert torch.equal(before, after) and torch.equal(before, training)
    layers = comoe_layers(model)
    assert len(layers) == 4 * len(model.model.layers) and all(
        made.up.dtype == torch.float32 for made in layers.values()
    )


def test_only_experts_and_routers_are_trained() -> None:
    model = inject(zoo.build("mixtral"), ComoeConfig(rank=4))
    trained = {name.rpartition(".")[2] for name, value in model.named_parameters() if value.requires_grad}
    assert trained == {"router", "down", "up"}
    loss = model(zoo.tokens(model, 1, 6, seed=0)).logits.square().mean()
    loss.backward()
    assert all(made.up.grad is not None and made.up.grad.any() for made in comoe_layers(model).values())
    assert not any(value.grad is not None for value in model.parameters() if not value.requires_grad)


def seen_contrast(made: LoraExperts, hidden: Tensor, mask: Tensor, count: int, seed: int, **more: Any) -> Tensor:
    options = TuningOptions(contrastive_tokens=count, **more)
    with watching({"": made}):
        made(hidden)
        return model_contrast([made], mask, options, torch.Generator().manual_seed(seed))


def test_the_models_loss_is_algorithm_1_over_tokens_that_count() -> None:
    """Which of two chosen experts is the anchor is drawn, so all draws by hand."""
    made, hidden = layer(), tokens(6)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    losses = []
    for token in hidden[mask.flatten().bool()]:
        outputs = [(made.up[expert] @ made.down[expert] @ token).double() for expert in range(5)]
        unit = [vector / vector.norm() for vector in outputs]
        top = made.gates(token[None])[1][0].tolist()
        both = []
        for anchor, positive in (top, top[::-1]):
            near = torch.exp(unit[anchor] @ unit[positive] / 0.07)
            far = sum(torch.exp(unit[anchor] @ unit[each] / 0.07) for each in range(5) if each not in top)
            both.append(float(-torch.log(near / (near + far + 1e-3))))
        losses.append(both)
    found = float(seen_contrast(made, hidden.reshape(2, 3, 7), mask, 0, seed=0))
    possible = [sum(pick) / 3 for pick in torch.cartesian_prod(*map(torch.tensor, losses)).tolist()]
    assert min(abs(found - each) for each in possible) < 1e-4


def test_all_anchors_add_up_as_in_equation_12() -> None:
    made, hidden = layer(6, 3), tokens(4)
    found = seen_contrast(made, hidden, torch.ones(4), 0, seed=0, anchors="all")
    total = 0.0
    for token in hidden:
        outputs = np.stack([(made.up[expert] @ made.down[expert] @ token).detach().numpy() for expert in range(6)])
        outputs = outputs.astype(float) / np.linalg.norm(outputs, axis=1, keepdims=True)
        scores = np.exp(outputs @ outputs.T / 0.07)
        active = made.gates(token[None])[1][0].tolist()
        inactive = [expert for expert in range(6) if expert not in active]
        for anchor in active:
            positive = sum(scores[anchor, other] for other in active if other != anchor)
            total -= math.log(positive / (positive + scores[anchor, inactive].sum() + 1e-3))
    assert found.item() == pytest.approx(total / 4, rel=1e-4)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_one_expert_is_lora_and_dora_of_peft(dora: bool, training: bool) -> None:
    stock = zoo.build("qwen2_moe")  # whose q, k and v have biases
    batch = zoo.tokens(stock, 2, 7, seed=3)
    ours = inject(deepcopy(stock), ComoeConfig(rank=4, experts=1, top_k=1, alpha=6, dropout=0.0, dora=dora))
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], use_dora=dora)
    theirs = peft.get_peft_model(stock, config)
    generator = torch.Generator().manual_seed(2)
    for name, made in comoe_layers(ours).items():
        other = theirs.get_submodule(f"base_model.model.{name}")
        made.up.data.normal_(0, 0.1, generator=generator)
        other.lora_A["default"].weight.data = made.down[0].data.clone()
        other.lora_B["default"].weight.data = made.up[0].data.clone()
        if dora:
            torch.testing.assert_close(made.magnitude[0], other.lora_magnitude_vector["default"].weight)
            made.magnitude.data.mul_(1 + 0.1 * torch.rand(made.magnitude.shape, generator=generator))
            other.lora_magnitude_vector["default"].weight.data = made.magnitude[0].data.clone()
    found, expected = (model.train(training)(batch).logits for model in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for logits in (found, expected):
        logits.square().mean().backward()
    for name, made in comoe_layers(ours).items():
        other = theirs.get_submodule(f"base_model.model.{name}")
        torch.testing.assert_close(made.up.grad[0], other.lora_B["default"].weight.grad, rtol=1e-3, atol=1e-6)


def test_the_contrast_of_dora_experts_is_between_what_they_add() -> None:
    made = layer()
    made = LoraExperts(made.base, changed(made.config, dora=True), torch.Generator().manual_seed(0))
    made.up.data.normal_(generator=torch.Generator().manual_seed(1))
    made.magnitude.data.add_(0.5)
    hidden = tokens(3)
    with watching({"": made}):
        whole = made(hidden)
        (call,) = made.watched or ()
    outputs = made.outputs(call, torch.arange(3))
    gates, _ = made.gates(hidden)
    torch.testing.assert_close(whole, made.base(hidden) + torch.einsum("te,teo->to", gates, outputs))
    weights = made.base.weight + made.scaling * made.up @ made.down  # [E, D_out, D_in]
    weights = weights / weights.norm(dim=2, keepdim=True) * made.magnitude.unsqueeze(2)
    expected = torch.einsum("eoi,ti->teo", weights - made.base.weight, hidden)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "count", "numbers"),
    [
        (None, 3, [0, 1, 2]),
        ("low", 32, [*range(10)]),
        ("middle", 32, [*range(10, 20)]),
        ("low,high", 32, [*range(10), *range(20, 32)]),
        ("high", 2, []),
        ("1-2, 4", 6, [1, 2, 4]),
        ("3-99999999999", 5, [3, 4]),
    ],
)
def test_ranges_of_layers(layers: str | None, count: int, numbers: list[int]) -> None:
    assert sorted(ComoeConfig(layers=layers).decoder_layers(count)) == numbers


def test_only_the_named_decoder_layers_get_experts(tmp_path: Path) -> None:
    model = inject(zoo.build("mixtral"), ComoeConfig(rank=4, layers="1", dora=True))
    assert {name.split(".")[2] for name in comoe_layers(model)} == {"1"}
    save_adapters(model, tmp_path / "out")
    assert comoe_layers(load_adapters(zoo.build("mixtral"), tmp_path / "out")).keys() == comoe_layers(model).keys()


def test_sampled_tokens_hang_on_the_seed_alone() -> None:
    made, hidden = layer(), tokens(64)
    one, same, other = (float(seen_contrast(made, hidden, torch.ones(64), 5, seed)) for seed in (1, 1, 2))
    assert one == same != other
    assert made.watched is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 5}, "5 of 4 experts are to be activated"),
        ({"targets": ("q_proj", "qkv_proj")}, "ends with 'qkv_proj'; they end with .*q_proj"),
        ({"targets": ()}, "targets should have at least 1 item"),
    ],
)
def test_refusals(settings: dict[str, object], message: str) -> None:
    model = zoo.build("mixtral")
    with pytest.raises(CompressionError, match=message):
        inject(model, ComoeConfig(**settings))  # type: ignore[arg-type]
    assert not comoe_layers(model) and all(value.requires_grad for value in model.parameters())


def test_models_with_no_place_for_experts_or_none_to_save_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match="it has none"):
        inject(nn.Sequential(nn.ReLU()), ComoeConfig())
    with pytest.raises(CompressionError, match="already"):
        inject(inject(zoo.build("mixtral"), ComoeConfig()), ComoeConfig())
    with pytest.raises(CompressionError, match="no LoRA experts"):
        save_adapters(zoo.build("mixtral"), tmp_path / "adapters")
    assert names(tmp_path) == []


def trained(seed: int = 0) -> Any:
    model = inject(zoo.build("mixtral"), ComoeConfig(rank=4, experts=3))
    generator = torch.Generator().manual_seed(seed)
    for layer in comoe_layers(model).values():
        layer.up.data.normal_(0, 0.1, generator=generator)
    return model


def test_adapters_come_back_exactly(tmp_path: Path) -> None:
    model = trained()
    save_adapters(model, tmp_path / "adapters")
    fresh = load_adapters(zoo.build("mixtral"), tmp_path / "adapters")
    batch = zoo.tokens(model, 2, 9, seed=3)
    with torch.no_grad():
        logits = fresh(batch).logits
        assert torch.equal(model(batch).logits, logits) and not torch.equal(zoo.build("mixtral")(batch).logits, logits)
    assert names(tmp_path / "adapters") == ["adapters.safetensors", "comoe.json"]
    assert names(tmp_path) == ["adapters"]
    content = json.loads((tmp_path / "adapters" / "comoe.json").read_text())
    assert content["format"] == "moe-compressor-comoe/1" and content["config"]["targets"][0] == "q_proj"
    assert content["layers"]["model.layers.1.self_attn.v_proj"] == [32, 32]


def test_another_base_model_is_refused_by_the_layer(tmp_path: Path) -> None:
    save_adapters(trained(), tmp_path / "adapters")
    wide = zoo.build("mixtral", num_key_value_heads=4)
    with pytest.raises(CompressionError, match=r"layer 'model.layers.0.self_attn.k_proj' is 32 by 32 .* 32 by 64"):
        load_adapters(wide, tmp_path / "adapters")
    assert not comoe_layers(wide)
    with pytest.raises(CompressionError, match="in this model missing"):
        load_adapters(zoo.build("mixtral", num_hidden_layers=1), tmp_path / "adapters")


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    save_adapters(trained(), folder)
    with pytest.raises(CompressionError, match="exists already"):
        save_adapters(trained(), folder)
    tensors = load_file(folder / "adapters.safetensors")
    first = min(tensors)
    for damage in ({first: tensors[first][:1].contiguous()}, {"extra": torch.zeros(1)}):
        save_file({**tensors, **damage}, folder / "adapters.safetensors")
        model = zoo.build("mixtral")
        with pytest.raises(CompressionError, match=r"does not fit the comoe\.json beside it"):
            load_adapters(model, folder)
        assert not comoe_layers(model)
    edit_json(folder / "comoe.json", lambda content: content["config"].update(top_k=9))
    with pytest.raises(CompressionError, match="9 of 3 experts are to be activated"):
        load_adapters(zoo.build("mixtral"), folder)
    with pytest.raises(CompressionError, match="holds no comoe"):
        load_adapters(zoo.build("mixtral"), tmp_path)
