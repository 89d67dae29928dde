"""The contract of strategies and exporters, to which every plugin is held."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

import torch

from compressor.entry_points import EXPORTERS, STRATEGIES, load, working
from compressor.errors import CompressionError, reason_of
from compressor.frozen import frozen
from compressor.options import NamedOptions, validated
from compressor.recipe.plan import LayerPlan
from compressor.records import Json
from compressor.statistics.statistics import LayerStatistics, check_needs
from compressor.tolerance import rounded

CORRECTIONS = ("none", "ridge", "tune")
# (statistics, options) -> label, similarities [E, E]
SimilarityFunction = Callable[..., tuple[str, torch.Tensor]]


@frozen
class Strategy:
    """A loaded plugin: `plan(statistics, keep, protected[, options]) -> LayerPlan`, with its
    needs."""

    name: str
    plan: Callable[..., LayerPlan]
    needs: frozenset[str]
    options: Any = None
    summary: str = ""
    correction: str = "none"  # the default correction of its plans
    similarity: SimilarityFunction | None = None
    similarity_needs: frozenset[str] = frozenset()
    # (statistics[, options]) -> [E], by which experts are kept
    score: Callable[..., torch.Tensor] | None = None
    # (numbers of decoder layers with experts, options) refuses options
    check: Callable[..., None] | None = None
    balances: bool = False  # True to keep them by maximin over the scores of each source of text

    def balancing(self, sources: str | None) -> Self:
        """Return the strategy that keeps experts for the sum of all sources of text, or for the
        `worst` of them."""
        if sources == "worst" and self.score is None:
            raise CompressionError(
                f"strategy {self.name!r} keeps experts by no score, so balance=worst does not go "
                "with it; choose one that ranks experts, such as energy, or leave out balance"
            )
        return replace(self, balances=sources == "worst")

    def plan_layer(
        self, statistics: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()
    ) -> LayerPlan:
        """Plan one layer, with the options if the strategy has any; refuses what is no plan of this
        layer."""
        layer = statistics.layer
        arguments = [] if self.options is None else [self.options]
        try:
            if self.balances and self.score and statistics.sources:
                # the experts' shares of each source's score, 0 for a source without any
                shares = []
                for source in statistics.sources:
                    scores = rounded(self.score(source, *arguments)).cpu()
                    shares.append(scores / (float(scores.sum()) or 1.0))
                statistics = replace(statistics, shares=torch.stack(shares))
            plan = self.plan(statistics, keep, protected, *arguments)
        except CompressionError:
            raise
        except Exception as error:  # plugins raise any exception
            message = f"strategy {self.name!r} failed: {type(error).__name__}: {reason_of(error)}"
            raise CompressionError(
                f"{layer.name}: {message}; mend its plan() or choose another strategy"
            ) from error
        is_plan = isinstance(plan, LayerPlan) and (plan.module, plan.experts) == (
            layer.name,
            layer.experts,
        )
        if not is_plan or len(plan.groups) != keep:
            message = (
                f"strategy {self.name!r} returned no plan of this layer that keeps {keep} experts"
            )
            raise CompressionError(f"{layer.name}: {message}; mend its plan()")
        return plan


def load_strategy(name: str, settings: Json | None = None) -> Strategy:
    """Load a strategy with its options; raises `CompressionError` for an unknown name, option or
    need."""
    return strategy_of(load(STRATEGIES, name), name, settings)


def strategy_of(module: Any, name: str, settings: Json | None = None) -> Strategy:
    """Return the strategy that a module is, with its options; raises `CompressionError` for what is
    none."""
    what = f"strategy {name!r}"
    needs = getattr(module, "NEEDS", None)
    if not callable(getattr(module, "plan", None)) or not isinstance(needs, frozenset):
        message = "it needs a frozenset NEEDS and a function plan(statistics, keep, protected)"
        raise CompressionError(f"{what} is no plugin: {message}")
    options = _plugin_options(what, module, settings or {})
    correction = getattr(module, "CORRECTION", "none")
    if correction not in CORRECTIONS:
        message = f"CORRECTION should be {', '.join(CORRECTIONS)}, not {correction!r}"
        raise CompressionError(f"{what} is no plugin: {message}")
    if hasattr(module, "needs"):
        needs = module.needs(options)
    similarity_needs = needs
    if hasattr(module, "similarity_needs"):
        similarity_needs = module.similarity_needs(options)
    needs |= getattr(options, "merge_needs", frozenset())
    check_needs(needs | similarity_needs, name)
    summary = (module.__doc__ or "").strip().partition("\n")[0]
    hooks: dict[str, Any] = {
        hook: getattr(module, hook, None) for hook in ("similarity", "score", "check")
    }
    required = name, module.plan, needs, options, summary, correction
    return Strategy(*required, similarity_needs=similarity_needs, **hooks)


def working_strategies() -> Iterator[Strategy]:
    """Yield every strategy that can be loaded, by name; another is named in a warning and left
    out."""
    return working(STRATEGIES, load_strategy)


def load_exporter(name: str) -> Any:
    """Return the exporter of that name, a module; the first line of its docstring says what it
    writes.

    Its `export(checkpoint, output, options, progress)` writes a finished checkpoint to the new
    folder `output`, which has a hidden name until it returns, and leaves nothing there where it
    fails. It returns None or a dataclass that sums up what was written; with the methods
    `describe()` and `to_dict()` that says itself what the terminal and `--json` show. The module
    may have `Options` like a strategy's, and `require_packages()`, which raises
    `CompressionError` where an optional package is missing. `read_summary(output)`, if there is
    one, reads the summary of a finished output. With `PLANS = True` the command `export` hands it a
    plan file, too.

    An export can be pushed if the module names the `FILES` by which it is known, the last of them
    its record, and has `check_export(output)`, which refuses a damaged one and returns its files
    with the bytes in each that are not weights, and `card_blocks(output, place, repo_id)`, which
    says how to load it."""
    module = load(EXPORTERS, name)
    if not callable(getattr(module, "export", None)):
        message = "it needs a function export(checkpoint, output, options, progress)"
        raise CompressionError(f"exporter {name!r} is no plugin: {message}")
    return module


def exporter_options(name: str, settings: Json | None = None) -> Any:
    """Return an exporter's options with these settings, None where it has none; raises
    `CompressionError`."""
    return _plugin_options(f"exporter {name!r}", load_exporter(name), settings or {})


def _plugin_options(what: str, module: Any, settings: Json) -> Any:
    """Return the `Options` of a module with these settings, None where it has none; `what` names
    it in a `CompressionError`."""
    kind = getattr(module, "Options", NamedOptions)
    if not isinstance(kind, type) or not issubclass(kind, NamedOptions):
        raise CompressionError(
            f"{what}: Options is no class of options; write `class Options(NamedOptions)` with "
            "NamedOptions from compressor.plugins, fields such as `power: float = 1.0`, and below "
            "each a text that explains it"
        )
    try:
        options = validated(kind, settings, what, f"{what} has no option")
    except CompressionError:
        raise
    except Exception as error:  # plugins raise any exception
        raise CompressionError(f"{what} does not take these options: {reason_of(error)}") from error
    return None if kind is NamedOptions else options
