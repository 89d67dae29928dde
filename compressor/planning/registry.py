"""Strategies and exporters, found through entry points: a third party's is on equal terms with the built-in ones."""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from compressor.calibration.statistics import check_needs
from compressor.errors import CompressionError
from compressor.plans.plan import LayerPlan

STRATEGIES = "moe_compressor.strategies"
EXPORTERS = "moe_compressor.exporters"


@dataclass(frozen=True, slots=True)
class Strategy:
    """A loaded plugin: `plan(statistics, keep, protected[, options]) -> LayerPlan`, and what it needs measured."""

    name: str
    plan: Callable[..., LayerPlan]
    needs: frozenset[str]
    options: Any = None
    summary: str = ""
    correction: str = "none"  # what it is corrected by unless the user says otherwise

    def plan_layer(self, statistics: Any, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
        """Plan one layer, handing on the options if the strategy has any."""
        extra = () if self.options is None else (self.options,)
        return self.plan(statistics, keep, protected, *extra)


def _entries(group: str) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = found.get(entry.name)
        if other is not None and other.value != entry.value:
            raise CompressionError(
                f"two packages offer {entry.name!r} in {group} ({other.value} and {entry.value}); uninstall one"
            )
        found[entry.name] = entry
    return found


def names(group: str) -> list[str]:
    """Names offered in an entry-point group."""
    return sorted(_entries(group))


def _load(group: str, name: str, what: str) -> Any:
    offered = _entries(group)
    if name not in offered:
        near = difflib.get_close_matches(name, offered, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise CompressionError(
            f"there is no {what} {name!r}; {hint}known are "
            f"{', '.join(sorted(offered)) or 'none (is the package installed?)'}"
        )
    try:
        return offered[name].load()
    except ImportError as error:
        raise CompressionError(f"{what} {name!r} ({offered[name].value}) cannot be imported: {error}") from error


def load_exporter(name: str) -> Any:
    """The exporter module of that name."""
    return _load(EXPORTERS, name, "exporter")


def option_fields(name: str) -> Mapping[str, Any]:
    """The options of a strategy with their defaults; empty if it has none."""
    options = getattr(_load(STRATEGIES, name, "strategy"), "Options", None)
    return {} if options is None else {field.name: field.default for field in fields(options)}


def read_option(text: str, fault: str) -> tuple[str, Any]:
    """'steps=3' -> ('steps', 3): the value as JSON, or else as text; raises `CompressionError` with `fault`."""
    name, separator, value = text.partition("=")
    if not separator:
        raise CompressionError(fault)
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


def _check_type(strategy: str, option: str, value: Any, default: Any) -> None:
    """Refuse an option's value of another kind than its default; one without a plain default checks itself."""
    if not isinstance(default, bool | int | float | str) or type(value) is type(default):
        return
    if isinstance(default, float) and type(value) is int:
        return
    raise CompressionError(
        f"strategy {strategy!r}: option {option} is {value!r}, it should be like its default {default!r}"
    )


def load_strategy(name: str, settings: Mapping[str, Any] | None = None) -> Strategy:
    """Load a strategy with its options; raises `CompressionError` for an unknown name, option or need."""
    module = _load(STRATEGIES, name, "strategy")
    if not callable(getattr(module, "plan", None)) or not isinstance(getattr(module, "NEEDS", None), frozenset):
        raise CompressionError(
            f"strategy {name!r} is no plugin: it needs a frozenset NEEDS and a function plan(statistics, keep, "
            "protected)"
        )
    options_class: Any = getattr(module, "Options", None)
    options: Any = None
    settings = dict(settings or {})
    if options_class is not None:
        well_formed: bool = is_dataclass(options_class)
        if not well_formed:
            raise CompressionError(f"strategy {name!r}: Options should be a frozen dataclass")
        known = {field.name for field in fields(options_class)}
        if unknown := sorted(set(settings) - known):
            raise CompressionError(f"strategy {name!r} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
        for field in fields(options_class):
            _check_type(name, field.name, settings.get(field.name, field.default), field.default)
        options = options_class(**settings)
    elif settings:
        raise CompressionError(f"strategy {name!r} has no option {min(settings)!r}; it has none")
    needs = module.needs(options) if callable(getattr(module, "needs", None)) else module.NEEDS
    check_needs(needs, name)
    summary = (module.__doc__ or "").strip().partition("\n")[0]
    return Strategy(name, module.plan, needs, options, summary, getattr(module, "CORRECTION", "none"))
