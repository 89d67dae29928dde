"""YAML as data: what recipes, suites and blends are read and written with."""

import re
from importlib.resources.abc import Traversable
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from compressor.errors import CompressionError, reason_of
from compressor.records import read_data

# of numbers, which PyYAML reads as text
EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+")
MOST_NODES = 100_000  # of a file, with its aliases written out
MOST_BYTES = 2**21
TOO_MANY = f"more than {MOST_NODES:,} values"


class _Loader(yaml.SafeLoader):
    """YAML without tags, in which each key stands once, and dates are text."""

    nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise ConstructorError(None, None, TOO_MANY, event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise ConstructorError(
                None, None, f"the tag {event.tag} is not read here", event.start_mark
            )
        return super().compose_node(parent, index)

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None and _size(node, {}) > MOST_NODES:
            raise ConstructorError(None, None, TOO_MANY, node.start_mark)
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConstructorError(None, None, "a key is a list or a mapping", key.start_mark)
            if str(key.value) in names:
                raise ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            names.add(str(key.value))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class _Dumper(yaml.SafeDumper):
    """Quotes text that the loader would take for a number."""


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)
for kind in (_Loader, _Dumper):
    kind.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+0123456789"))


def _size(node: Any, sizes: dict[int, int]) -> int:
    """Return the number of values in a node; too many for one that holds itself."""
    if id(node) not in sizes:
        sizes[id(node)] = MOST_NODES
        inner = (
            chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        )
        children = () if isinstance(node, yaml.ScalarNode) else inner
        sizes[id(node)] = 1 + sum(_size(child, sizes) for child in children)
    return sizes[id(node)]


def read_yaml(path: Path | Traversable, name: str, remedy: str = "mend it") -> Any:
    """Return the plain values in a file; raises `CompressionError` for one that cannot be read, or
    is no such YAML."""
    try:
        return yaml.load(read_data(path, MOST_BYTES).decode("utf-8-sig"), Loader=_Loader)
    except OSError as error:
        raise CompressionError(f"{name} cannot be read ({error.strerror}); {remedy}") from error
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:
        reason = reason_of(error, 200)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            reason = f"{error.problem} in line {error.problem_mark.line + 1}"
        raise CompressionError(f"{name} is not valid YAML ({reason}); {remedy}") from error


def yaml_text(content: Any) -> str:
    """Return YAML that `read_yaml` reads back."""
    form: dict[str, Any] = {
        "sort_keys": False,
        "allow_unicode": True,
        "default_flow_style": False,
        "width": 120,
    }
    return str(yaml.dump(content, Dumper=_Dumper, **form))
