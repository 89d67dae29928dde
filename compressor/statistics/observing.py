"""What a meter is, and what it sees of a layer: the calls of experts and router, batch by batch.

T tokens of a batch, E experts, K top-k, H hidden.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from torch import Tensor

from compressor.model.architecture import MoeLayer

SmallerRouter = Callable[[int], Any]  # (experts) -> the router module, on meta, of a model with that many


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The layer's own modules while it is loaded. Strategies read them; they never write."""

    experts: Any
    router: Any
    block: Any
    smaller_router: SmallerRouter


@dataclass(frozen=True, slots=True)
class RouterArguments:
    """What a router was called with at the sampled tokens; unpacks into (positional, by keyword)."""

    positional: tuple[Any, ...] = ()
    by_keyword: Mapping[str, Any] = field(default_factory=dict)
    dims: Mapping[int | str, int | None] = field(default_factory=dict)  # which dimension counts tokens, if one does

    def __iter__(self) -> Iterator[Any]:
        yield self.positional
        yield self.by_keyword


@dataclass(frozen=True, slots=True)
class Observed:
    """The layer that is observed."""

    layer: MoeLayer
    experts: Any
    router: Any
    block: Any
    seed: int


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """What a batch handed to the experts: hidden [T, H], index and weights [T, K]; `rows` [s] are sampled."""

    hidden: Tensor
    index: Tensor
    weights: Tensor
    rows: Tensor

    @property
    def used(self) -> Tensor:
        """Which choices [T, K] name an expert: a skip expert is handed on as index 0 with weight 0."""
        return self.weights != 0


@dataclass(frozen=True, slots=True)
class RouterCall:
    """A batch's router call: logits [T, E and maybe more], all its arguments by keyword or None; `rows` are sampled."""

    logits: Tensor
    arguments: tuple[tuple[str | None, Any], ...]
    rows: Tensor


class Meter:
    """Measures one statistic. `outputs` asks for the outputs of the experts, which takes a slower forward."""

    name: ClassVar[str]
    shape: ClassVar[str] = ""
    meaning: ClassVar[str]
    kind: ClassVar[str]
    outputs: ClassVar[bool] = False

    def __init__(self, observed: Observed) -> None:
        self.observed = observed

    def experts_called(self, call: ExpertsCall) -> None:
        """A batch is about to pass the experts."""

    def router_called(self, call: RouterCall) -> None:
        """A batch has passed the router."""

    def expert_ran(self, expert: int, weights: Tensor, norms: Tensor) -> None:
        """An expert put out what has these L2 norms [n] in float64, and these gate weights [n]."""

    def expert_put_out(self, expert: int, weights: Tensor, outputs: Tensor) -> None:
        """The same outputs [n, H] themselves, in the computing dtype."""

    def absorb(self, other: Self, scale: float) -> None:
        """Take in what another meter of the same layer has seen, its sums times `scale`."""

    def tensors(self) -> list[Tensor]:
        """All that was seen, to be handed to another process."""
        return []

    def restore(self, tensors: list[Tensor], like: Self) -> None:
        """Have seen what another process's meter has, whose `tensors` these are; `like` has watched the same layer."""

    @property
    def sampled(self) -> bool:
        """Whether any token was sampled."""
        return False

    def finish(self, smaller_router: SmallerRouter) -> Any:
        """The statistic."""
        raise NotImplementedError
