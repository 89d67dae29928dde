"""Lists of experts to keep that other tools leave, as options of the strategy `listed`.

RAZOR's kept_expert_indices.json maps main_LAYER to experts, the list that vllm-ascend reads has a line
{"LAYER": [EXPERT, ...]} for each layer, and REAP's observations are a pickle of {LAYER: {"reap": saliencies [E], ...}}.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError, reason_of

LAYER = re.compile(r"(?:main_|(?:.+\.)?layers\.)?(\d+)(?:\..+)?")
SALIENCY = "reap"
SUFFIXES = (".pt", ".pth")
HINT = "name a kept_expert_indices.json, an experts.jsonl or REAP's observations (.pt)"


def options_of_list(path: Path, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, by path, by which `plan` keeps the experts of a file; `flags` may say how many of them.

    Raises `CompressionError` for a file that is no list, and for one that leaves the number open.
    """
    is_ranking = path.suffix in SUFFIXES
    order = _saliencies(path) if is_ranking else _lists(path)
    options = {"split.parts": 1, "correct.method": "none", "prune.strategy": "listed"}
    options["prune.options.order"] = {layer: " ".join(map(str, experts)) for layer, experts in order.items()}
    if flags.keys() & {"prune.experts", "prune.ratio"}:
        return options
    if is_ranking:
        raise CompressionError(f"{path} scores all experts; say how many to keep with --experts N")
    counts = {int(layer): len(experts) for layer, experts in order.items()}
    fewest = min(counts.values())
    if max(counts.values()) > fewest:
        options["prune.experts_by_layer"] = counts
    return {**options, "prune.experts": fewest}


def _lists(path: Path) -> dict[str, list[int]]:
    """Return the lists of a JSON file, or of one JSON object a line, by decoder layer."""
    order = {}
    try:
        text = path.read_text(encoding="utf-8")
        for content in map(json.loads, text.splitlines() if path.suffix == ".jsonl" else [text]):
            for name, entry in content.items():
                experts = entry["keep"] if isinstance(entry, dict) else entry
                match = LAYER.fullmatch(name)
                if match:  # other names are of multi-token-prediction heads
                    order[str(int(match[1]))] = [int(expert) for expert in experts]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CompressionError(f"{path} is no list of experts ({reason_of(error)}); {HINT}") from error
    if not order:
        raise CompressionError(f"{path} lists no experts; {HINT}")
    return order


def _saliencies(path: Path) -> dict[str, list[int]]:
    """Return the experts of each layer by falling saliency."""
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        saliencies = {str(int(layer)): statistics[SALIENCY] for layer, statistics in content.items()}
        return {layer: scores.argsort(descending=True, stable=True).tolist() for layer, scores in saliencies.items()}
    except Exception as error:  # pickles raise anything
        raise CompressionError(f"{path} holds no observations of REAP ({reason_of(error)}); {HINT}") from error
