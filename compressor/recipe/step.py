"""What a step of a compression is: its options as fields, and what it decides and does as methods.

A step is a pydantic model. Its fields are declared once; command line, YAML, plan, digest, the card's command and the
reference page are made of them. Third parties announce theirs through the entry point `moe_compressor.steps`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    ValidationInfo,
    field_validator,
)
from pydantic.json_schema import SkipJsonSchema

from compressor.data.sources import GivenTexts
from compressor.model.moe_layer import MoeLayer

if TYPE_CHECKING:  # a step's options are read without torch
    from torch import Tensor

    from compressor.document.blocks import Block
    from compressor.model.opened import OpenModel
    from compressor.steps.state import State
    from compressor.steps.tensors import OutputJob

Tensors = Mapping[str, "Tensor"]
Source = str | SkipJsonSchema[Annotated[InstanceOf[GivenTexts], PlainSerializer(str, return_type=str)]]
DEFAULT_LENGTH = 512
MOST_SOURCES = 100  # as many as a plan may have


class Options(BaseModel):
    """Frozen options, unknown ones refused; a switch is no number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = {*(get_args(annotation) or (annotation,))}
        if isinstance(value, bool) and {int, float} & kinds and bool not in kinds:
            raise ValueError(f"{info.field_name} is {value}, it should be a number")
        return value


class EmphasisOptions(Options):
    """Weights of tokens where something is fitted to text; all others count 1."""

    end: float | None = Field(None, gt=0, le=1000, description="Weight of the tokens that end an answer.")
    think_end: float | None = Field(None, gt=0, le=1000, description="Weight of the token that ends the thinking.")


class TextOptions(Options):
    """Which text is read, and how much of it."""

    data: tuple[Source, ...] | None = Field(
        None,
        max_length=MOST_SOURCES,
        description="Text, JSONL or parquet file, data set or 'demo' (default: C4). Rows may have pictures. A data set "
        "is ID, if need be with :config@split#column. Repeat it for several sources, each with =WEIGHT if they should "
        "not count alike.",
    )
    samples: int = Field(256, ge=1, description="Calibration sequences.")
    sequence_length: int = Field(DEFAULT_LENGTH, ge=2, description="Tokens in each sequence.")
    emphasis: EmphasisOptions | None = Field(
        None,
        description="Weights in correct, routers and distill of the tokens that end an answer or its thinking, such as "
        "end=8,think_end=8.",
    )
    strict: bool = Field(  # which changes no output, so that no record holds it
        False, exclude=True, description="End at a row of text that cannot be read, instead of leaving it out."
    )

    @field_validator("emphasis", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        return dict(part.strip().partition("=")[::2] for part in value.split(",")) if isinstance(value, str) else value

    @field_validator("data", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        if isinstance(value, str | PathLike | GivenTexts):
            value = (value,)
        if isinstance(value, list | tuple) and not any(isinstance(each, Mapping) for each in value):
            return tuple(fspath(each) if isinstance(each, PathLike) else each for each in value)
        return (GivenTexts.of(value),) if isinstance(value, Iterable) else value


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of a step's own to train on."""

    sequences: int
    length: int
    rows: int = 8  # sequences of a batch, at most
    minimum: int = 1  # sequences without which the step cannot run


@dataclass(frozen=True, slots=True)
class Needs:
    """What a step reads: calibration text, of which some may be held out, and text of its own with a held-out part."""

    text: bool = False
    heldout: int = 0  # sequences of it that are held out, at the least
    part: TextPart | None = None
    experts: int | None = None  # that each layer keeps, where the step decides that
    passes: int = 0  # of a text through the model, where one is read
    whole: int = 0  # bytes of memory for each parameter of a model that it holds whole
    notes: tuple[str, ...] = ()  # sentences on what is decided before any weight is read


@dataclass(frozen=True, slots=True)
class LayerAt:
    """A decoder layer as earlier steps have left it: its MoE layers, and all its tensors by state-dict key."""

    name: str
    moe_layers: Sequence[MoeLayer]
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a step on the whole model: figures as JSON, and stored tensors with new values, by name."""

    figures: Mapping[str, Any]
    tensors: "Iterator[Tensors]" = field(default_factory=lambda: iter(()))


class Step(Options):
    """A step. Those with an `order` change decoder layers one at a time and follow each other in one stage."""

    name: ClassVar[str]
    order: ClassVar[int | None] = None  # order within a stage of layerwise steps; None: works on the whole model
    not_after: ClassVar[Mapping[str, str]] = {}  # earlier steps that it cannot follow, with the reason
    only_after: ClassVar[tuple[str, ...]] = ()  # of which one must come before, in the same stage
    processes: ClassVar[bool] = True  # whether several processes can share it
    verified_by_kept: ClassVar[bool] = False  # whether the finished output is compared with what the step has kept

    calibration: TextOptions | None = Field(None, description="Text of the step's own, in place of the recipe's.")

    def __init__(self, *values: Any, **named: Any) -> None:
        """Take options by name, or in the order of the fields (`Correct("tune")`)."""
        names = [name for name in type(self).model_fields if name != "calibration"]
        super().__init__(**dict(zip(names, values, strict=False)), **named)

    @property
    def packages(self) -> tuple[str, ...]:
        """Optional packages that it imports; a command refuses to start without them."""
        return ()

    def resolved(self, model: "OpenModel", steps: "Sequence[Step]") -> Self | None:
        """The step with every option resolved for the source `model`; None if nothing is to be done."""
        return self

    def view(self, model: "OpenModel") -> "OpenModel":
        """The model as it is seen from this step on, with no weight read: experts split, another top-k."""
        return model

    def needs(self, model: "OpenModel", steps: "Sequence[Step]", planned: bool) -> Needs:
        """Return what it reads; raise `CompressionError` for what cannot be done, before any weight is read.

        `steps` are those of its stage; `planned`: its decisions are there already.
        """
        return Needs()

    def plan(self, state: "State") -> Mapping[str, Any]:
        """Return its decisions as JSON; nothing is written."""
        return {}

    def take(self, decided: Mapping[str, Any], state: "State") -> None:
        """Apply the decisions, which may be an earlier run's, to `state.model`."""

    def refit(self, state: "State") -> Mapping[int, Mapping[str, Any]]:
        """Refit layers in order once all steps of the stage have decided; return decisions with figures, by step."""
        return {}

    def job(self, state: "State") -> "OutputJob | None":
        """Return how the stage's tensors are made, where that is not by copying, picking and mixing experts."""
        return None

    def layer(self, at: LayerAt, state: "State") -> Tensors | None:
        """Return new values for some tensors of a decoder layer, by state-dict key, of the same shapes."""
        return None

    def asks_base(self, batches: "Sequence[Tensor]") -> "Sequence[Tensor]":
        """Return those of the batches [B, L] of its own text on which it needs the base's next-token distributions."""
        return ()

    @property
    def asks_hidden(self) -> bool:
        """Whether it needs the base's last hidden states on them, too."""
        return False

    def whole(self, state: "State") -> Result | None:
        """Change the checkpoint that earlier steps have made, `state.model`."""
        return None

    def describe(self, entry: Mapping[str, Any]) -> "Sequence[Block]":
        """Describe its result for terminal, report and card; `entry` is the plan's: options, plan, result."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Its options as JSON, without those that are None."""
        return self.model_dump(mode="json", exclude_none=True)

    def changed(self) -> dict[str, Any]:
        """Options that differ from their defaults, as JSON."""
        return self.model_dump(mode="json", exclude_defaults=True)
