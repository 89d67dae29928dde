"""Quantised checkpoints give, whole or one layer at a time, the weights that our own formulas give."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
)
from transformers.utils.quantization_config import Mxfp4Config

import compressor
from compressor.answers.stock import load_writing
from compressor.checkpoint.quantized import dequantizer, refuse_unread_scales
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.opened import load_whole, open_model
from tests.support import small, zoo
from tests.support.per_expert_checkpoints import FUSED, save_packed
from tests.support.quantized import (
    MODELOPT,
    plain_model,
    save_autofp8,
    save_compressed_tensors,
    save_fp8,
    save_modelopt,
    save_mxfp4,
)

Save = Callable[[Path], None]

HALF_A_BLOCK = {"qk_rope_head_dim": 8}  # 40 rows under 3 scales of 16 rows, as DeepSeek's 576 under 5 of 128
HALF_A_BLOCK_EVEN = HALF_A_BLOCK | {"kv_lora_rank": 16}  # 24 rows under 2 scales, which 2 divides

KEYS = {"head_dim": 8, "num_key_value_heads": 1}  # 8 rows, whose zero points fill one row of words
FEW = {"hidden_size": 64, "moe_intermediate_size": 16, **KEYS}

FP8, COMPRESSED = FineGrainedFP8Config, CompressedTensorsConfig
READ_BY_STOCK: dict[str, tuple[Save, type]] = {
    "fp8-qwen3_moe": (save_fp8, FP8),
    "fp8-deepseek_v3": (lambda folder: save_fp8(folder, "deepseek_v3"), FP8),
    "fp8-minimax_m2": (lambda folder: save_fp8(folder, "minimax_m2"), FP8),
    "mxfp4-gpt_oss": (save_mxfp4, Mxfp4Config),
    "float-qwen3_moe": (lambda folder: save_compressed_tensors(folder, "qwen3_moe", "float-quantized"), COMPRESSED),
    "packed-qwen3_moe": (save_compressed_tensors, COMPRESSED),
    "packed-mixtral": (lambda folder: save_compressed_tensors(folder, "mixtral"), COMPRESSED),
}
ALL: dict[str, tuple[Save, type]] = READ_BY_STOCK | {
    "autofp8-matrix": (save_autofp8, FP8),
    "autofp8-row": (lambda folder: save_autofp8(folder, "mixtral", "row"), FP8),
    "autofp8-column": (lambda folder: save_autofp8(folder, "deepseek_v3", "column"), FP8),
    "fp8-ragged": (lambda folder: save_fp8(folder, "deepseek_v3", sizes=HALF_A_BLOCK), FP8),
    "int8-qwen3_moe": (lambda folder: save_compressed_tensors(folder, "qwen3_moe", "int-quantized"), COMPRESSED),
    "naive-int8-mixtral": (lambda folder: save_compressed_tensors(folder, "mixtral", "naive-quantized"), COMPRESSED),
    "nvfp4-qwen3_moe": (lambda folder: save_compressed_tensors(folder, format="nvfp4-pack-quantized"), COMPRESSED),
    "mxfp4-qwen3_moe": (lambda folder: save_compressed_tensors(folder, format="mxfp4-pack-quantized"), COMPRESSED),
    "modelopt-nvfp4": (save_modelopt, COMPRESSED),
    "modelopt-file": (lambda folder: save_modelopt(folder, "mixtral", declared=[MODELOPT]), COMPRESSED),
    "modelopt-config": (lambda folder: save_modelopt(folder, "deepseek_v3", declared=["config.json"]), COMPRESSED),
    "modelopt-fp8": (lambda folder: save_modelopt(folder, algorithm="FP8"), COMPRESSED),
    "modelopt-mixed": (lambda folder: save_modelopt(folder, algorithm="MIXED_PRECISION"), COMPRESSED),
    "packed-asymmetric": (lambda folder: save_compressed_tensors(folder, symmetric=False), COMPRESSED),
    "packed-few-rows": (partial(save_compressed_tensors, symmetric=False, sizes=FEW), COMPRESSED),
    "packed-few-keys": (partial(save_compressed_tensors, family="mixtral", symmetric=False, sizes=KEYS), COMPRESSED),
    "fp8-ragged-even": (lambda folder: save_fp8(folder, "deepseek_v3", sizes=HALF_A_BLOCK_EVEN), FP8),
}


def save(folder: Path, case: str) -> type:
    pytest.importorskip("accelerate")  # stock transformers wants it for FP8
    pytest.importorskip("compressed_tensors")
    write, config_class = ALL[case]
    write(folder)
    return config_class


def stock(folder: Path, config_class: type) -> Any:
    config = config_class(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)


def load_layer(folder: Path, layer: int, dtype: torch.dtype) -> Any:
    partial = open_model(locate(str(folder)), str(dtype).removeprefix("torch."), "cpu").partial
    partial.load(partial.keys_under(f"model.layers.{layer}"))
    return partial.model


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("case", READ_BY_STOCK)
def test_stock_loader_gives_the_hand_dequantised_model(tmp_path: Path, case: str) -> None:
    loaded = stock(tmp_path, save(tmp_path, case)).eval()
    plain = plain_model(tmp_path, torch.bfloat16)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    tokens = zoo.tokens(plain)
    assert torch.equal(zoo.logits(plain, tokens), zoo.logits(loaded, tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("case", zoo.few(ALL, 12))
def test_one_layer_alone_has_the_hand_dequantised_weights(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    save(tmp_path, case)
    layer = load_layer(tmp_path, 1, dtype)
    plain = plain_model(tmp_path, dtype).state_dict()
    for name, tensor in layer.state_dict().items():
        assert tensor.is_meta == (not name.startswith("model.layers.1.")), name
        if not tensor.is_meta:
            assert tensor.dtype == plain[name].dtype, name
            assert torch.equal(tensor, plain[name]), name


@pytest.mark.parametrize("case", ["fp8-qwen3_moe", "nvfp4-qwen3_moe"])
def test_a_whole_model_has_the_hand_dequantised_weights(tmp_path: Path, case: str) -> None:
    save(tmp_path, case)
    loaded, plain = load_whole(tmp_path, dtype=torch.bfloat16), plain_model(tmp_path, torch.bfloat16)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    tokens, writing = torch.tensor([[5, 6, 7]]), load_writing(tmp_path, "cpu", "auto")
    assert torch.allclose(zoo.logits(writing, tokens).float(), zoo.logits(plain, tokens).float(), atol=1e-2)


AWQ = "W4A8_AWQ is not known; known are NVFP4, W4A16_NVFP4, FP8"


@pytest.mark.parametrize(("method", "options", "message"), [
    ("gptq", {"bits": 4}, "can't dequantise 'gptq'"),
    ("modelopt", {"quant_algo": "W4A8_AWQ"}, AWQ), ("modelopt", {"quantization": {"quant_algo": "W4A8_AWQ"}}, AWQ),
    ("compressed-tensors", {"transform_config": {"config_groups": {"R3": {}}}}, "transform_config"),
])  # fmt: skip
def test_what_cannot_be_dequantised_is_refused(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressionError, match=message):
        dequantizer(AutoConfig.for_model("qwen3_moe", quantization_config={"quant_method": method, **options}))


def test_a_scale_that_would_not_be_read_is_refused() -> None:
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    linear = "model.layers.0.self_attn.q_proj.weight"
    for weight, scale in ((experts, "scale_inv"), (experts, "weight_scale"), (linear, "scale"), (linear, "g_idx")):
        with pytest.raises(CompressionError, match=f"{weight}_{scale}: transformers would load"):
            refuse_unread_scales({weight: weight, f"{weight}_{scale}": None})
    with pytest.raises(CompressionError, match=f"{linear}_g_idx: transformers would load"):
        refuse_unread_scales({f"{linear}_packed": linear, f"{linear}_g_idx": None})
    refuse_unread_scales({"model.layers.61.eh_proj.weight": None})
    refuse_unread_scales({linear: linear, "model.layers.0.self_attn.q_proj.input_scale": None})


def test_experts_of_which_only_some_are_quantised_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "packed-qwen3_moe")
    small.edit_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.experts.7.down_proj.weight_scale"))
    with pytest.raises(CompressionError, match=r"experts\.7\.down_proj\.weight_packed' .*none of its scales is read"):
        load_layer(tmp_path, 1, torch.float32)


@pytest.mark.parametrize("groups", [{"config_groups": {}}, {}], ids=["empty", "absent"])
def test_compressed_tensors_without_groups_is_plain_or_refused(groups: dict[str, Any], tmp_path: Path) -> None:
    model = zoo.save("qwen3_moe", tmp_path / "in")
    counts = {"method": "prune", "num_experts": [8] * model.config.num_hidden_layers}
    quantization = {"quant_method": "compressed-tensors", "moe_sparsity_config": counts, **groups}

    def declare(config: dict[str, Any]) -> None:
        config["quantization_config"] = quantization

    small.edit_json(tmp_path / "in" / "config.json", declare)
    for number, strategy in enumerate(("aimer", "model-centric")):
        out = tmp_path / f"out{number}"
        compressor.compress(str(tmp_path / "in"), out, strategy=strategy, experts=4)
        assert "quantization_config" not in (out / "config.json").read_text()
        assert AutoModelForCausalLM.from_pretrained(out).config.num_experts == 4
    save(tmp_path / "packed", "packed-qwen3_moe")
    small.edit_json(tmp_path / "packed" / "config.json", declare)
    with pytest.raises(CompressionError, match=r"weight_packed' .*none of its scales is read; restore"):
        load_layer(tmp_path / "packed", 1, torch.float32)


def test_counts_of_the_base_do_not_outlive_a_drop_of_packed_experts(tmp_path: Path) -> None:
    save(tmp_path / "in", "packed-qwen3_moe")
    counts = {"method": "prune", "num_experts": [8, 8]}
    small.edit_json(
        tmp_path / "in" / "config.json", lambda config: config["quantization_config"].update(moe_sparsity_config=counts)
    )
    compressor.compress(str(tmp_path / "in"), tmp_path / "out", strategy="aimer", experts=4)
    content = (tmp_path / "out" / "config.json").read_text()
    assert "config_groups" in content and "moe_sparsity_config" not in content


@pytest.mark.parametrize("order", ["group", "dynamic", True])
def test_an_order_of_columns_that_is_no_longer_read_is_refused(order: Any, tmp_path: Path) -> None:
    save(tmp_path, "packed-qwen3_moe")
    change_group(tmp_path, actorder=order)
    with pytest.raises(CompressionError, match=r"compressed-tensors checkpoint can't be read: .*actorder"):
        load_layer(tmp_path, 1, torch.float32)


@pytest.mark.parametrize("targets", [["re:.*self_attn.*"], [f"model.layers.{n}.self_attn.{p}_proj" for n in (0, 1)
                                                            for p in "qkvo"]])  # fmt: skip
def test_parameters_are_counted_by_each_tensors_own_group(targets: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "in"
    save(folder, "packed-qwen3_moe")
    wanted = sum(parameter.numel() for parameter in plain_model(folder).parameters())
    assert compressor.inspect(str(folder)).parameters == wanted

    def widen(content: dict[str, Any]) -> None:
        groups = content["quantization_config"]["config_groups"]
        wide = groups["group_0"] | {"targets": targets, "weights": groups["group_0"]["weights"] | {"num_bits": 8}}
        groups["group_1"] = wide

    def twice_as_wide(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "self_attn" in name and name.endswith("_packed")]:
            tensors[name] = tensors[name].repeat(1, 2)

    small.edit_json(folder / "config.json", widen)
    small.edit_tensors(folder, twice_as_wide)
    report = compressor.inspect(str(folder))
    assert report.parameters == wanted
    halved = compressor.compress(str(folder), tmp_path / "out", strategy="aimer", experts=4)
    assert halved.before.parameters == wanted
    assert {outcome.experts: outcome.parameters for outcome in report.outcomes}[4] == halved.after.parameters < wanted


def change_group(folder: Path, **weights: Any) -> None:
    """Have the config of compressed-tensors declare something else."""
    small.edit_json(
        folder / "config.json",
        lambda config: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(weights),
    )


@pytest.mark.parametrize(("case", "name", "value"), [
    *(("packed-qwen3_moe", "num_bits", bits) for bits in (2, 3, 8)), ("packed-asymmetric", "group_size", 32),
    ("nvfp4-qwen3_moe", "num_bits", 8), ("nvfp4-qwen3_moe", "group_size", 32), ("mxfp4-qwen3_moe", "group_size", 16),
])  # fmt: skip
def test_a_config_that_packed_tensors_do_not_fit_is_refused(case: str, name: str, value: int, tmp_path: Path) -> None:
    save(tmp_path, case)
    open_model(locate(str(tmp_path)))
    change_group(tmp_path, **{name: value})
    with pytest.raises(CompressionError, match=rf"tensor '.*weight_packed' has shape .* the .*\b{value}\b.* declares"):
        open_model(locate(str(tmp_path)))


UNSAID: dict[str, Callable[[dict[str, Any]], Any]] = {
    "none": lambda quantization: quantization.pop("format"),
    "dense": lambda quantization: quantization.update(format="dense"),
    "fakequant": lambda quantization: quantization.update(format="fakequant"),
    "no weights": lambda quantization: quantization.update(
        config_groups={"g": {"targets": ["Linear"], "weights": None}}
    ),
}


@pytest.mark.parametrize("change", UNSAID.values(), ids=UNSAID)
def test_scaled_weights_of_no_known_storage_are_refused(change: Callable[[Any], Any], tmp_path: Path) -> None:
    save(tmp_path, "int8-qwen3_moe")
    small.edit_json(tmp_path / "config.json", lambda config: change(config["quantization_config"]))
    with pytest.raises(CompressionError, match=r"config\.json does not say how it is quantised"):
        load_layer(tmp_path, 1, torch.float32)


@pytest.mark.parametrize("lack", [("nvfp4-qwen3_moe", "weight_global_scale"), ("packed-qwen3_moe", "weight_shape")])
def test_a_part_that_all_matrices_lack_is_named(lack: tuple[str, str], tmp_path: Path) -> None:
    save(tmp_path, lack[0])
    small.edit_tensors(tmp_path, lambda tensors: [tensors.pop(name) for name in [*tensors] if name.endswith(lack[1])])
    with pytest.raises(CompressionError, match=f"its {lack[1]} is missing"):
        load_layer(tmp_path, 1, torch.float32)


@pytest.mark.parametrize("declared", [[1], "fp8", {"quant_method": "compressed-tensors", "config_groups": [1]}])
def test_a_quantisation_that_is_no_object_is_refused(declared: Any, tmp_path: Path) -> None:
    zoo.save("qwen3_moe", tmp_path)
    small.edit_json(tmp_path / "config.json", lambda config: config.update(quantization_config=declared))
    with pytest.raises(CompressionError, match=r"quantization_config .*config_groups, should be an object"):
        open_model(locate(str(tmp_path)))


def test_a_modelopt_weight_that_its_scales_do_not_fit_is_refused(tmp_path: Path) -> None:
    save_modelopt(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    save_file(tensors | {name: tensors[name][:, :8].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(CompressionError, match=rf"tensor '{name}' has shape .* 4 bits in groups of 16"):
        open_model(locate(str(tmp_path)))


@pytest.mark.parametrize("name", zoo.sweep(FUSED))
def test_experts_packed_one_by_one_fill_fused_parameters(name: str, tmp_path: Path) -> None:
    for single_biases in [False, True] if name == "gpt_oss" else [False]:
        folder = tmp_path / str(single_biases)
        stock = save_packed(name, folder, single_biases=single_biases).state_dict()
        partial = open_model(locate(str(folder)), "float32", "cpu").partial
        partial.load(partial.empty)
        for key, value in partial.model.state_dict().items():
            assert torch.equal(value, stock[key]), key
