"""The forward of a multi-token-prediction head in plain torch, on stored tensors: DeepSeek-V3's and Qwen3-Next's.

Written from the papers and the servers' sources, and not from the stock code: complex rotations, loops over experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from tests.support.mtp_checkpoints import NEXTN, QWEN, Made, Tensors


@dataclass(frozen=True, slots=True)
class Seen:
    """What a head was seen to do: its experts' inputs [T, H] and choices [T, K], normed output [B, L, H], tokens."""

    inputs: Tensor
    index: Tensor
    weights: Tensor
    hidden: Tensor
    choices: Tensor


def rms(x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (1 + weight if centred else weight)


def rotate(x: Tensor, theta: float, interleaved: bool) -> Tensor:
    """[B, L, h, d]: each pair turned by its position times theta**(-2i/d)."""
    half = x.shape[-1] // 2
    pairs = x.unflatten(-1, (half, 2)) if interleaved else torch.stack(x.chunk(2, dim=-1), dim=-1)
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) * 2 / x.shape[-1])
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    parts = torch.view_as_real(turned)
    return torch.cat([parts[..., 0], parts[..., 1]], dim=-1)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of [B, L, h, d] each, heads of keys repeated: [B, L, h * d_v]."""
    key, value = (part.repeat_interleave(query.shape[2] // part.shape[2], dim=2) for part in (key, value))
    scores = torch.einsum("blhd,bmhd->bhlm", query, key) * query.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    shares = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("bhlm,bmhd->blhd", shares, value).flatten(2)


def mlp(x: Tensor, at: Callable[[str], Tensor], name: str) -> Tensor:
    gate, up, down = (at(f"{name}.{part}_proj") for part in ("gate", "up", "down"))
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def latent_attention(x: Tensor, at: Callable[[str], Tensor], config: Any) -> Tensor:
    nope, turned, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    theta = config.rope_parameters["rope_theta"]
    low = rms(linear(x, at("self_attn.q_a_proj")), at("self_attn.q_a_layernorm"), 1e-6, False)
    query = linear(low, at("self_attn.q_b_proj")).unflatten(-1, (-1, nope + turned))
    latent, shared = linear(x, at("self_attn.kv_a_proj_with_mqa")).split([rank, turned], dim=-1)
    both = linear(rms(latent, at("self_attn.kv_a_layernorm"), 1e-6, False), at("self_attn.kv_b_proj"))
    key, value = both.unflatten(-1, (query.shape[2], -1)).split([nope, config.v_head_dim], dim=-1)
    turning = rotate(shared[:, :, None], theta, True).expand(-1, -1, query.shape[2], -1)
    query = torch.cat([query[..., :nope], rotate(query[..., nope:], theta, True)], dim=-1)
    return linear(attend(query, torch.cat([key, turning], dim=-1), value), at("self_attn.o_proj"))


def gated_attention(x: Tensor, at: Callable[[str], Tensor], config: Any) -> Tensor:
    size, eps = config.head_dim, config.rms_norm_eps
    part = int(size * config.rope_parameters.get("partial_rotary_factor", 1.0))
    query, gate = linear(x, at("self_attn.q_proj")).unflatten(-1, (-1, 2 * size)).chunk(2, dim=-1)
    key, value = (linear(x, at(f"self_attn.{name}_proj")).unflatten(-1, (-1, size)) for name in "kv")

    def turned(heads: Tensor, norm: str) -> Tensor:
        heads = rms(heads, at(f"self_attn.{norm}"), eps, True)
        rotated = rotate(heads[..., :part], config.rope_parameters["rope_theta"], False)
        return torch.cat([rotated, heads[..., part:]], dim=-1)

    found = attend(turned(query, "q_norm"), turned(key, "k_norm"), value)
    return linear(found * gate.flatten(2).sigmoid(), at("self_attn.o_proj"))


def grouped_routing(x: Tensor, at: Callable[[str], Tensor], config: Any) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3: sigmoid scores; with the bias, the best groups by their two best experts, then the best experts."""
    scores = linear(x, at("mlp.gate")).sigmoid()
    chosen = list[list[int]]()
    for biased in (scores + at("mlp.gate.e_score_correction_bias")).unflatten(-1, (config.n_group, -1)):
        order = sorted(range(config.n_group), key=lambda group: -float(biased[group].topk(2).values.sum()))
        size = biased.shape[1]
        allowed = [group * size + place for group in order[: config.topk_group] for place in range(size)]
        chosen.append(
            sorted(allowed, key=lambda expert: -float(biased.flatten()[expert]))[: config.num_experts_per_tok]
        )
    index = torch.tensor(chosen)
    weights = scores.gather(1, index)
    if config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * config.routed_scaling_factor, index


def softmax_routing(x: Tensor, at: Callable[[str], Tensor], config: Any) -> tuple[Tensor, Tensor]:
    weights, index = linear(x, at("mlp.gate")).softmax(-1).topk(config.num_experts_per_tok)
    return (weights / weights.sum(-1, keepdim=True) if config.norm_topk_prob else weights), index


@torch.no_grad()
def run_head(made: Made, tensors: Tensors, number: int, tokens: Tensor, hidden: Tensor) -> Seen:
    """The head of this number on tokens [B, L + 1] and last hidden states [B, L + 1, H] of what came before it."""
    qwen, config = made.name.startswith("qwen"), made.model.config
    words, eps = (QWEN if qwen else NEXTN), config.rms_norm_eps
    block, root = made.blocks[number], made.roots[number]

    def at(name: str) -> Tensor:
        return next(tensors[block + name + end] for end in (".weight", "") if block + name + end in tensors)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms(x, weight, eps, qwen)

    def part(name: str) -> Tensor:
        return tensors[f"{root}{words[name]}.weight"]

    table = tensors.get(f"{root}embed_tokens.weight", tensors["model.embed_tokens.weight"])
    pair = [norm(table[tokens[:, 1:]], part("embedding_norm")), norm(hidden[:, :-1], part("hidden_norm"))]
    x = linear(torch.cat(pair, dim=-1), part("projection"))
    attention = gated_attention if qwen else latent_attention
    x = x + attention(norm(x, at("input_layernorm")), at, config)
    given = norm(x, at("post_attention_layernorm"))
    flat = given.flatten(0, 1)
    weights, index = (softmax_routing if qwen else grouped_routing)(flat, at, config)
    total = torch.zeros_like(flat)
    for token, (own_weights, own_index) in enumerate(zip(weights, index, strict=True)):
        for weight, expert in zip(own_weights, own_index.tolist(), strict=True):
            total[token] += weight * mlp(flat[token], at, f"mlp.experts.{expert}")
    shared = mlp(given, at, "mlp.shared_expert" if qwen else "mlp.shared_experts")
    if qwen:
        shared = shared * linear(given, at("mlp.shared_expert_gate")).sigmoid()
    out = norm(x + total.view_as(x) + shared, part("norm"))
    head = tensors.get(f"{root}shared_head.head.weight", tensors["lm_head.weight"])
    return Seen(flat, index, weights, out, linear(out, head).argmax(-1))


@torch.no_grad()
def run_all(made: Made, model: Any, tensors: Tensors, tokens: Tensor) -> tuple[Tensor, list[Seen]]:
    """The trunk's choices [B, L], and what each head does, one after another, on tokens [B, L]."""
    output = model(input_ids=tokens, output_hidden_states=True)
    hidden, found = output.hidden_states[-1], list[Seen]()
    for number in range(len(made.blocks)):
        found.append(run_head(made, tensors, number, tokens[:, number:], hidden))
        hidden = found[-1].hidden
    return output.logits.argmax(-1), found
