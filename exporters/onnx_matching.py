"""onnxscript's optimiser, kept from looking at every node of a graph for every other node.

Its matcher lists the whole graph before it looks at the node at hand, once for each node and each pattern with several
outputs. In a graph of a hundred layers that alone takes longer than all the rest of an export.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def quick_matching() -> Iterator[None]:
    """While the block runs, a pattern with several outputs is tried only on nodes that may be the first of them."""
    try:
        from onnxscript.rewriter._basics import MatchResult
        from onnxscript.rewriter._matcher import SimplePatternMatcher

        own = SimplePatternMatcher.match
    except (ImportError, AttributeError):  # another version of onnxscript, which may be as quick by itself
        yield
        return

    def match(self: Any, model: Any, graph: Any, node: Any, *more: Any, **named: Any) -> Any:
        if not self.pattern.has_single_output_node:
            first = self.pattern.output_nodes[0].op_identifier()
            if first is not None and first != node.op_identifier():
                return MatchResult().fail("the node is not the first output's")
        return own(self, model, graph, node, *more, **named)

    with patch.object(SimplePatternMatcher, "match", match):
        yield
