"""Steps of a compression: their options and facts, which load no torch, and their behaviour.

The options are a pydantic model. Its fields are declared once; command line, YAML, plan, digest,
the card's command and the reference page are made of them. Third parties announce theirs through
the entry point `moe_compressor.steps`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    field_validator,
)
from pydantic.json_schema import SkipJsonSchema

from compressor.data.sources import GivenTexts
from compressor.data.sources import TextPart as TextPart
from compressor.extras import require
from compressor.model.moe_layer import MoeLayer
from compressor.options import NamedOptions, Options, pairs

if TYPE_CHECKING:  # a step's options are read without torch
    from torch import Tensor

    from compressor.checkpoint.reader import Size
    from compressor.document.blocks import Block
    from compressor.model.opened import OpenModel
    from compressor.recipe.plan import ExpertPlan
    from compressor.recipe.steps_plan import Decision
    from compressor.steps.state import State
    from compressor.steps.tensors import OutputJob

Tensors = Mapping[str, "Tensor"]
Source = (
    str | SkipJsonSchema[Annotated[InstanceOf[GivenTexts], PlainSerializer(str, return_type=str)]]
)
DEFAULT_LENGTH = 512
MOST_SOURCES = 100  # as many as a plan may have


class EmphasisOptions(Options):
    """Weights of tokens where something is fitted to text; all others count 1."""

    end: float | None = Field(None, gt=0, le=1000)
    """Weight of the tokens that end an answer."""
    think_end: float | None = Field(None, gt=0, le=1000)
    """Weight of the token that ends the thinking."""


class TextOptions(Options):
    """Options of the text: its sources and size."""

    data: tuple[Source, ...] | None = Field(None, max_length=MOST_SOURCES)
    """Text, JSONL or parquet file, data set, 'demo', or a blend of them in YAML (default: blend).
    The default blend is public code, mathematics, chats, tool calls and prose. Rows may have
    pictures. A data set is ID, if need be with :config@split@revision#column. Repeat it for several
    sources, each with =WEIGHT if they should not count alike."""
    samples: int = Field(256, ge=1)
    """Calibration sequences."""
    sequence_length: int = Field(DEFAULT_LENGTH, ge=2)
    """Tokens in each sequence."""
    emphasis: Annotated[EmphasisOptions | None, BeforeValidator(pairs)] = None
    """Weights in correct, routers and distill of the tokens that end an answer or its thinking,
    such as end=8,think_end=8."""
    strict: bool = Field(False, exclude=True)  # no effect on the output, so no record holds it
    """End at a row of text, or a source of a blend, that cannot be read, instead of leaving it out.
    """

    @field_validator("data", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        if isinstance(value, str | PathLike | GivenTexts):
            value = (value,)
        if isinstance(value, list | tuple) and not any(isinstance(item, Mapping) for item in value):
            return tuple(fspath(item) if isinstance(item, PathLike) else item for item in value)
        return (GivenTexts.of(value),) if isinstance(value, Iterable) else value


@dataclass(frozen=True, slots=True)
class Requirements:
    """The text, memory and disk space that a step needs."""

    text: bool = False  # calibration text
    heldout: int = 0  # sequences of it that are held out, at the least
    part: TextPart | None = None
    passes: int = 0  # of a text through the model, where one is read
    hidden_copies: int = 1  # copies of the text's hidden states in memory
    sample_bytes: int = 0  # of memory for each sampled token of an MoE layer
    sample_tokens: int | None = 0  # None: all that are read
    parameter_bytes: int = 0  # bytes of memory for each parameter of a model that it holds whole
    notes: tuple[str, ...] = ()  # sentences on what is decided before any weight is read
    # `describe` repeats the notes, so that a run need not begin with them
    notes_are_described: bool = False

    @property
    def reads(self) -> bool:
        """True if it reads any text."""
        return self.text or self.part is not None


@dataclass(frozen=True, slots=True)
class OutputSize:
    """Size of a checkpoint that a step stores in a way of its own, and bytes that wait in the work
    folder meanwhile."""

    size: "Size"
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a step on the whole model: figures as JSON, and stored tensors with new values, by
    name."""

    figures: Mapping[str, Any]
    tensors: "Iterator[Tensors]" = field(default_factory=lambda: iter(()))


SUB_EXPERTS = "sub-experts"
EXPERTS = "experts"
CONSTANTS = "constants"
WEIGHTS = "weights"
ROUTERS = "routers"
FORMAT = "format"


