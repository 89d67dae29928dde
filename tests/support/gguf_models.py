"""GGUF files as llama.cpp's converter and its llama-imatrix lay them out, written by the package gguf; test support."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoConfig

Array = NDArray[Any]
WHOLE = {
    "input_layernorm": "attn_norm", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
FLOAT32 = ("_norm.weight", "ffn_gate_inp.weight")  # whatever the rest is


def from_checkpoint(folder: Path, path: Path, kind: Kind, router: float = 1.0) -> Path:
    """A tiny Mixtral with untied ends as GGUF: experts stacked, query and key rows put in llama.cpp's order.

    The first router is multiplied by `router`.
    """
    config, stored = AutoConfig.from_pretrained(folder), load_file(folder / "model.safetensors")
    found = {name: tensor.float().numpy() for name, tensor in stored.items()}
    experts, heads = config.num_local_experts, (config.num_attention_heads, config.num_key_value_heads)
    tensors = {"token_embd.weight": found["model.embed_tokens.weight"]}
    for number in range(config.num_hidden_layers):
        old, new = f"model.layers.{number}.", f"blk.{number}."
        for disk, name in EXPERTS.items():
            each = [found[f"{old}block_sparse_moe.experts.{expert}.{disk}.weight"] for expert in range(experts)]
            tensors[f"{new}{name}.weight"] = np.stack(each)
        for disk, name in WHOLE.items():
            tensors[f"{new}{name}.weight"] = found[f"{old}{disk}.weight"]
        for disk, name, count in (("q", "attn_q", heads[0]), ("k", "attn_k", heads[1])):
            weight = found[f"{old}self_attn.{disk}_proj.weight"]
            halves = weight.reshape(count, 2, -1, weight.shape[-1])  # rotary halves become neighbours
            tensors[f"{new}{name}.weight"] = halves.transpose(0, 2, 1, 3).reshape(weight.shape)
    tensors["blk.0.ffn_gate_inp.weight"] = tensors["blk.0.ffn_gate_inp.weight"] * np.float32(router)
    tensors |= {"output_norm.weight": found["model.norm.weight"], "output.weight": found["lm_head.weight"]}
    stored_as = {name: Kind.F32 if name.endswith(FLOAT32) else kind for name in tensors}
    raw = {name: (quantize(np.ascontiguousarray(tensor), stored_as[name]), stored_as[name])
           for name, tensor in tensors.items()}  # fmt: skip
    facts = {"block_count": config.num_hidden_layers, "embedding_length": config.hidden_size, "expert_count": experts,
             "expert_used_count": config.num_experts_per_tok}  # fmt: skip
    return write(path, "llama", facts, raw, label=f"{experts}x1M")


def random_blocks(generator: np.random.Generator, kind: Kind, *shape: int) -> tuple[Array, Kind]:
    """Random bytes as blocks of a quantisation."""
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    return generator.integers(0, 256, (*shape[:-1], shape[-1] // block * nbytes), dtype=np.uint8), kind


def plain(generator: np.random.Generator, *shape: int) -> tuple[Array, Kind]:
    """Random float32 numbers."""
    return generator.standard_normal(shape).astype(np.float32), Kind.F32


def quantised(path: Path, experts: int = 8, groups: int = 0, head: bool = False, parts: int = 1) -> Path:
    """A model of two MoE blocks (and a head) beside a dense one, of every sort of tensor that experts come in."""
    rng = np.random.default_rng(0)
    tensors = {"token_embd.weight": random_blocks(rng, Kind.Q6_K, 8, 256), "blk.0.ffn_up.weight": plain(rng, 4, 256)}
    for number in (1, 2, 3) if head else (1, 2):
        at = f"blk.{number}."
        tensors |= {
            f"{at}ffn_gate_inp.weight": plain(rng, experts, 256), f"{at}ffn_gate_inp.bias": plain(rng, experts),
            f"{at}exp_probs_b.bias": plain(rng, experts),
            f"{at}ffn_gate_up_exps.weight": random_blocks(rng, (Kind.Q4_K, Kind.IQ2_XXS, Kind.Q8_0)[number - 1],
                                                          experts, 6, 256),
            f"{at}ffn_gate_up_exps.bias": plain(rng, experts, 6),
            f"{at}ffn_down_exps.weight": plain(rng, experts, 3, 32) if head else
            random_blocks(rng, Kind.MXFP4, experts, 3, 32),
            f"{at}ffn_down_exps.scale": plain(rng, experts), f"{at}ffn_gate_inp.scale": plain(rng, 256),
            f"{at}ffn_up_shexp.weight": random_blocks(rng, Kind.Q4_0, 5, 256), f"{at}ffn_norm.weight": plain(rng, 256),
        }  # fmt: skip
    facts = {"block_count": 4 if head else 3, "expert_count": experts, "expert_used_count": 2, "expert_shared_count": 1}
    facts |= {"expert_group_count": groups, "expert_group_used_count": max(1, groups // 2)} if groups else {}
    facts |= {"nextn_predict_layers": 1} if head else {}
    return write(path, "glm4moe", facts, tensors, parts)


def write(
    path: Path,
    arch: str,
    facts: Mapping[str, int],
    tensors: Mapping[str, tuple[Array, Kind]],
    parts: int = 1,
    label: str = "8x1M",
) -> Path:
    """One file, or several of equally many tensors; returns the first one's path."""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=-(-len(tensors) // parts) if parts > 1 else 0)
    writer.add_size_label(label)
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "ä", "\u2581b"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    writer.add_float32(f"{arch}.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    for name, value in facts.items():
        writer.add_uint32(f"{arch}.{name}", value)
    for name, (raw, kind) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    _finish(writer)
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def imatrix(path: Path, entries: Mapping[str, tuple[Array, Array]]) -> Path:
    """For each weight the sums of squares [E, in] and the counts [E] as llama-imatrix writes them."""
    writer = gguf.GGUFWriter(path, "none")
    writer.kv_data[0].clear()  # which has the architecture
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 1)
    for name, (squares, counts) in entries.items():
        writer.add_tensor(f"{name}.in_sum2", squares.astype(np.float32))
        writer.add_tensor(f"{name}.counts", counts.astype(np.float32)[:, None])
    _finish(writer)
    return path


def contents(path: Path) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    """Shape (experts first), quantisation and bytes of each tensor, as the package gguf reads them."""
    reader = gguf.GGUFReader(path)
    return {each.name: (tuple(each.shape.tolist()[::-1]), each.tensor_type.name, each.data.tobytes())
            for each in reader.tensors}  # fmt: skip


def metadata(path: Path) -> dict[str, Any]:
    """All values of the metadata, as the package gguf reads them."""
    fields = gguf.GGUFReader(path).fields.items()
    return {name: field.contents() for name, field in fields if not name.startswith("GGUF.")}
