"""Lists of experts to keep that other tools leave, as options of the strategy `listed`.

RAZOR's kept_expert_indices.json maps main_LAYER to experts, the list that vllm-ascend reads has a
line {"LAYER": [EXPERT, ...]} for each layer, and REAP's observations are a pickle of {LAYER:
{"reap": saliencies [E], ...}}."""

import re
import reprlib
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from compressor.data.sources import WeightedSource
from compressor.errors import CompressionError, ItemError
from compressor.recipe.steps_plan import MOST_EXPERTS
from compressor.records import Json, read_json, value_as

LAYER = re.compile(r"(?:main_|(?:.+\.)?layers\.)?(\d+)(?:\..+)?")
SALIENCY = "reap"
Expert = Annotated[int, Field(ge=0, lt=MOST_EXPERTS)]
SUFFIXES = (".pt", ".pth")
HINT = "name a kept_expert_indices.json, an experts.jsonl or REAP's observations (.pt)"


def options_of_list(path: Path, flags: Json) -> Json:
    """Return the options, by path, by which `plan` keeps the experts of a file; `flags` may say how
    many of them.

    Raises `CompressionError` for a file that is no list, and for one that leaves the number open.
    """
    is_ranking = path.suffix in SUFFIXES
    order = _saliencies(path) if is_ranking else _lists(path)
    options = {"prune.split": 1, "prune.correct": "none", "prune.strategy": "listed"}
    options["prune.options.order"] = {
        layer: " ".join(map(str, experts)) for layer, experts in order.items()
    }
    if flags.keys() & {"prune.experts", "prune.ratio"}:
        return options
    if is_ranking:
        raise CompressionError(f"{path} scores all experts; say how many to keep with --experts N")
    fewest, *others = sorted({len(experts) for experts in order.values()})
    if others:
        raise CompressionError(
            f"{path} keeps {fewest} to {others[-1]} experts in a layer, and a stock checkpoint has "
            "one number for all; pass --experts N, or let the step constants choose (--format mone)"
        )
    return {**options, "prune.experts": fewest}


def _lists(path: Path) -> dict[str, list[int]]:
    """Return the lists of a JSON file, or of one JSON object a line, by decoder layer."""
    if path.suffix == ".jsonl":
        from compressor.data.rows import source_rows  # which loads transformers

        contents = [
            _object(row, where)
            for where, row in source_rows(WeightedSource(str(path), 1.0), 0, "items").rows
        ]
    else:
        contents = [_object(read_json(path, HINT, HINT), str(path))]
    order = dict[str, list[int]]()
    for name, entry in chain.from_iterable(content.items() for content in contents):
        match = LAYER.fullmatch(name)
        if match:  # other names are of multi-token-prediction heads
            listed = entry.get("keep") if isinstance(entry, dict) else entry
            experts = value_as(listed, tuple[Expert, ...], f"{path}: {name}")
            _add(order, path, match[1], experts)
    if not order:
        raise CompressionError(f"{path} lists no experts; {HINT}")
    return order


def _object(row: Any, where: str) -> Json:
    if isinstance(row, ItemError):
        raise row
    content: Json = value_as(row, Json, where)
    return content


def _add(order: dict[str, list[int]], path: Path, layer: str, experts: Sequence[int]) -> None:
    """Add the experts of a decoder layer; refuse a layer, or one of its experts, that is named
    twice."""
    if len(layer) > 4 or str(int(layer)) in order:
        raise CompressionError(
            f"{path} has layer {layer[:20]} twice, or no model has it; give each layer one list"
        )
    twice = [expert for expert, count in Counter(experts).items() if count > 1]
    if twice:
        raise CompressionError(
            f"{path} names expert {twice[0]} of layer {layer} twice; name it once"
        )
    order[str(int(layer))] = list(experts)


def _saliencies(path: Path) -> dict[str, list[int]]:
    """Return the experts of each layer by falling saliency."""
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickles raise anything
        raise CompressionError(
            f"{path} holds no observations of REAP, or more than tensors; {HINT}"
        ) from error
    order = dict[str, list[int]]()
    for layer, statistics in content.items() if isinstance(content, dict) else ():
        scores = statistics.get(SALIENCY) if isinstance(statistics, dict) else None
        if not (
            str(layer).isdecimal()
            and isinstance(scores, torch.Tensor)
            and scores.dim() == 1
            and len(scores) <= MOST_EXPERTS
            and scores.isfinite().all()
        ):
            shown = reprlib.repr(layer)
            raise CompressionError(
                f"{path}: {shown} should be a layer's number with its finite {SALIENCY}; {HINT}"
            )
        _add(order, path, str(layer), scores.argsort(descending=True, stable=True).tolist())
    if not order:
        raise CompressionError(f"{path} holds no observations of REAP; {HINT}")
    return order
