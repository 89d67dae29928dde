"""What strategies and exporters are to the compressor: the contract that each plugin is held to."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from compressor.entry_points import EXPORTERS, STRATEGIES, defaults, load, make_options, optional, takes, working
from compressor.errors import CompressionError, reason_of
from compressor.progress import Progress
from compressor.recipe.plan import LayerPlan
from compressor.statistics.meters import LayerWeights, RouterArguments
from compressor.statistics.statistics import LayerStatistics, check_needs

CORRECTIONS = ("none", "ridge", "tune")
SimilarityFunction = Callable[..., tuple[str, torch.Tensor]]  # (statistics, options) -> label, similarities [E, E]


@dataclass(frozen=True, slots=True)
class Strategy:
    """A loaded plugin: `plan(statistics, keep, protected[, options]) -> LayerPlan`, and what it needs measured."""

    name: str
    plan: Callable[..., LayerPlan]
    needs: frozenset[str]
    options: Any = None
    summary: str = ""
    correction: str = "none"  # what it is corrected by unless the user says otherwise
    similarity: SimilarityFunction | None = None
    similarity_needs: frozenset[str] = frozenset()

    def plan_layer(self, statistics: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
        """Plan one layer, with the options if the strategy has any; refuses what is no plan of this layer."""
        extra = () if self.options is None else (self.options,)
        before = _versions(statistics)
        layer, who = statistics.layer, f"strategy {self.name!r}"
        try:
            made = self.plan(statistics, keep, protected, *extra)
        except CompressionError:
            raise
        except Exception as error:  # a plugin does what it likes
            fault = f"{who} failed: {type(error).__name__}: {reason_of(error)}"
            raise CompressionError(f"{layer.name}: {fault}; mend its plan() or choose another strategy") from error
        if changed := [name for name, version in _versions(statistics).items() if version != before[name]]:
            fault = f"changed the statistic {changed[0]!r}, which the next strategy reads too; clone() it before "
            fault += "writing to it"
            if "weights" in changed:
                fault = "changed the layer's weights, which are only to be read"
        elif not isinstance(made, LayerPlan):
            fault = f"returned {type(made).__name__} instead of a LayerPlan; have its plan() return one"
        elif (made.module, made.layer, made.experts) != (layer.name, layer.index, layer.experts):
            fault = f"returned a plan of {made.module} with {made.experts} experts; have its plan() plan the layer of "
            fault += "its statistics"
        elif (planned := len(made.groups)) != keep:
            fault = f"planned {planned} experts instead of {keep}; have its plan() keep as many as it is asked to"
        else:
            return made
        raise CompressionError(f"{layer.name}: {who} {fault}")


def _versions(statistics: LayerStatistics) -> dict[str, list[int]]:
    """How often each tensor of the statistics and of the layer's modules was written to (but not through numpy())."""
    inner = {f"by_source[{number}]": source for number, source in enumerate(statistics.by_source)}
    versions = dict[str, list[int]]()
    for name, value in {**statistics.values, **inner}.items():
        parts: Iterable[Any] = (value,)
        if isinstance(value, LayerStatistics):
            versions |= {f"{name}.{each}": numbers for each, numbers in _versions(value).items()}
            continue
        if isinstance(value, RouterArguments):
            parts = (*value.positional, *value.by_keyword.values())
        elif isinstance(value, LayerWeights):
            parts = value.block.state_dict().values() if isinstance(value.block, torch.nn.Module) else ()
        versions[name] = [part._version for part in parts if isinstance(part, torch.Tensor) and not part.is_inference()]
    return versions


def load_strategy(name: str, settings: Mapping[str, Any] | None = None) -> Strategy:
    """Load a strategy with its options; raises `CompressionError` for an unknown name, option or need."""
    return strategy_of(load(STRATEGIES, name), name, settings)


def strategy_of(module: Any, name: str, settings: Mapping[str, Any] | None = None) -> Strategy:
    """The strategy that a module is, with its options; raises `CompressionError` for what is none."""
    what, arguments = f"strategy {name!r}", "statistics, keep, protected"
    no_plugin = f"{what} is no plugin:"
    if not callable(getattr(module, "plan", None)) or not isinstance(getattr(module, "NEEDS", None), frozenset):
        raise CompressionError(f"{no_plugin} it needs a frozenset NEEDS and a function plan({arguments})")
    options = make_options(what, getattr(module, "Options", None), settings or {})
    if not takes(module.plan, 3 if options is None else 4):
        more = "" if options is None else ", options"
        raise CompressionError(f"{no_plugin} its plan should take ({arguments}{more})")

    def needs_of(function: str, default: frozenset[str]) -> frozenset[str]:
        declared = optional(module, function, what)
        needs = default if declared is None else declared(options)
        if not isinstance(needs, frozenset):
            raise CompressionError(f"{no_plugin} {function}(options) should return a frozenset of statistics")
        check_needs(needs, name)
        return needs

    needs = needs_of("needs", module.NEEDS)
    correction = getattr(module, "CORRECTION", "none")
    if correction not in CORRECTIONS:
        raise CompressionError(f"{no_plugin} CORRECTION should be {', '.join(CORRECTIONS)}, not {correction!r}")
    similarity = optional(module, "similarity", what)
    summary = (module.__doc__ or "").strip().partition("\n")[0]
    similarity_needs = needs_of("similarity_needs", needs)
    return Strategy(name, module.plan, needs, options, summary, correction, similarity, similarity_needs)


def working_strategies() -> Iterator[Strategy]:
    """Every strategy that can be loaded, by name; another is named in a warning and left out."""
    return working(STRATEGIES, load_strategy)


def option_fields(name: str) -> Mapping[str, Any]:
    """The options of a strategy with their defaults; empty if it has none."""
    return defaults(getattr(load(STRATEGIES, name), "Options", None))


class Exporter(Protocol):
    """A module that writes a finished checkpoint in another format; the first line of its docstring says which.

    It may have `Options`, a frozen dataclass like a strategy's, and `require_packages()`, which raises
    `CompressionError` where an optional package is missing, before anything is read. `read_summary(output)`, if there
    is one, returns what `export` returned. With `PLANS = True` the command `export` hands it a plan file, too.
    """

    def export(self, checkpoint: Path, output: Path, options: Any, progress: Progress) -> Any:
        """Write `checkpoint` to the new folder `output`, which has a hidden name until this returns.

        `options` is an instance of `Options`, None without them. Returns a dataclass that sums up what was written, or
        None; with the methods `describe()` and `to_dict()` it says itself what the terminal and `--json` show. Raises
        `CompressionError` and leaves nothing in `output` where it fails.
        """


def load_exporter(name: str) -> Any:
    """The exporter module of that name: an `Exporter`, or a writer of compression jobs such as safetensors."""
    module, what = load(EXPORTERS, name), f"exporter {name!r}"
    if not takes(getattr(module, "export", getattr(module, "write", None)), 4):
        raise CompressionError(
            f"{what} is no plugin: it needs a function export(checkpoint, output, options, progress)"
        )
    optional(module, "require_packages", what)
    return module


def exporter_options(name: str, settings: Mapping[str, Any] | None = None) -> Any:
    """An exporter's options with these settings, None where it has none; raises `CompressionError`."""
    return make_options(f"exporter {name!r}", getattr(load_exporter(name), "Options", None), settings or {})
