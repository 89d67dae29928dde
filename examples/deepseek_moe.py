"""DeepSeek-MoE-16B as a Qwen2-MoE, which stock transformers loads: the same function, and other names.

`python examples/deepseek_moe.py deepseek-ai/deepseek-moe-16b-base FOLDER`, with a folder or an id of the Hub; needs a
CPU, memory for one shard, and the disk. Transformers has no `deepseek` model type. Its `deepseek_v2` has latent
attention where DeepSeek-MoE has Llama's, so nothing of that would load. A Qwen2-MoE layer differs in one point: it
multiplies the shared experts by sigmoid(w x). With w = 0 that is 1/2, and their down projection is doubled here,
which rounds nothing.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compressor.checkpoint.source import locate

SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "torch_dtype",
)  # fmt: skip
SHARED_DOWN = "shared_experts.down_proj.weight"


def qwen2_moe(config: dict) -> dict:
    """Return the config of a Qwen2-MoE that computes the same."""
    refused = {
        "scoring_func": "softmax",
        "attention_bias": False,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0,
    }
    for name, needed in refused.items():
        if config.get(name, needed) != needed:
            raise SystemExit(
                f"{name} is {config[name]!r}, and Qwen2-MoE has no such field; {needed!r} alone can be written"
            )
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        **{name: config[name] for name in SAME if name in config},
        "num_experts": config["n_routed_experts"],
        "shared_expert_intermediate_size": config["n_shared_experts"]
        * config["moe_intermediate_size"],
        "mlp_only_layers": list(range(config.get("first_k_dense_replace", 0))),
        "qkv_bias": False,
    }


def main(source: str, out: Path) -> None:
    folder = locate(source).folder
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "deepseek":
        raise SystemExit(f"{source} is of type {config.get('model_type')!r}, not 'deepseek'")
    written = qwen2_moe(config)
    out.mkdir(parents=True)
    places = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = {}
        with safe_open(shard, "pt") as file:
            for name in [*file.keys()]:
                value = file.get_tensor(name)
                tensors[name.replace("shared_experts", "shared_expert")] = (
                    value * 2 if SHARED_DOWN in name else value
                )
                if SHARED_DOWN in name:
                    gate = name.replace(SHARED_DOWN, "shared_expert_gate.weight")
                    tensors[gate] = torch.zeros(1, config["hidden_size"], dtype=value.dtype)
        save_file(tensors, out / shard.name, {"format": "pt"})
        places |= dict.fromkeys(tensors, shard.name)
    if not places:
        raise SystemExit(f"{folder} holds no safetensors; convert its weights first")
    index = {"metadata": {}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    (out / "config.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
    for pattern in ("tokenizer*", "special_tokens_map.json", "generation_config.json"):
        for path in folder.glob(pattern):
            shutil.copy(path, out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: deepseek_moe.py MODEL FOLDER")
    main(sys.argv[1], Path(sys.argv[2]))
