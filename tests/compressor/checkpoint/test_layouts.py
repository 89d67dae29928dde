"""Checkpoints as they are found in the wild: other names, other files, extra tensors, sizes that collide."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import close_session
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import compressor
from compressor import CompressionError
from compressor.checkpoint.reader import INDEX_NAME, Checkpoint
from compressor.checkpoint.source import fetch_headers, locate
from compressor.model.architecture import discover
from compressor.model.opened import open_model
from tests.support import small, zoo
from tests.support.command_line import Run, refused
from tests.support.hub import point, serve
from tests.support.plans import disposition, plan_of
from tests.support.small import tensors_of
from tests.support.surgery_reference import cut, realign

Tensors = dict[str, Tensor]
LOGITS = 1e-4


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    changed = {name: value.clone() for name, value in change(tensors_of(folder)).items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def merge(folder: Path, out: Path, experts: int = 4, **options: Any) -> compressor.Outcome:
    return compressor.compress(str(folder), out, strategy="model-centric", experts=experts, **options)


def load(folder: Path) -> Any:
    realign(model := AutoModelForCausalLM.from_pretrained(folder))
    return model


def check(model: PreTrainedModel, count_field: str, summary: compressor.Outcome) -> PreTrainedModel:
    """The output's logits are those of the reference surgery on the model in memory."""
    found, expected = load(Path(summary.out)), cut(model, count_field, disposition(summary.plan))
    ids = zoo.tokens(model)
    torch.testing.assert_close(zoo.logits(found, ids), zoo.logits(expected, ids), rtol=0, atol=LOGITS)
    return found


def count_field(name: str) -> str:
    return zoo.family(name).count_field


# ---- names on disk ----


@pytest.mark.parametrize("name", ["mixtral", zoo.full("mixtral-tied"), "qwen3_moe", "gpt_oss", zoo.full("granitemoe")])
def test_base_model_names_without_prefix(name: str, tmp_path: Path) -> None:
    model = zoo.save(name, tmp_path / "in")
    rewrite(tmp_path / "in", lambda tensors: {key.removeprefix("model."): value for key, value in tensors.items()})
    assert torch.allclose(zoo.logits(load(tmp_path / "in"), zoo.tokens(model)), zoo.logits(model, zoo.tokens(model)))
    check(model, count_field(name), merge(tmp_path / "in", tmp_path / "out"))
    assert not any(key.startswith("model.") for key in tensors_of(tmp_path / "out"))


@pytest.mark.parametrize(
    "name",
    zoo.sweep(["mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v4", "ernie4_5_moe", "jamba", "nemotron_h",
               "minimax_m2", "aria", "granitemoe", "laguna", "hy_v3", "lfm2_moe", "phimoe"]),
)  # fmt: skip
def test_fused_storage_under_the_names_of_the_stock_model(name: str, tmp_path: Path) -> None:
    model = zoo.save(name, tmp_path / "in")
    ids = zoo.tokens(model)
    rewrite(tmp_path / "in", lambda tensors: dict(model.state_dict()))
    if not torch.allclose(zoo.logits(load(tmp_path / "in"), ids), zoo.logits(model, ids)):
        pytest.skip("stock transformers does not read this storage either")
    check(model, count_field(name), merge(tmp_path / "in", tmp_path / "out"))


# ---- config.json ----


@pytest.mark.parametrize(("name", "written"), [
    ("qwen3_moe", {"num_experts"}), ("qwen3_moe", {"num_local_experts"}), ("mellum", {"num_experts"}),
    ("qwen3_moe", {"num_experts", "num_local_experts"}), ("mixtral", {"num_local_experts"}),
    ("deepseek_v3", {"n_routed_experts"}), ("deepseek_v3", {"n_routed_experts", "num_local_experts"}),
])  # fmt: skip
def test_count_under_any_name_that_the_config_class_accepts(name: str, written: set[str], tmp_path: Path) -> None:
    model = zoo.save(name, tmp_path / "in")

    def write_as(config: dict[str, Any]) -> None:
        for field in ("num_experts", "num_local_experts", "n_routed_experts"):
            config.pop(field, None)
        config.update(dict.fromkeys(written, 8))

    small.edit_json(tmp_path / "in" / "config.json", write_as)
    check(model, count_field(name), merge(tmp_path / "in", tmp_path / "out"))
    content = config_of(tmp_path / "out")
    assert all(content[field] == 4 for field in written)


