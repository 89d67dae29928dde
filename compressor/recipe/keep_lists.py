"""Lists and scores of experts that other tools leave, as options of the strategy `listed`.

RAZOR's kept_expert_indices.json maps main_LAYER to experts, and the list that vllm-ascend reads has
a line {"LAYER": [EXPERT, ...]} for each layer. Scores are REAP's observations, a pickle of {LAYER:
{"reap": saliencies [E], ...}}, and counts of routed tokens: what SGLang's recorder of the expert
distribution dumps (0.5: {"logical_count": [steps, layers, E]}, or in the modes per_pass and
per_token {"records": [{"global_physical_count": [layers, P]}, ...], "last_physical_to_logical_map":
[layers, P]}), the GGUF files of llama-imatrix, and responses of vLLM (0.22) with {"choices":
[{"routed_experts": base64 of a .npy of ids [tokens, layers, top_k]}, ...]}."""

import re
import reprlib
from base64 import b64decode
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from compressor import entry_points
from compressor.data.sources import WeightedSource
from compressor.errors import CompressionError, ItemError, reason_of
from compressor.recipe.steps_plan import MOST_EXPERTS
from compressor.records import Json, read_json, value_as

if TYPE_CHECKING:
    from torch import Tensor

LAYER = re.compile(r"(?:main_|(?:.+\.)?layers\.)?(\d+)(?:\..+)?")
SALIENCY = "reap"
Expert = Annotated[int, Field(ge=0, lt=MOST_EXPERTS)]
SUFFIXES = (".pt", ".pth")
MOST_LAYERS = 2**12
HINT = (
    "name a kept_expert_indices.json, an experts.jsonl, REAP's observations or a dump of SGLang's "
    "expert distribution recorder (.pt), an imatrix (.gguf), or vLLM's responses (.jsonl)"
)
RESPONSES = "start vLLM with --enable-return-routed-experts, and save responses that don't stream"
Order = dict[str, list[int]]  # experts by decoder layer, the best first


class Found(NamedTuple):
    """What a file says of experts."""

    order: Order
    is_ranking: bool = True  # by scores, which leave the number open
    is_whole: bool = True  # it has all experts of a layer


def options_of_list(paths: Sequence[Path], given: Collection[str]) -> Json:
    """Return the options, by path, by which `plan` keeps the experts of files; those that are
    `given` may say how many.

    Of several files those experts stay that are listed or rank highest in any of them. Raises
    `CompressionError` for a file that is no list, for one that leaves the number open, and where a
    strategy is given as well."""
    if "prune.strategy" in given:
        raise CompressionError(
            f"{paths[0]} says which experts stay, and so would the strategy; give one of them"
        )
    read = [_read(path) for path in paths]
    scoring = [path for path, found in zip(paths, read, strict=True) if found.is_ranking]
    order = read[0].order if len(read) == 1 else _united(read)
    options = {"prune.split": 1, "prune.correct": "none", "prune.strategy": "listed"}
    options["prune.options.order"] = {
        layer: " ".join(map(str, experts)) for layer, experts in order.items()
    }
    options["prune.options.all"] = any(found.is_whole for found in read)
    if {"prune.experts", "prune.ratio"}.intersection(given):
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


def _read(path: Path) -> Found:
    """Return the experts that a file lists or scores."""
    kind = entry_points.kind_of_file(str(path))
    if kind is not None:
        counts = entry_points.load(entry_points.MODEL_FILES, kind).routed_counts(path)
        return Found(_ranked(path, counts))
    if path.suffix in SUFFIXES:
        return Found(_ranked(path, _tensors(path)))
    order, responses = Order(), 0
    tallies: dict[int, Tensor] = {}  # an annotation alone, for torch is slow to import
    for where, content in _objects(path):
        if "choices" in content:
            responses += 1
            _tally(content["choices"], where, tallies)
        else:
            _add_lists(order, path, content)
    if responses and not order:
        return Found(_ranked(path, _counts(path, tallies)), is_whole=False)
    if responses or not order:
        what = "holds lists beside responses" if responses else "lists no experts"
        raise CompressionError(f"{path} {what}; {HINT}")
    return Found(order, is_ranking=False, is_whole=False)


