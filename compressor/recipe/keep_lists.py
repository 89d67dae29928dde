"""Lists and scores of experts that other tools leave, as options of the strategy `listed`.

RAZOR's kept_expert_indices.json maps main_LAYER to experts, and the list that vllm-ascend reads has
a line {"LAYER": [EXPERT, ...]} for each layer. Scores are REAP's observations, a pickle of {LAYER:
{"reap": saliencies [E], ...}}, and counts of routed tokens: what SGLang's recorder of the expert
distribution dumps (0.5: {"logical_count": [steps, layers, E]}, or in the modes per_pass and
per_token {"records": [{"global_physical_count": [layers, P]}, ...], "last_physical_to_logical_map":
[layers, P]}), and the GGUF files of llama-imatrix."""

import re
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from compressor import entry_points
from compressor.data.sources import WeightedSource
from compressor.errors import CompressionError, ItemError, reason_of
from compressor.recipe.steps_plan import MOST_EXPERTS
from compressor.records import Json, read_json, value_as

LAYER = re.compile(r"(?:main_|(?:.+\.)?layers\.)?(\d+)(?:\..+)?")
SALIENCY = "reap"
Expert = Annotated[int, Field(ge=0, lt=MOST_EXPERTS)]
SUFFIXES = (".pt", ".pth")
HINT = (
    "name a kept_expert_indices.json, an experts.jsonl, REAP's observations or a dump of SGLang's "
    "expert distribution recorder (.pt), or an imatrix (.gguf)"
)
Order = dict[str, list[int]]  # experts by decoder layer, the best first


def options_of_list(paths: Sequence[Path], flags: Json) -> Json:
    """Return the options, by path, by which `plan` keeps the experts of files; `flags` may say how
    many of them.

    Of several files those experts stay that are listed or rank highest in any of them. Raises
    `CompressionError` for a file that is no list, and for one that leaves the number open."""
    read = [_read(path) for path in paths]
    scoring = [path for path, (_, is_ranking) in zip(paths, read, strict=True) if is_ranking]
    order = read[0][0] if len(read) == 1 else _united(read)
    options = {"prune.split": 1, "prune.correct": "none", "prune.strategy": "listed"}
    options["prune.options.order"] = {
        layer: " ".join(map(str, experts)) for layer, experts in order.items()
    }
    options["prune.options.all"] = bool(scoring)
    if flags.keys() & {"prune.experts", "prune.ratio"}:
        return options
    if scoring:
        raise CompressionError(
            f"{scoring[0]} scores all experts; say how many to keep with --experts N"
        )
    fewest, *others = sorted({len(experts) for experts in order.values()})
    if others:
        kept = f"{paths[0]} keeps" if len(paths) == 1 else "these lists together keep"
        raise CompressionError(
            f"{kept} {fewest} to {others[-1]} experts in a layer, and a stock checkpoint has one "
            "number for all; pass --experts N, or let the step constants choose (--format mone)"
        )
    return {**options, "prune.experts": fewest}


def _read(path: Path) -> tuple[Order, bool]:
    """Return the experts that a file lists or scores, and True if it scores them."""
    kind = entry_points.kind_of_file(str(path))
    if kind is not None:
        return _ranked(
            path, entry_points.load(entry_points.MODEL_FILES, kind).routed_counts(path)
        ), True
    if path.suffix in SUFFIXES:
        return _ranked(path, _tensors(path)), True
    return _lists(path), False


def _united(orders: Sequence[tuple[Order, bool]]) -> Order:
    """Return all experts by their best rank in an order, then by the sum of their ranks; those of a
    mere list all come first."""
    united = Order()
    for layer in dict.fromkeys(chain.from_iterable(order for order, _ in orders)):
        ranks = list[dict[int, int]]()
        for order, is_ranking in orders:
            experts = order.get(layer, ())
            ranks.append({expert: place * is_ranking for place, expert in enumerate(experts)})
        best = dict[int, tuple[int, int]]()
        for expert in dict.fromkeys(chain.from_iterable(ranks)):
            places = [places.get(expert, MOST_EXPERTS) for places in ranks]
            best[expert] = min(places), sum(places)
        united[layer] = sorted(best, key=best.__getitem__)
    return united


def _lists(path: Path) -> Order:
    """Return the lists of a JSON file, or of one JSON object a line, by decoder layer."""
    if path.suffix == ".jsonl":
        from compressor.data.rows import source_rows  # which loads transformers

        contents = [
            _object(row, where)
            for where, row in source_rows(WeightedSource(str(path), 1.0), 0, "items").rows
        ]
    else:
        contents = [_object(read_json(path, HINT, HINT), str(path))]
    order = Order()
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


def _add(order: Order, path: Path, layer: str, experts: Sequence[int]) -> None:
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


def _ranked(path: Path, scores: Mapping[Any, Any]) -> Order:
    """Return the experts of each layer by falling score [E]."""
    import torch

    order = Order()
    for layer, score in scores.items():
        if not (
            str(layer).isdecimal()
            and isinstance(score, torch.Tensor)
            and score.dim() == 1
            and len(score) <= MOST_EXPERTS
            and score.isfinite().all()
        ):
            shown = reprlib.repr(layer)
            raise CompressionError(
                f"{path}: {shown} should be a layer's number with a finite score of each expert; "
                f"{HINT}"
            )
        _add(order, path, str(layer), score.argsort(descending=True, stable=True).tolist())
    if not order:
        raise CompressionError(f"{path} holds no scores of experts; {HINT}")
    return order


def _tensors(path: Path) -> Mapping[Any, Any]:
    """Return the scores of a file of torch's, by decoder layer."""
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CompressionError(f"{path} cannot be read ({error.strerror}); {HINT}") from error
    except Exception as error:  # pickles raise anything
        raise CompressionError(
            f"{path} holds no scores of experts, or more than tensors; {HINT}"
        ) from error
    if not isinstance(content, dict):
        return {}
    recorded = "records" in content or "logical_count" in content
    try:
        if "records" in content:
            place = content["last_physical_to_logical_map"].long()
            most = int(place.max())
            if most >= MOST_EXPERTS:
                raise IndexError(f"expert {most} is none")
            counts = torch.zeros(len(place), most + 1, dtype=torch.float64)
            for record in content["records"]:
                counted = record["global_physical_count"].double()
                if counted.shape != place.shape:
                    raise IndexError("counts and map have other shapes")
                counts.scatter_add_(1, place, counted)
        elif recorded:
            counts = content["logical_count"].to_dense().double().sum(0)
        else:
            scores = {}
            for layer, statistics in content.items():
                score = statistics.get(SALIENCY) if isinstance(statistics, dict) else None
                scores[layer] = score.double() if isinstance(score, torch.Tensor) else score
            return scores
        if not (counts.isfinite().all() and (counts >= 0).all()):
            raise TypeError("counts should be finite and at least 0")
        # a layer without experts, and one that nothing was routed in, has no counts
        return {layer: count for layer, count in enumerate(counts) if count.any()}
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        what = "no dump of SGLang's recorder" if recorded else "no file of scores"
        raise CompressionError(f"{path} is {what} ({reason_of(error)}); {HINT}") from error