def test_what_config_json_leaves_to_the_defaults(tmp_path: Path) -> None:
    for name, fields in (("mixtral", ["num_local_experts"]), ("qwen3_moe", ["architectures", "dtype"])):
        model, out = zoo.save(name, tmp_path / name), tmp_path / f"{name}-out"
        small.edit_json(tmp_path / name / "config.json", lambda config, fields=fields: [*map(config.pop, fields)])
        check(model, "num_local_experts", merge(tmp_path / name, out))
        assert name == "qwen3_moe" or config_of(out)["num_local_experts"] == 4


@pytest.mark.parametrize(
    ("name", "kept_wide"), [("deepseek_v3", "e_score_correction_bias"), ("qwen3_moe", ""), ("gpt_oss", "")]
)
def test_bfloat16_merges_in_float32_and_keeps_each_dtype(name: str, kept_wide: str, tmp_path: Path) -> None:
    model = zoo.build(name)
    wide = {key: value.float() for key, value in model.state_dict().items()}
    model.to(torch.bfloat16)
    for key, value in wide.items():
        if kept_wide and kept_wide in key:
            owner, _, leaf = key.rpartition(".")
            setattr(model.get_submodule(owner), leaf, value)
    model.save_pretrained(tmp_path / "in")
    summary = merge(tmp_path / "in", tmp_path / "out")
    found, expected = load(tmp_path / "out"), cut(model, count_field(name), disposition(summary.plan))
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[key].float(), value.bfloat16().float(), rtol=8e-3, atol=1e-6)
    dtypes = {name: value.dtype for name, value in tensors_of(tmp_path / "in").items()}
    assert all(value.dtype == dtypes[name] for name, value in tensors_of(tmp_path / "out").items())


# ---- shards ----


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v4", "ernie4_5_vl_moe"])
def test_sharded_source_and_sharded_output(name: str, tmp_path: Path) -> None:
    model = zoo.build(name)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "in", max_shard_size="60KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 3
    whole = merge(tmp_path / "whole", tmp_path / "out-whole")
    summary = merge(tmp_path / "in", tmp_path / "out", max_shard_bytes=40_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    for file in files:
        sizes = [value.nbytes for value in load_file(tmp_path / "out" / file).values()]
        assert sum(sizes) <= 40_000 or len(sizes) == 1
    assert set(index["weight_map"].values()) == files
    assert index["metadata"]["total_size"] == summary.after.bytes
    one, two = tensors_of(tmp_path / "out-whole"), tensors_of(tmp_path / "out")
    assert one.keys() == two.keys() == index["weight_map"].keys()
    assert all(torch.equal(value, two[key]) for key, value in one.items())
    ids = zoo.tokens(model)
    outputs = [zoo.reload(name, Path(made.out)) for made in (whole, summary)]
    realign(outputs[0])
    realign(outputs[1])
    assert torch.equal(zoo.logits(outputs[0], ids), zoo.logits(outputs[1], ids))


# ---- numbers that collide ----

EIGHTS: dict[str, Any] = {"hidden_size": 8, "head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 2}


MORE_SIZES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"num_hidden_layers": 10}),
    ("gpt_oss", {"num_hidden_layers": 10, "layer_types": ["full_attention"] * 10}),
    ("deepseek_v3", {"num_hidden_layers": 10}),
    ("granitemoe", {"num_hidden_layers": 8}),
    ("mixtral", {**EIGHTS, "num_hidden_layers": 8, "intermediate_size": 8}),
    ("mixtral", {**EIGHTS, "intermediate_size": 4}),
    ("qwen3_moe", {**EIGHTS, "num_hidden_layers": 8, "moe_intermediate_size": 8, "intermediate_size": 8}),
    ("gpt_oss", {**EIGHTS, "intermediate_size": 8, "sliding_window": 8}),
    ("aria", {**EIGHTS, "intermediate_size": 8}),
    ("phimoe", {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 64}),
    ("qwen2_moe", {"num_experts_per_tok": 4, "num_attention_heads": 8, "num_key_value_heads": 8}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mixtral", {"num_hidden_layers": 10}),
        ("gpt_oss", {**EIGHTS, "intermediate_size": 4}),
        ("granitemoe", {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 4}),
        ("nemotron_h", {"moe_latent_size": 8, "moe_intermediate_size": 8}),
        ("deepseek_v3", {"n_shared_experts": 8, "kv_lora_rank": 8, "q_lora_rank": 8, "moe_intermediate_size": 8}),
        *(pytest.param(*case, marks=pytest.mark.full) for case in MORE_SIZES),
    ],
)  # fmt: skip
def test_sizes_equal_to_the_number_of_experts(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    model = zoo.build(name, **sizes)
    model.save_pretrained(tmp_path / "in")
    summary = merge(tmp_path / "in", tmp_path / "out")
    check(model, count_field(name), summary)
    assert [layer.layer for layer in summary.plan.expert_plan.layers] == [
        int(module.split("layers.")[1].split(".")[0]) for module in zoo.experts(model)
    ]
    plan = plan_of(tmp_path / "in", strategy="model-centric", experts=8)
    compressor.apply(plan, tmp_path / "same")
    before, after = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "same")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


