"""Options of steps and of text: pydantic models that load no torch.

Fields are declared once; command line, YAML, plan, digest, the card's command and the reference
page are made of them. Third parties announce a step's options through the entry point
`moe_compressor.steps`; what the step does is a `compressor.steps.step.Step`.
"""

from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, InstanceOf, PlainSerializer, field_validator
from pydantic.json_schema import SkipJsonSchema

from compressor.data.sources import GivenTexts
from compressor.extras import require
from compressor.options import NamedOptions, Options, pairs

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


class StepOptions(NamedOptions):
    """Options of a step as fields, and facts about it."""

    name: ClassVar[str]
    # its `Step`, as "package.module:Class"; imported when a run begins
    implementation: ClassVar[str]
    # what its checkpoint is stored as, where that is not as before: a packed format, or constants
    format: ClassVar[str | None] = None
    in_place: ClassVar[bool] = False  # True if it changes tensors of the checkpoint before it
    processes: ClassVar[bool] = True  # True if several processes can share it

    calibration: TextOptions | None = None
    """Text of the step's own, in place of the recipe's."""

    def __init__(self, *values: Any, **named: Any) -> None:
        """Take options by name, or in the order of the fields (`Quantize("int4")`)."""
        names = [name for name in type(self).model_fields if name != "calibration"]
        given = {**dict(zip(names, values, strict=False)), **named}
        super().__init__(**given)

    @property
    def rewrites(self) -> bool:
        """Return True if experts get new weights, which are written in a plain dtype."""
        return False

    def fault_after(self, earlier: "StepOptions") -> str | None:
        """Return why it cannot stand after an `earlier` step, if so."""
        return None

    @property
    def packages(self) -> tuple[str, ...]:
        """Optional packages that it imports; a command refuses to start without them."""
        return ()

    def check_installed(self) -> None:
        """Refuse a package or plugin that is not installed, without loading any."""
        require(*self.packages)

    def step(self) -> Any:
        """Return the step with these options, a `compressor.steps.step.Step`."""
        return resolve_name(self.implementation)(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON, without those that are None."""
        return self.model_dump(mode="json", exclude_none=True)