class StepOptions(NamedOptions):
    """Options of a step as fields, and facts about it. Those with an `order` change decoder layers
    one at a time.

    `changes` names what a step changes: SUB_EXPERTS (experts become several), EXPERTS (which and
    how many there are), CONSTANTS (experts become constants), WEIGHTS (of experts, which are
    written anew in a plain dtype), ROUTERS, or FORMAT (how tensors are stored)."""

    name: ClassVar[str]
    # the `Step`, as "package.module:Class"; imported when a run begins
    implementation: ClassVar[str]
    # order within a stage of layerwise steps; None: works on the whole model
    order: ClassVar[int | None] = None
    # earlier steps' names, or what they change, with the reason
    cannot_follow: ClassVar[Mapping[str, str]] = {}
    # what an earlier step of its stage has to change, and one that does
    only_after: ClassVar[Mapping[str, str]] = {}
    processes: ClassVar[bool] = True  # True if several processes can share it
    # True if the finished output is compared with what the step has kept
    verified_by_kept: ClassVar[bool] = False

    calibration: TextOptions | None = None
    """Text of the step's own, in place of the recipe's."""

    def __init__(self, *values: Any, **named: Any) -> None:
        """Take options by name, or in the order of the fields (`Correct("tune")`)."""
        names = [name for name in type(self).model_fields if name != "calibration"]
        given = {**dict(zip(names, values, strict=False)), **named}
        super().__init__(**given)

    @property
    def changes(self) -> frozenset[str]:
        """Return what the step changes with these options."""
        return frozenset()

    @property
    def packages(self) -> tuple[str, ...]:
        """Optional packages that it imports; a command refuses to start without them."""
        return ()

    def check_installed(self) -> None:
        """Refuse a package or plugin that is not installed, without loading any."""
        require(*self.packages)

    def step(self) -> "Step[Any]":
        """Return the step with these options."""
        step: Step[Any] = resolve_name(self.implementation)(self)
        return step

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON, without those that are None."""
        return self.model_dump(mode="json", exclude_none=True)

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as JSON."""
        return self.model_dump(mode="json", exclude_defaults=True)


StepOptionsT = TypeVar("StepOptionsT", bound=StepOptions)


@dataclass(frozen=True)
class Step(Generic[StepOptionsT]):
    """The behaviour of a step with its options; methods that a step doesn't need are left out."""

    options: StepOptionsT

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def suggested_correction(self) -> str | None:
        """Method of `correct` that suits what this step does to experts; None if it does nothing to
        them."""
        return None

    def with_options(self, **changes: Any) -> Self:
        """Return the step with some options changed."""
        return replace(self, options=self.options.model_copy(update=changes))

    def resolve(self, model: "OpenModel", stage: "Sequence[StepOptions]") -> Self | None:
        """Return the step with every option resolved for the source `model`; None if nothing is to
        be done."""
        return self

    def model_view(self, model: "OpenModel") -> "OpenModel":
        """Return the model as it is seen from this step on, with no weight read: experts split,
        another top-k."""
        return model

    def requirements(
        self, model: "OpenModel", steps: "Sequence[StepOptions]", planned: bool
    ) -> Requirements:
        """Return its needs; raise `CompressionError` for what cannot be done, before a weight is
        read.

        `steps` are those of its stage, or of a step on the whole model those before it; `planned`:
        its decisions are there already."""
        return Requirements()

    def experts_left(self, layers: Sequence[MoeLayer], parts: int) -> int | None:
        """Return how many experts each layer keeps, where each of the source's is `parts` of them;
        None: all."""
        return None

    def output_size(
        self, model: "OpenModel", experts: int, changed: bool = False
    ) -> OutputSize | None:
        """Return the size of the output with this number of experts in each layer; None if it is
        stored as before.

        `changed`: other steps write experts anew, in a plain dtype.
        """
        return None

    def decide(self, state: "State") -> "Decision | None":
        """Return its decision, on experts or as JSON; nothing is written."""
        return None

    def apply_decision(self, decision: Any, state: "State") -> None:
        """Apply the decision, which may be an earlier run's, to `state.model`."""

    def refit(self, state: "State") -> "ExpertPlan | None":
        """Refit layers in order once all steps of the stage have decided; return the plan of
        experts with figures."""
        return None

    def writer(self, state: "State") -> "OutputJob | None":
        """Return how the stage's tensors are made, where that is not by copying, picking and mixing
        experts."""
        return None

    def apply_model(self, state: "State") -> Result | None:
        """Change the checkpoint that earlier steps have made, `state.model`."""
        return None

    def teacher_batches(self, batches: "Sequence[Tensor]") -> "Sequence[Tensor]":
        """Return those of the batches [B, L] of its own text on which it needs the base's
        next-token distributions."""
        return ()

    @property
    def needs_teacher_hidden(self) -> bool:
        """Return True if it needs the base's last hidden states on them, too."""
        return False

    def describe(self, entry: Mapping[str, Any]) -> "Sequence[Block]":
        """Describe its result for terminal, report and card; `entry` is the plan's: options, plan,
        result."""
        return ()
