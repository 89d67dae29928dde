"""Options of answers, tasks and servers. Importing this loads no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, PositiveInt, field_validator

from compressor.entry_points import option
from compressor.errors import CompressionError
from compressor.options import Options, one_or_several, separated
from compressor.records import check_fields

NEW_TOKENS = 512  # default limit of an answer, where half of the model's positions are no fewer


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Limits and sampling of generated text."""

    max_new_tokens: PositiveInt = option(128, "Tokens to generate, at most.")
    temperature: Annotated[FiniteFloat, Field(ge=0)] = option(
        0.0, "Sampling temperature. 0 takes the most probable token."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = option(
        None, "Sample from the smallest set of tokens with this total probability."
    )
    top_k: PositiveInt | None = option(None, "Sample from this many of the most probable tokens.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = option(0, "Random seed for sampling.")
    chat: bool = option(False, "Put the prompt into the chat template, as a user's message.")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise CompressionError("--top-p and --top-k have no effect without sampling; add --temperature 1")

    def facts(self, *names: str) -> dict[str, Any]:
        """Return some of the options by name."""
        return {name: getattr(self, name) for name in names}


class AnswerOptions(Options):
    """Prompts, and how models answer them."""

    prompts: tuple[str, ...] = ()
    """Prompts that both models answer: a text, JSONL or parquet file, a data set or 'demo', as SOURCE or SOURCE=DOMAIN.
    May be repeated. Of a chat all but the last answer."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Tokens of an answer, at most (default: 512, or half of the model's positions)."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature. 0 takes the most probable token."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the smallest set of tokens with this total probability."""
    seeds: int = Field(1, ge=1)
    """Answers to each prompt, each drawn with another seed."""
    chat: bool = False
    """Put prompts of plain text into the chat template, as a user's message."""
    strict: bool = Field(False, exclude=True)  # as that of `TextOptions`
    """End at a row that cannot be read, instead of leaving it out."""

    _one_prompt = field_validator("prompts", mode="before")(one_or_several)

    def check(self) -> None:
        """Raise `CompressionError` for options that do not go together."""
        self.generation(NEW_TOKENS)
        if self.seeds > 1 and not self.temperature:
            raise CompressionError("--seeds has no effect without sampling; add --temperature 1")

    def generation(self, usual: int) -> GenerationOptions:
        """Return how each answer is generated, with `usual` tokens at most unless the options give another number."""
        limit = self.max_new_tokens or usual
        return GenerationOptions(limit, self.temperature, self.top_p, chat=self.chat)


class TaskOptions(Options):
    """Tasks of lm-eval, and how models answer them."""

    tasks: tuple[str, ...] = ()
    """lm-eval tasks to pass, comma-separated."""
    limit: int | None = Field(None, ge=1)
    """Items of each task, the first ones (default: all)."""
    include_path: Path | None = None
    """A folder with lm-eval task files of your own."""
    batch_size: int | Literal["auto"] = "auto"
    """Batch size of the evaluation: auto or a number."""
    stream: bool | None = None
    """Evaluate with one layer in memory at a time, or with the whole model (default: streamed where the model does not
    fit into memory)."""

    _split_tasks = field_validator("tasks", mode="before")(separated)

    @field_validator("batch_size", mode="before")
    @classmethod
    def _read_batch_size(cls, value: Any) -> int | str:
        text = str(value).strip()
        if text == "auto":
            return text
        if text.isdecimal() and int(text) > 0:
            return int(text)
        raise ValueError(f"batch_size is {value}; it should be auto, or a number of at least 1")


SECONDS = 300.0  # to wait for an answer
MOST_SECONDS = 1e6


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Addresses of the servers that run the models."""

    server: str | None = option(None, "Address of an OpenAI-compatible server that runs the smaller model.")
    served_model: str | None = option(None, "Its name there (default: the only one that the server has).")
    base_server: str | None = option(None, "Address of a server that runs the base.")
    base_served_model: str | None = option(None, "The base's name there.")
    timeout: Annotated[FiniteFloat, Field(gt=0, le=MOST_SECONDS)] = option(
        SECONDS, "Seconds to wait for each answer of a server."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for name, needed in (("served_model", "server"), ("base_served_model", "base_server")):
            if getattr(self, name) is not None and getattr(self, needed) is None:
                first, second = (f"--{each.replace('_', '-')}" for each in (name, needed))
                raise CompressionError(f"{first} goes with {second}; name the server's address")
