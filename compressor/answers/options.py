"""Options of text generation, and of servers. Importing this loads no torch."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, PositiveInt

from compressor.entry_points import option
from compressor.errors import CompressionError
from compressor.records import check_fields


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How a prompt is continued."""

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
        """Some of the options by name."""
        return {name: getattr(self, name) for name in names}


SECONDS = 300.0  # to wait for an answer
MOST_SECONDS = 1e6


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Which of two models are answered for by a server, and by which."""

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
