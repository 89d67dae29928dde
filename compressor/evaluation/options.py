"""Options of text generation. Importing this loads no torch."""

import math
from dataclasses import dataclass

from compressor.entry_points import option
from compressor.errors import CompressionError


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How a prompt is continued."""

    max_new_tokens: int = option(128, "Tokens to generate, at most.")
    temperature: float = option(0.0, "0 takes the most probable token; more samples.")
    top_p: float | None = option(None, "Sample from the fewest tokens that hold this probability.")
    top_k: int | None = option(None, "Sample from this many of the most probable tokens.")
    seed: int = option(0, "For sampling.")
    chat: bool = option(False, "Put the prompt into the chat template, as a user's message.")
    device: str = "auto"
    dtype: str = "auto"  # of a safetensors checkpoint; an ONNX graph has its own
    revision: str | None = None

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        if self.max_new_tokens < 1:
            raise CompressionError(f"--max-new-tokens {self.max_new_tokens} generates nothing; give at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise CompressionError(
                f"--temperature {self.temperature} is no temperature; give 0 for greedy tokens, or more to sample"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise CompressionError(f"--top-p {self.top_p} is no probability; give a number above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise CompressionError(f"--top-k {self.top_k} leaves no token; give at least 1")
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise CompressionError("--top-p and --top-k have no effect without sampling; add --temperature 1")
        if not 0 <= self.seed < 2**63:
            raise CompressionError(f"--seed {self.seed} is out of range; give a whole number from 0 to below 2**63")
