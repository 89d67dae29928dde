"""Whole runs of `quantize`: what stock transformers loads, or our reader, is the fake-quantised base bit for bit."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_name
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import compressor
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.inspection import stock_fault
from compressor.model.opened import open_model
from compressor.model.verification import stock_report
from compressor.pipeline.verify import verify_against_base
from compressor.steps.quantize.matrices import ALL, EXPERTS, find_matrices
from tests.support import fake_quantization, small, zoo
from tests.support.fake_quantization import packed_modules

pytestmark = [pytest.mark.usefixtures("offline"), pytest.mark.filterwarnings("ignore")]

NAMES = ("fp8", "int8", "int4", "int3", "int2", "mxfp4", "nvfp4")
WIDE: dict[str, dict[str, Any]] = {  # widths that groups of 32 divide, experts' two ones unlike
    "mixtral": {"intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "deepseek_v3": {
        "moe_intermediate_size": 64, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 8, "intermediate_size": 64
    },
    "gpt_oss": {"intermediate_size": 64},
    "nemotron_h": {
        "moe_intermediate_size": 64, "moe_latent_size": 32, "moe_shared_expert_intermediate_size": 64,
        "intermediate_size": 64,
    },
    "zaya": {"moe_intermediate_size": 64},
    "deepseek_v4": {
        "moe_intermediate_size": 64, "intermediate_size": 64, "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 1
    },
    "ernie4_5_vl_moe": {"text_config.moe_intermediate_size": [64, 32], "text_config.intermediate_size": 64},
}  # fmt: skip
FAST = {("mixtral", "int4", "all"), ("qwen3_moe", "mxfp4", "experts"), ("gpt_oss", "nvfp4", "experts"),
        ("ernie4_5_vl_moe", "fp8", "all")}  # fmt: skip
EVERY = sorted({*FAST, *((name, scheme, "all") for name in WIDE for scheme in NAMES)})


def cases() -> list[Any]:
    return [pytest.param(*case, marks=() if case in FAST else pytest.mark.full) for case in EVERY]


def save(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Path:
    """Write a tiny model in a dtype."""
    zoo.save_once(folder, (name, dtype, overrides), zoo.build(name, **overrides).to(dtype).save_pretrained)
    return folder


def loaded(name: str, folder: Path) -> tuple[nn.Module, str | None]:
    """An output as stock transformers loads it, packed layers unpacked; or as we do, with what the stock one lacks."""
    opened = open_model(locate(str(folder)), config_of(folder)["dtype"])
    fault = stock_fault(opened)
    if fault is not None:
        opened.partial.load(opened.partial.empty)
        return opened.partial.model, fault
    kind = getattr(transformers, zoo.family(name).auto_class)
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return fake_quantization.decompressed(model), None


def unlike(first: nn.Module, second: nn.Module) -> list[str]:
    """Names of tensors that are not the same, bit for bit but for the zeros' signs."""
    one, other = dict(first.state_dict()), dict(second.state_dict())
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name].to(value.dtype))]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


@pytest.mark.parametrize(("name", "scheme", "targets"), cases())
def test_what_is_loaded_is_the_fake_quantised_base(name: str, scheme: str, targets: str, tmp_path: Path) -> None:
    source, out = save(name, tmp_path / "model", **WIDE[name]), tmp_path / "out"
    made = compressor.compress(str(source), out, [compressor.Quantize(scheme=scheme, targets=targets)])
    base = zoo.reload(name, source)
    quantized, fault = loaded(name, out)
    one_by_one = {"gpt_oss", "zaya", "ernie4_5_vl_moe"}  # that stock transformers knows otherwise
    assert (fault is not None) == (name in one_by_one or scheme == "nvfp4")
    assert unlike(base, quantized) != []
    plan = made.plan.steps[0].decision
    assert plan is not None
    fake_quantization.quantize(base, scheme, plan["group_size"], targets)
    assert unlike(base, quantized) == []
    check_stored(base, source, out, scheme, targets, made)


