"""What a run of `compress` sees anyway of what reports show, and what was measured last: kept in the user's cache."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compressor.checkpoint.reader import Checkpoint
from compressor.data.sources import without_folders
from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.recipe.plan import LayerPlan
from compressor.recipe.registry import Strategy, load_strategy
from compressor.report.data import LayerMeasures, Measured
from compressor.report.measuring_pass import own_likeness, shares
from compressor.run_record import cache_folder, digest_of, read_cached, write_cached
from compressor.statistics.statistics import LayerStatistics

logger = logging.getLogger(__name__)

By = Literal["run", "report"]


def keep_measures(folder: Path, measured: Measured, by: By, key: str = "") -> None:
    """Remember what was measured of an output as it is now, under a `key` that names what else it depends on.

    Where that cannot be written, nothing is kept.
    """
    if measured.layers:
        write_cached(_path(folder, by), {**_facts(folder), "key": key, "measured": measured.to_dict()})


def kept_measures(folder: Path, by: By = "report", key: str | None = None) -> Measured | None:
    """What was measured last, unless the weights or the key, if one is given, are others; None if nothing was."""
    path, wanted = _path(folder, by), _facts(folder) | ({} if key is None else {"key": key})
    content = read_cached(path)
    try:
        fits = content is not None and all(content[name] == value for name, value in wanted.items())
        return Measured.from_dict(content["measured"]) if content is not None and fits else None
    except (KeyError, CompressionError) as error:
        logger.debug("the measures in %s are ignored: %s", path, error)
        return None


def _path(folder: Path, by: By) -> Path:
    return cache_folder("reports") / f"{by}-{digest_of(folder)}.json"


def _facts(folder: Path) -> dict[str, Any]:
    """Name, size and time of change of each weight file; none of a folder with a graph alone."""
    try:
        return {"weights": [list(entry) for entry in Checkpoint(folder).stamp()]}
    except (CompressionError, OSError):
        return {"weights": []}


class Noted:
    """Notes of a run: visits of the source from its plan's statistics, each calibration source by its weight; how alike
    experts are by the strategy's own likeness; visits of the smaller layers that a correction lets all batches pass.
    """

    def __init__(self) -> None:
        self.layers: dict[str, LayerMeasures] = {}
        self.tokens = 0  # that were seen, held-out ones excepted

    def planning(self, strategy: Strategy) -> Strategy:
        """The strategy; what it plans a layer by is noted."""

        def plan(stats: LayerStatistics, *more: Any) -> LayerPlan:
            made = strategy.plan(stats, *more)
            try:
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    self._planned(stats, strategy, made)
            except Exception as error:  # of a plugin: a report asks it again, and tells
                logger.debug("%s: nothing is noted for reports: %s", stats.layer.name, error)
            return made

        return replace(strategy, plan=plan)

    def _planned(self, stats: LayerStatistics, strategy: Strategy, made: LayerPlan) -> None:
        if "routed_count" in stats.values:
            self._note(stats.layer, stats.tokens, visits_before=shares(stats.routed_count))
        won = made.figures.get("won")  # by a strategy that tries several, each with its default options
        own = own_likeness(strategy if won is None else load_strategy(str(won)))
        if own and own.needs <= set(stats.values) and (found := own.tell(stats)):
            self._note(stats.layer, stats.tokens, similarity=found[0], similarity_label=found[1])

    def visited(self, layer: MoeLayer, counts: Tensor, tokens: int) -> None:
        """Note how many of so many tokens chose each expert [N] of a layer that is smaller now."""
        self._note(layer, tokens, visits_after=shares(counts))

    def _note(self, layer: MoeLayer, tokens: int, **found: Any) -> None:
        self.tokens = max(self.tokens, tokens)
        self.layers[layer.name] = replace(self.layers.get(layer.name, LayerMeasures(layer.name)), **found)

    def measured(self, calibration: Mapping[str, Any] | None) -> Measured:
        """All notes, with the name of their text."""
        text = without_folders(calibration)["source"] if calibration else None
        return Measured(tuple(self.layers.values()), self.tokens, text)

    def keep(self, folder: Path, calibration: Mapping[str, Any] | None) -> None:
        """Keep the notes for reports on the output in a folder."""
        keep_measures(folder, self.measured(calibration), "run")
