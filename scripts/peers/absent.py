"""Empty stand-ins for packages that another project's modules import and that this machine lacks."""

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Anything:
    """May be called and asked for anything, and does nothing: for names that are imported and not used."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    def __call__(self, *arguments: Any, **named: Any) -> "Anything":
        return self

    def __getattr__(self, name: str) -> "Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def stand_in(packages: Iterable[str]) -> frozenset[str]:
    """Let those of the packages that are not installed be imported empty, in this process; returns their names."""
    missing = frozenset(
        name
        for name in packages
        if name not in sys.modules and importlib.util.find_spec(name) is None
    )
    sys.meta_path.append(_Finder(missing))
    return missing
