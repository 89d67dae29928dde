"""The command of `llama-quantize`, its patterns read as llama.cpp reads them: the first one that is found decides."""

import re
import shlex
from pathlib import Path

import gguf
import pytest

import compressor
from compressor.checkpoint.source import locate
from compressor.model.opened import open_model
from compressor.steps.quantize.llama_cpp import NAME, quantize_command
from compressor.steps.quantize.matrices import ALL, find_matrices
from tests.support import zoo

ARCHITECTURES = {
    "mixtral": ("LLAMA", {"intermediate_size": 96}),
    "qwen3_moe": ("QWEN3MOE", {"moe_intermediate_size": 96}),
    "deepseek_v3": ("DEEPSEEK2", {"moe_intermediate_size": 96, "intermediate_size": 96, "q_lora_rank": 64,
                                  "kv_lora_rank": 64, "v_head_dim": 64}),
}  # fmt: skip
FIRST, SECOND = "model.layers.0", "model.layers.1"
# the inputs of gate and up are of 256 columns, those of down of 96, which no K-quant takes
SCHEMES = {FIRST: {"experts": "int2/32", "dense": "int8/64"}, SECOND: {"experts": "int3", "dense": "int8/32"}}
MEANT = {("0", "gate"): "q2_k", ("0", "up"): "q2_k", ("1", "gate"): "q3_k", ("1", "up"): "q3_k",
         ("0", "down"): "iq4_nl", ("1", "down"): "iq4_nl"}  # fmt: skip


def types_of(command: str) -> list[tuple[str, str]]:
    """Patterns and types in order, a pattern in lower case as the tool makes it."""
    words = shlex.split(command.replace("\\\n", ""), comments=True)
    named = [words[place + 1].split("=") for place, word in enumerate(words) if word == "--tensor-type"]
    return [(pattern.lower(), kind) for pattern, kind in named]


def chosen(command: str, name: str) -> str:
    return next(kind for pattern, kind in types_of(command) if re.search(pattern, name))


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_each_tensor_of_the_converter_gets_the_type_of_its_unit(family: str, tmp_path: Path) -> None:
    arch, sizes = ARCHITECTURES[family]
    heads = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    zoo.save_once(tmp_path / "m", (family, sizes), zoo.build(family, **heads, **sizes).save_pretrained)
    model = open_model(locate(str(tmp_path / "m")))
    command = quantize_command(SCHEMES, model)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], 2)
    for matrix in find_matrices(model, ALL).every:
        stacked = re.sub(r"experts\.\d+\.", "experts.", matrix.module)
        name = names.get_name(f"{stacked}.weight", (".weight",))
        assert name is not None
        number = matrix.decoder_layer[-1]
        assert chosen(command, name) == ("q8_0" if matrix.expert is None else MEANT[number, matrix.part])
    assert {chosen(command, name) for name in ("token_embd.weight", "output.weight")} == {"bf16"}
    further = "blk.10.ffn_down_exps.weight"  # of a head for further tokens, say
    assert chosen(command, further) == "bf16"
    # no tensor that llama.cpp knows for this architecture is experts' by name and gets another unit's type
    for tensor in gguf.MODEL_TENSORS[gguf.MODEL_ARCH[arch]]:
        name = f"{gguf.TENSOR_NAMES[tensor].format(bid=1)}.weight"
        if name.startswith("blk."):
            assert chosen(command, name) in (("q3_k", "iq4_nl") if "_exps." in name else ("q8_0",))


def test_what_has_no_scheme_stays_plain_and_the_file_has_the_command(tmp_path: Path) -> None:
    zoo.save_once(tmp_path / "m", "narrow", zoo.build("mixtral", intermediate_size=24).save_pretrained)
    model = open_model(locate(str(tmp_path / "m")))
    command = quantize_command({FIRST: {"experts": "int4/32"}, SECOND: {"experts": "int4/32"}}, model)
    assert chosen(command, "blk.0.ffn_up_exps.weight") == "iq4_nl"  # 32 columns
    assert chosen(command, "blk.0.ffn_down_exps.weight") == "bf16"  # 24 columns, in no block of any type
    assert chosen(command, "blk.0.attn_q.weight") == "bf16"
    assert command.endswith("IQ4_NL\n")


def test_a_fit_for_llama_cpp_says_its_command(tmp_path: Path) -> None:
    zoo.save_once(tmp_path / "m", "even", zoo.build("mixtral", intermediate_size=32).save_pretrained)
    layers = {layer: {"experts": "int4/32", "dense": "int8/32"} for layer in (FIRST, SECOND)}
    step = compressor.Quantize(layers=layers, targets="all", servers="llama.cpp")
    compressor.compress(str(tmp_path / "m"), tmp_path / "small", [step])
    command = (tmp_path / "small" / NAME).read_text()
    assert chosen(command, "blk.1.ffn_up_exps.weight") == "iq4_nl"
    assert chosen(command, "blk.0.attn_q.weight") == "q8_0"