# ---- other classes around the same layers ----

TOWER: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip


def pictured(kind: str, vision: Any, **more: Any) -> Callable[[Any], Any]:
    """Build a model for pictures around a configured language model."""
    whole, wrapper = getattr(transformers, f"{kind}Config"), getattr(transformers, f"{kind}ForConditionalGeneration")
    return lambda text: wrapper(whole(vision_config=vision, text_config=text, **more))


LLAVA = pictured("Llava", transformers.CLIPVisionConfig(**TOWER, image_size=16, projection_dim=16), image_token_index=3)
INTERNVL = pictured(
    "InternVL", transformers.InternVLVisionConfig(**TOWER | {"image_size": [16, 16], "patch_size": [4, 4]}),
    image_token_id=3,
)  # fmt: skip
ARIA = pictured(
    "Aria", transformers.Idefics3VisionConfig(**TOWER, image_size=16), projector_patch_to_query_dict={16: 4},
    image_token_index=3,
)  # fmt: skip


@pytest.mark.parametrize(("build", "name"), [
    (LLAVA, "mixtral"), (LLAVA, "qwen3_moe"), (INTERNVL, "gpt_oss"), (ARIA, "aria"),
    (transformers.MixtralForSequenceClassification, "mixtral"), (transformers.MixtralModel, "mixtral"),
])  # fmt: skip
def test_other_classes_around_the_same_layers(build: Callable[[Any], Any], name: str, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(zoo.configure(name))
    model.train(False)
    model.save_pretrained(tmp_path / "in")
    summary = merge(tmp_path / "in", tmp_path / "out")
    prefix = "text_config." if hasattr(model.config, "text_config") else ""
    expected = cut(model, prefix + count_field(name), disposition(summary.plan)).state_dict()
    found = type(model).from_pretrained(tmp_path / "out").state_dict()
    assert list(found) == list(expected)
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=2e-6, msg=key)


# ---- refusals ----


@pytest.mark.parametrize(("count", "message"), [(8, "no field .* counts the 8 experts"), (4, "unequal numbers")])
def test_two_parts_with_counts_of_their_own_are_refused(count: int, message: str) -> None:
    talker = {**zoo.family("qwen3_moe").config, "num_experts": count, "shared_expert_intermediate_size": 16}
    config = transformers.Qwen3OmniMoeConfig(
        thinker_config=dict(zoo.family("qwen3_omni_moe").config),
        talker_config={"spatial_merge_size": 2, "text_config": talker},
        architectures=["Qwen3OmniMoeForConditionalGeneration"],
    )
    with pytest.raises(CompressionError, match=message):
        discover(config)


# ---- several weights in a folder ----


def scaled(folder: Path, file: str, factor: float, names: Callable[[str], bool] = bool) -> list[str]:
    """Write some of the model's tensors, times a factor, to another file; returns their names."""
    tensors = {name: value * factor for name, value in tensors_of(folder.parent / "base").items() if names(name)}
    save_file(tensors, folder / file, metadata={"format": "pt"})
    return [*tensors]


