"""Text generation: the stock model in memory, its end tokens, and the distribution of the next
token.

Top-p, or nucleus sampling: Holtzman et al., ICLR 2020, arXiv:1904.09751; top-k: Fan et al., ACL
2018, arXiv:1805.04833."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.answers.options import GenerationOptions
from compressor.checkpoint.reader import Checkpoint
from compressor.devices import as_float64, pick_device
from compressor.errors import CompressionError
from compressor.model.architecture import load_config, model_class
from compressor.model.opened import load_whole, pick_dtype
from compressor.progress import quiet_transformers
from compressor.records import read_object


def load_writing(folder: Path, device: str, dtype: str) -> Any:
    """Load a stock model that generates text; raises `CompressionError` for one that cannot.

    `dtype` 'auto' is the checkpoint's own."""
    from transformers import GenerationMixin

    config = load_config(folder)
    kind = model_class(config)
    torch_dtype = pick_dtype(dtype, config, Checkpoint(folder))
    if not kind.can_generate():
        raise CompressionError(
            f"{kind.__name__} does not generate text; name the folder of a causal language model"
        )
    if kind.generate is not GenerationMixin.generate:
        raise CompressionError(
            f"{kind.__name__} does not generate token by token; use its own generate() instead"
        )
    with quiet_transformers():
        return load_whole(folder, kind, dtype=torch_dtype).to(pick_device(device))


def free(device: torch.device) -> None:
    """Free the memory of a model that nothing refers to any more."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def probabilities(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """Return the distributions that next tokens are drawn from: [..., V] -> [..., V] in float64,
    summing to 1.

    Top-k comes first; top-p then takes, of what is left, the fewest of the most probable tokens
    that hold that share. Ties favour lower ids."""
    values = as_float64(logits)
    # the largest is 0: no temperature overflows
    scaled = (values - values.amax(-1, keepdim=True)) / temperature
    if top_k is None and top_p is None:
        return torch.softmax(scaled, dim=-1)
    order = scaled.argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    ranked = torch.softmax(scaled.gather(-1, order), dim=-1)
    if top_p is not None:
        before = ranked.cumsum(-1) - ranked
        ranked = ranked.where(before < top_p, 0.0)
    return torch.zeros_like(scaled).scatter(-1, order, ranked / ranked.sum(-1, keepdim=True))


def choose(logits: Tensor, options: GenerationOptions, numbers: Tensor) -> Tensor:
    """Return the next token of each row by a number in [0, 1): [B, V], [B] in float64 -> [B].

    It is the token at which the sum of probabilities passes the number, or the most probable one at
    temperature 0."""
    if not bool(logits.amax(-1).isfinite().all()):  # NaN and infinity both come out of a maximum
        raise CompressionError(
            "the model's logits are not finite; try --dtype float32, and check its weights if "
            "that does not help"
        )
    if not options.temperature:
        return logits.argmax(-1)
    passed = probabilities(logits, options.temperature, options.top_k, options.top_p).cumsum(-1)
    limits = numbers[:, None].to(passed.device) * passed[:, -1:]
    return (passed <= limits).sum(-1)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts on generation from the JSON files beside the weights."""

    stops: frozenset[int]  # tokens that end a text
    positions: int | None  # that the model was made for


def read_facts(folder: Path, tokenizer: Any = None) -> ModelFacts:
    """Read end tokens of the generation config or else the config, and positions of the config or
    its part for text.

    With a `tokenizer` its own end token counts, too, as it does for servers.
    """

    def read(name: str) -> dict[str, Any]:
        return read_object(folder / name) if (folder / name).is_file() else {}

    def first(name: str, *nodes: Mapping[str, Any]) -> Any:
        return next((node[name] for node in nodes if node.get(name) is not None), None)

    config = read("config.json")
    nodes = [config, config.get("text_config") or {}]
    stops = first("eos_token_id", read("generation_config.json"), *nodes)
    if not isinstance(stops, list):
        stops = [] if stops is None else [stops]
    if not all(isinstance(stop, int) for stop in stops):
        raise CompressionError(
            f"{folder}: eos_token_id {stops!r} is no token id and no list of them; correct it"
        )
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        stops = [*stops, int(tokenizer.eos_token_id)]
    positions = first("max_position_embeddings", *nodes)
    return ModelFacts(frozenset(stops), positions if isinstance(positions, int) else None)