def check_stored(base: Any, source: Path, out: Path, scheme: str, targets: str, made: Any) -> None:
    """What is not quantised has the same bytes, and the config ignores exactly that; sizes are told as they are."""
    before, after, config = tensors_of(source), tensors_of(out), config_of(out)
    packed, ignored = packed_modules(after), set(config["quantization_config"].pop("ignore"))
    parts = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_global_scale")
    rest = {name for name in after if not (name.rpartition(".")[0] in packed and name.rpartition(".")[2] in parts)}
    for name in rest:
        assert torch.equal(before[name].to(after[name].dtype), after[name]), name
        kept = before[name].dtype == after[name].dtype
        assert kept or (base.config.model_type, after[name].dtype) == ("ernie4_5_vl_moe", torch.float32), name
    assert not packed & ignored
    linear = {name for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    dense = set(fake_quantization.dense(base)) if targets == "all" else set[str]()
    assert linear - dense <= ignored and not dense & ignored
    plain = {name.removesuffix(".weight") for name in rest if name.endswith(".weight") and after[name].dim() == 2}
    assert {name for name in plain if "embed" not in name} <= ignored
    del config["quantization_config"]
    assert config == config_of(source)
    assert made.after.bytes == sum(value.nbytes for value in after.values()) < made.before.bytes
    assert made.before.parameters == made.after.parameters
    plan = made.plan.steps[0].decision
    of_packed = [value.nbytes for name, value in after.items() if name not in rest]
    assert plan["matrices"] == len(packed) and plan["bits"] == round(8 * sum(of_packed) / plan["weights"], 4)


FULL_CASES = [("mixtral", scheme, dtype, "wide") for scheme in NAMES for dtype in (torch.float32, torch.float16)]
FULL_CASES += [(name, "int4", torch.bfloat16, "") for name in (*zoo.FAMILIES, *zoo.VARIANTS) if name != "unlimited_ocr"]


@pytest.mark.full
@pytest.mark.parametrize(("name", "scheme", "dtype", "size"), FULL_CASES)
def test_every_dtype_and_every_family(name: str, scheme: str, dtype: torch.dtype, size: str, tmp_path: Path) -> None:
    source, out = save(name, tmp_path / "model", dtype, **(WIDE[name] if size else {})), tmp_path / "out"
    made = compressor.compress(str(source), out, [compressor.Quantize(scheme, targets="all")])
    plan = made.plan.steps[0].decision
    assert plan is not None
    base, quantized = zoo.reload(name, source), loaded(name, out)[0]
    fake_quantization.quantize(base, scheme, plan["group_size"], "all")
    assert unlike(base, quantized) == []


def test_a_family_whose_packed_weights_nobody_reads_is_refused(tmp_path: Path) -> None:
    source = save("unlimited_ocr", tmp_path / "model")
    sentence = "^quantize: transformers cannot read quantised checkpoints of unlimited_ocr; leave quantize out$"
    with pytest.raises(CompressionError, match=sentence):
        compressor.compress(str(source), tmp_path / "out", [compressor.Quantize()])


def save_fused(name: str, folder: Path, **overrides: Any) -> Path:
    """A tiny model stored as it lies in memory, experts fused, as mergekit-moe writes it."""
    model = zoo.build(name, **overrides).bfloat16()
    model.save_pretrained(folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    tied = model.all_tied_weights_keys or {}
    state = {key: value.contiguous().clone() for key, value in model.state_dict().items() if key not in tied}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


READ = [name for name in (*zoo.FAMILIES, *zoo.VARIANTS) if name != "unlimited_ocr"]


@pytest.mark.parametrize("name", [name if name in ("deepseek_v3", "qwen3_moe") else zoo.full(name) for name in READ])
def test_names_of_a_fused_base_are_those_that_stock_transformers_knows(name: str, tmp_path: Path) -> None:
    source, out = save_fused(name, tmp_path / "model", **WIDE.get(name, {})), tmp_path / "out"
    made = compressor.compress(str(source), out, [compressor.Quantize("int4", targets="all")])
    kind = getattr(transformers, zoo.family(name).auto_class)
    if made.loader_fault is not None:
        with suppress(RuntimeError, AttributeError):  # of tensors that cannot be converted or tied
            _, info = kind.from_pretrained(out, output_loading_info=True)
            assert info["missing_keys"], made.loader_fault
        return
    model, info = kind.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    base = zoo.reload(name, source)
    plan = made.plan.steps[0].decision
    assert plan is not None
    fake_quantization.quantize(base, "int4", plan["group_size"], "all")
    assert unlike(base, fake_quantization.decompressed(model)) == []


def test_a_fused_base_is_written_under_published_names(tmp_path: Path) -> None:
    for name, expert in {"mixtral": "block_sparse_moe.experts.0.w1", "qwen3_moe": "mlp.experts.0.gate_proj"}.items():
        sources = [save_fused(name, tmp_path / f"{name}-fused", **WIDE[name])]
        sources.append(save(name, tmp_path / f"{name}-published", **WIDE[name]))
        written = []
        for source in sources:
            out = tmp_path / f"{source.name}-out"
            steps = [compressor.Prune(experts=4, strategy="model-centric"), compressor.Quantize("int4")]
            made = compressor.compress(str(source), out, steps)
            assert made.loader_fault is None
            written.append(tensors_of(out))
        assert written[0].keys() == written[1].keys()
        assert f"model.layers.0.{expert}.weight_packed" in written[0]
        assert all(torch.equal(value, written[1][key]) for key, value in written[0].items())
        assert verify_against_base(out, str(sources[1])).passed
        assert verify_against_base(tmp_path / f"{name}-fused-out", str(sources[0])).passed


def test_tensors_that_the_stock_loader_has_no_place_for_are_named(tmp_path: Path) -> None:
    source, out = save("mixtral", tmp_path / "model", **WIDE["mixtral"]), tmp_path / "out"
    compressor.compress(str(source), out, [compressor.Quantize("int4")])
    tensors = tensors_of(out)
    renamed = {name.replace(".w2.weight_packed", ".w2.weight_packd"): value for name, value in tensors.items()}
    save_file(renamed, out / "model.safetensors", {"format": "pt"})
    fault = stock_report(open_model(locate(str(out))))
    assert fault is not None and "draws at random" in fault and "experts.down_proj" in fault


@pytest.mark.full
@pytest.mark.parametrize("name", ["kimi_linear", "qwen4_exp"])
def test_that_the_stock_loader_loses_merged_weights_is_said(name: str, tmp_path: Path) -> None:
    source, out = save(name, tmp_path / "model"), tmp_path / "out"
    compressor.compress(str(source), out, [compressor.Quantize()])
    fault = compressor.inspect(str(out)).loader_fault
    assert fault is not None and " can't convert " in fault
    with pytest.raises(RuntimeError, match="conversion"):
        zoo.reload(name, out)


def decompressed(out: Path) -> dict[str, Tensor]:
    """The weight of every quantised module of an output, by compressed-tensors' own hand."""
    stored = tensors_of(out)
    config = QuantizationConfig.model_validate(config_of(out)["quantization_config"])
    found = dict[str, Tensor]()
    for module in packed_modules(stored):
        names = [name for name in stored if name.startswith(f"{module}.weight")]
        parts = {name.rpartition(".")[2]: stored[name] for name in names}
        groups = [*config.config_groups.values()]
        named = [group for group in groups if any(match_name(module, target) for target in group.targets)]
        (scheme,) = named or groups
        kind = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        found[module] = kind.decompress(parts, scheme)["weight"]
    return found


def text_model(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A model of suitable widths with a tokenizer."""
    size = {f"{'text_config.' if '_vl' in name else ''}vocab_size": small.VOCABULARY}
    save(name, folder, dtype, **WIDE[name], **size)
    small.tokenizer().save_pretrained(folder)
    return folder


SHARED_EXPERTS = [zoo.full("deepseek_v3"), "qwen3_moe"]  # with, without
STOCK: dict[str, tuple[list[str], list[str]]] = {  # experts' formats and others', of the layers in turn
    "several among experts": (["int3/32", "int2/32"], ["int4/32", "int8/32"]),
    "several among others": (["int3/32"], ["int8/32", "fp8"]),
    "two": (["mxfp4"], ["int8/32"]),
}


@pytest.mark.parametrize("case", STOCK)
@pytest.mark.parametrize("name", SHARED_EXPERTS)
def test_formats_that_differ_by_layer_are_loaded_as_they_are_stored(name: str, case: str, tmp_path: Path) -> None:
    """Stock transformers takes one format for the experts of all layers; others are said to be its fault."""
    source, out = save(name, tmp_path / "model", **WIDE[name]), tmp_path / "out"
    layers = dict[str, dict[str, str]]()
    for matrix in find_matrices(open_model(locate(str(source))), ALL).every:
        of_unit = STOCK[case][matrix.unit != "experts"]
        number = int(matrix.decoder_layer.rpartition(".")[2])
        layers.setdefault(matrix.decoder_layer, {})[matrix.unit] = of_unit[number % len(of_unit)]
    compressor.compress(str(source), out, [compressor.Quantize(layers=layers, targets="all")])
    assert verify_against_base(out, str(source)).passed
    opened = open_model(locate(str(out)))
    opened.partial.load(opened.partial.empty)
    weights = decompressed(out)
    for matrix in find_matrices(open_model(locate(str(source))), ALL).every:
        stored = matrix.of(opened.partial.model)
        assert torch.equal(stored, weights[matrix.module].to(stored.dtype)), matrix.module
    model, fault = loaded(name, out)
    assert (fault is not None and "reads the experts of all layers in one" in fault) == (case == next(iter(STOCK)))
    assert unlike(model, opened.partial.model) == []
    pruned = [compressor.Prune(strategy="aimer", experts=4)]
    compressor.compress(str(out), tmp_path / "pruned", pruned)
    halves = decompressed(tmp_path / "pruned")
    whole = {value.numpy().tobytes() for value in (matrix.float() for matrix in weights.values())}
    assert {value.float().numpy().tobytes() for value in halves.values()} <= whole


SIZES: dict[str, Any] = {"samples": 16, "sequence_length": 64}
GPTQ = [("mixtral", "int4", "experts"), ("gpt_oss", "int3", "all"), ("qwen3_moe", "mxfp4", "all")]
GPTQ += [("nemotron_h", "nvfp4", "experts"), ("deepseek_v3", "fp8", "all"), ("zaya", "int2", "experts")]
GPTQ += [("deepseek_v4", "int4", "all"), ("ernie4_5_vl_moe", "int3", "all")]


@pytest.mark.parametrize(("name", "scheme", "targets"), [case if case == GPTQ[0] else zoo.full(*case) for case in GPTQ])
def test_gptq_is_nearer_to_the_base_than_rounding(name: str, scheme: str, targets: str, tmp_path: Path) -> None:
    source, text = text_model(name, tmp_path / "model"), small.text_file(tmp_path)
    base, distances = nn.Module.float(zoo.reload(name, source)), dict[str, float]()
    ids = torch.tensor(small.tokenizer()(small.TEXT).input_ids[:1024]).view(16, 64)
    for method in ("rtn", "gptq"):
        step = compressor.Quantize(scheme=scheme, targets=targets, method=method)
        compressor.compress(str(source), tmp_path / method, [step], calibration=str(text), **SIZES)
        model, _ = loaded(name, tmp_path / method)
        wanted = decompressed(tmp_path / method)
        matrices = find_matrices(open_model(locate(str(source))), targets).every
        assert {matrix.module for matrix in matrices} == wanted.keys()
        for matrix in matrices:
            weight = matrix.of(model)
            assert torch.equal(weight, wanted[matrix.module].to(weight.dtype)), matrix.module
        distances[method] = float((zoo.logits(nn.Module.float(model), ids) - zoo.logits(base, ids)).square().mean())
    assert distances["gptq"] < 0.95 * distances["rtn"], distances


@pytest.mark.parametrize("targets", [EXPERTS, ALL])
@pytest.mark.parametrize("name", zoo.sweep(zoo.FAMILIES))
def test_every_stored_matrix_is_quantised_or_ignored(name: str, targets: str, tmp_path: Path) -> None:
    """Servers take a matrix for quantised otherwise, routers too, which some of them build as linear layers."""
    model = open_model(locate(str(small.save(tmp_path / "model", name))), device="cpu")
    found = find_matrices(model, targets)
    matrices = {
        tensor.removesuffix(".weight")
        for tensor, info in model.checkpoint.tensors.items()
        if len(info.shape) == 2 and tensor.endswith(".weight") and tensor not in found.replaced
    }
    rest = matrices - set(found.ignored)
    assert [module for module in rest if "emb" not in module and "query_" not in module] == []  # lookup tables
    assert not {matrix.module for matrix in found.every} & set(found.ignored)