def write_index(folder: Path, places: dict[str, str], name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def beside_an_index(folder: Path) -> None:
    write_index(folder, dict.fromkeys(scaled(folder, "part-1.safetensors", 2.0), "part-1.safetensors"))


def variants(folder: Path) -> None:
    for name in ("model.fp16.safetensors", "consolidated.safetensors", "consolidated-1.safetensors"):
        scaled(folder, name, 2.0)
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    (folder / "params.json").write_text("{}")
    write_index(folder, {"x": "gone.safetensors"}, "model.fp16.safetensors.index.json")


def half_an_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first = scaled(folder, "part-1.safetensors", 2.0, lambda name: "layers.1" not in name)
    second = scaled(folder, "part-2.safetensors", 3.0, lambda name: "layers.0" not in name)
    write_index(folder, {first[0]: "part-1.safetensors", second[-1]: "part-2.safetensors"})


def named_by_the_config(folder: Path) -> None:
    scaled(folder, "other.safetensors", 2.0)
    small.edit_json(folder / "config.json", lambda config: config.update(transformers_weights="other.safetensors"))


def an_index_named_by_the_config(folder: Path) -> None:
    places = dict.fromkeys(scaled(folder, "other-1.safetensors", 2.0), "other-1.safetensors")
    write_index(folder, places, name := "other.safetensors.index.json")
    small.edit_json(folder / "config.json", lambda config: config.update(transformers_weights=name))


SEVERAL = (beside_an_index, variants, half_an_index, named_by_the_config, an_index_named_by_the_config)


@pytest.mark.parametrize("change", SEVERAL, ids=lambda change: change.__name__)
def test_the_weights_are_those_that_stock_loads(change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.save("mixtral", tmp_path / "base")
    folder, out = Path(shutil.copytree(tmp_path / "base", tmp_path / "in")), tmp_path / "out"
    change(folder)
    stock = AutoModelForCausalLM.from_pretrained(folder)
    base = Checkpoint(folder)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert torch.equal(base.read(name), stock.state_dict()[name])
    with serve() as hub:
        hub.serve("org/model", folder)
        point(monkeypatch, hub.url, tmp_path / "cache")
        assert fetch_headers("org/model").tensors.keys() == base.tensors.keys()
        fetched = locate("org/model").folder
        close_session()
    weights = {path.name for path in fetched.glob("*.safetensors*")}
    assert weights <= {info.file for info in base.tensors.values()} | {"other.safetensors.index.json", INDEX_NAME}
    assert {name: info.file for name, info in Checkpoint(fetched).tensors.items()} == {
        name: info.file for name, info in base.tensors.items()
    }
    check(stock, "num_local_experts", merge(folder, out))
    assert {path.name for path in out.iterdir()} == {
        *("model.safetensors", "config.json", "generation_config.json", "compression.json", "recipe.yaml"),
        "SHA256SUMS",
    }


def test_parts_of_a_distributed_checkpoint_are_refused(tmp_path: Path) -> None:
    zoo.save("mixtral", tmp_path / "in")
    (tmp_path / "in" / "shard-00001-model-00001-of-00001.safetensors").touch()
    with pytest.raises(CompressionError, match=r"parts of a distributed checkpoint .*; save the whole model"):
        merge(tmp_path / "in", tmp_path / "out")


def test_an_adapter_beside_whole_weights_is_refused_as_stock_transformers_would_apply_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = tmp_path / "in"
    zoo.save("mixtral", folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    lora = peft.LoraConfig(target_modules=["o_proj"], init_lora_weights=False)
    peft.get_peft_model(model, lora).save_pretrained(folder)
    assert any("lora" in name for name, _ in AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    with pytest.raises(CompressionError, match=r"has an adapter, which transformers would add .*; merge"):
        merge(folder, tmp_path / "out")


@pytest.mark.parametrize("command", ["inspect", "compress", "export"])
def test_an_adapter_is_named_as_what_it_is(command: str, tmp_path: Path, run: Run) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(zoo.build("mixtral"), peft.LoraConfig(target_modules=["o_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    more = {"inspect": (), "compress": ("-o", tmp_path / "out", "--experts", 4), "export": ("-o", tmp_path / "out")}
    refused(run(command, tmp_path / "adapter", *more[command]), "is an adapter, not a model .*; merge it into")


# ---- numbers of experts, and tensors that are not there ----


def renumbered(tensors: Tensors) -> Tensors:
    """Experts 5, 6 and 7 under 6, 9 and 12, in the order of their numbers."""
    numbers = {"5": "6", "6": "9", "7": "12"}
    new = {name: re.sub(r"(?<=experts\.)[567]", lambda found: numbers[found[0]], name) for name in tensors}
    return {new[name]: value for name, value in tensors.items()}


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_gaps_in_experts_numbers_are_refused_with_what_mends_them(name: str, tmp_path: Path) -> None:
    stock = zoo.save(name, tmp_path / "in")
    rewrite(tmp_path / "in", renumbered)
    loaded = load(tmp_path / "in")
    assert torch.equal(zoo.logits(loaded, zoo.tokens(stock)), zoo.logits(stock, zoo.tokens(stock)))
    with pytest.raises(CompressionError, match=r"of expert 5; .*numbered with gaps.*save_pretrained"):
        merge(tmp_path / "in", tmp_path / "out")
    loaded.save_pretrained(tmp_path / "mended")
    merge(tmp_path / "mended", tmp_path / "out")


@pytest.mark.parametrize("command", ["inspect", "compress"])
@pytest.mark.parametrize("gone", [r"q_proj", r"experts\.\d\.up_proj", r"layers\.1\.mlp\.gate\.weight", "norm"])
def test_weights_that_are_missing_are_named_at_once(gone: str, command: str, tmp_path: Path, run: Run) -> None:
    zoo.save("qwen3_moe", tmp_path / "in")
    small.tokenizer().save_pretrained(tmp_path / "in")
    rewrite(tmp_path / "in", lambda tensors: {
        key: value for key, value in tensors.items() if not re.search(gone, key)
    })  # fmt: skip
    more = {"inspect": (), "compress": ("-o", tmp_path / "out", "--experts", 4, "--strategy", "model-centric")}
    refused(run(command, tmp_path / "in", *more[command]), r"lacks \d+ tensors that Qwen3MoeForCausalLM needs.* again")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.experts.3.up_proj.weight"])
def test_empty_tensors_of_a_sharded_trainer_are_blamed_on_it(name: str, tmp_path: Path, run: Run) -> None:
    zoo.save("qwen3_moe", tmp_path / "in")
    rewrite(tmp_path / "in", lambda tensors: {**tensors, name: torch.empty(0)})
    refused(run("inspect", tmp_path / "in"), "without a value, such as .* of shape .0., as a trainer writes .*; gather")


# ---- names of other tools ----


BLOCK = "model.layers.{}.block_sparse_moe"
FOREIGN = {  # a pattern of names, what stands in its place, and what is said
    "data parallel": ("^", "module.", "has 'lm_head.weight', as DataParallel or DeepSpeed would"),
    "compiled": ("^", "_orig_mod.", "has 'lm_head.weight', as torch.compile"),
    "peft": ("^", "base_model.model.", "has 'lm_head.weight', as peft would .*after merge_and_unload"),
    "a layer": (r"(?<=layers\.1\.)", "_orig_mod.", f"has '{BLOCK.format(1)}.experts.0.w1.weight', as torch.compile"),
    "inside another": ("^", "policy.", "has 'policy.lm_head.weight' where .* 'lm_head.weight', as another tool"),
    "unknown": (
        "weight",
        "w",
        "no tensor .* fills MixtralForCausalLM, .* has 'lm_head.w' .* has 'lm_head.weight'; name",
    ),
    "mlx": (r"experts\.0\.", "switch_mlp.", f"has MLX's '{BLOCK.format(0)}.switch_mlp.w1.weight'; name the checkpoint"),
}


@pytest.mark.parametrize(("old", "new", "message"), FOREIGN.values(), ids=FOREIGN)
def test_names_of_other_tools_are_told(old: str, new: str, message: str, tmp_path: Path, run: Run) -> None:
    zoo.save("mixtral", tmp_path / "in")
    rewrite(tmp_path / "in", lambda tensors: {re.sub(old, new, name): value for name, value in tensors.items()})
    refused(run("inspect", tmp_path / "in"), message)
    with pytest.raises(CompressionError, match=message):
        merge(tmp_path / "in", tmp_path / "out")


def test_a_type_that_is_another_name_of_a_stock_one(tmp_path: Path) -> None:
    """As kimi_k2's: with the remedy, the model is the stock one's."""
    model, folder = zoo.save("deepseek_v3", tmp_path / "in"), tmp_path / "in"
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    small.edit_json(folder / "config.json", lambda config: config.update(model_type="kimi_k2", auto_map=code))
    with pytest.raises(CompressionError, match=r"no model type 'kimi_k2', but DeepseekV3ForCausalLM.* 'deepseek_v3'"):
        merge(folder, tmp_path / "out")
    small.edit_json(folder / "config.json", lambda config: config.update(model_type="deepseek_v3"))
    check(model, "n_routed_experts", merge(folder, tmp_path / "out"))
    assert "auto_map" not in config_of(tmp_path / "out")


@pytest.mark.parametrize("name", [*sorted(zoo.LOOPED), *zoo.sweep(but=[*zoo.LOOPED, *zoo.REPRESENTATIVE])])
def test_a_plain_checkpoint_lacks_nothing(name: str, tmp_path: Path) -> None:
    zoo.save(name, tmp_path)
    assert not open_model(locate(str(tmp_path))).partial.missing


def test_an_expert_that_its_selection_bias_switches_off_is_dropped_but_not_merged(tmp_path: Path) -> None:
    zoo.save("deepseek_v3", tmp_path / "in")
    small.edit_tensors(
        tmp_path / "in",
        lambda tensors: [value[3:4].fill_(-torch.inf) for name, value in tensors.items() if "correction_bias" in name],
    )
    with pytest.raises(CompressionError, match="correction_bias' holds infinity for an expert that is to be merged"):
        merge(tmp_path / "in", tmp_path / "out")
    compressor.compress(str(tmp_path / "in"), tmp_path / "out", strategy="aimer", experts=4)
