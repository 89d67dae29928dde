"""Mixtral with a module for every expert, as transformers 4 had it and other projects' code walks it.

transformers 5 keeps the experts of a layer in one tensor and returns no router logits from the block. `put_back` takes
the place of its classes in this process: `layer.block_sparse_moe.experts[i].w1` is there again, and the block returns
(hidden states, router logits). Checkpoints are read and written in Mixtral's own layout, which has these very names.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, softmax
from transformers.activations import ACT2FN
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.models.mixtral import modeling_mixtral
from transformers.utils.output_capturing import OutputRecorder


class MixtralBlockSparseTop2MLP(nn.Module):
    """One expert: w2(act(w1 x) * w3 x)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, tokens: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.w2(self.act_fn(self.w1(tokens)) * self.w3(tokens))  # type: ignore[no-any-return]


class MixtralSparseMoeBlock(nn.Module):
    """Routes each token to the experts of its largest router logits; the peers know the block by this name."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_local_experts, config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, self.num_experts, bias=False)
        self.experts = nn.ModuleList(
            MixtralBlockSparseTop2MLP(config) for _ in range(self.num_experts)
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[B, L, H] -> [B, L, H] and router logits [T, E]."""
        tokens = hidden.reshape(-1, hidden.shape[-1])
        logits = self.gate(tokens)
        weights, chosen = softmax(logits, dim=-1, dtype=torch.float).topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(tokens.dtype)
        out = torch.zeros_like(tokens)
        for expert, routed in zip(
            self.experts, one_hot(chosen, self.num_experts).permute(2, 0, 1), strict=True
        ):
            token, place = routed.nonzero(as_tuple=True)
            if len(token):
                out.index_add_(0, token, expert(tokens[token]) * weights[token, place, None])
        return out.view_as(hidden), logits


class MixtralDecoderLayer(modeling_mixtral.MixtralDecoderLayer):
    """The stock layer with the block of above under its old name."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        del self.mlp
        self.block_sparse_moe = MixtralSparseMoeBlock(config)

    @property
    def mlp(self) -> Callable[[Tensor], Tensor]:
        """What the stock forward calls: the block without its logits."""
        return lambda hidden: self.block_sparse_moe(hidden)[0]


def put_back() -> None:
    """Let this process build Mixtral so, and read and write its checkpoints without converting."""
    for made in (MixtralBlockSparseTop2MLP, MixtralSparseMoeBlock, MixtralDecoderLayer):
        setattr(modeling_mixtral, made.__name__, made)
    recorder = OutputRecorder(MixtralSparseMoeBlock, index=1)
    modeling_mixtral.MixtralPreTrainedModel._can_record_outputs["router_logits"] = recorder
    register_checkpoint_conversion_mapping("mixtral", [], overwrite=True)


def load(folder: Path) -> Any:
    """The checkpoint in memory, in float32, after `put_back`."""
    return modeling_mixtral.MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