def _united(orders: Sequence[Found]) -> Order:
    """Return all experts by their best rank in an order, then by the sum of their ranks; those of a
    mere list all come first."""
    united = Order()
    for layer in dict.fromkeys(chain.from_iterable(found.order for found in orders)):
        ranks = list[dict[int, int]]()
        for order, is_ranking, _ in orders:
            experts = order.get(layer, ())
            ranks.append({expert: place * is_ranking for place, expert in enumerate(experts)})
        best = dict[int, tuple[int, int]]()
        for expert in dict.fromkeys(chain.from_iterable(ranks)):
            places = [places.get(expert, MOST_EXPERTS) for places in ranks]
            best[expert] = min(places), sum(places)
        united[layer] = sorted(best, key=best.__getitem__)
    return united


def _objects(path: Path) -> Iterator[tuple[str, Json]]:
    """Yield the object of a JSON file, or those of its lines, with the place of each."""
    if path.suffix != ".jsonl":
        yield str(path), value_as(read_json(path, HINT, HINT), Json, str(path))
        return
    from compressor.data.rows import source_rows  # which loads transformers

    for where, row in source_rows(WeightedSource(str(path), 1.0), 0, "items").rows:
        if isinstance(row, ItemError):
            raise row
        yield where, value_as(row, Json, where)


def _add_lists(order: Order, path: Path, content: Json) -> None:
    """Add the lists of an object, by decoder layer."""
    for name, entry in content.items():
        match = LAYER.fullmatch(name)
        if match:  # other names are of multi-token-prediction heads
            listed = entry.get("keep") if isinstance(entry, dict) else entry
            experts = value_as(listed, tuple[Expert, ...], f"{path}: {name}")
            _add(order, path, match[1], experts)


def _tally(choices: Any, where: str, tallies: dict[int, "Tensor"]) -> None:
    """Add how often the choices of a response went to each expert, [MOST_EXPERTS] by layer."""
    import numpy as np
    import torch

    for choice in value_as(choices, tuple[Json, ...], where):
        encoded = choice.get("routed_experts")
        if encoded is None:  # of a request that ended before its first token
            continue
        try:
            content = BytesIO(b64decode(encoded, validate=True))
            chosen = np.lib.format.read_array(content, allow_pickle=False)
            if chosen.ndim != 3 or chosen.dtype.kind not in "iu" or chosen.shape[1] > MOST_LAYERS:
                raise ValueError("ids should be whole numbers of tokens, layers and places")
            ids = torch.from_numpy(chosen.astype(np.int64)).sort(dim=2).values
            if not ((ids >= 0) & (ids < MOST_EXPERTS)).all():
                raise ValueError("an id is of no expert")
        except Exception as error:  # headers raise anything
            raise CompressionError(
                f"{where}: its routed_experts cannot be read ({reason_of(error)}); {RESPONSES}"
            ) from error
        # vLLM leaves zeros, one expert several times, in layers without experts.
        routed = (ids.diff(dim=2) > 0).all(dim=2)
        for layer in range(ids.shape[1]):
            counts = ids[routed[:, layer], layer].flatten().bincount(minlength=MOST_EXPERTS)
            tallies[layer] = tallies.get(layer, 0) + counts


def _counts(path: Path, tallies: Mapping[int, "Tensor"]) -> Mapping[int, "Tensor"]:
    """Return the tallies of layers with experts up to the last that any went to; top-1 models leave
    zeros for no expert as well."""
    counts = {layer: tally for layer, tally in tallies.items() if tally.count_nonzero() > 1}
    if not counts:
        raise CompressionError(f"no response in {path} has routed_experts; {RESPONSES}")
    experts = 1 + max(int(tally.nonzero().max()) for tally in counts.values())
    return {layer: tally[:experts] for layer, tally in counts.items()}


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
