"""How text is generated, checked before anything is loaded."""

import math
from dataclasses import dataclass

from compressor.errors import CompressionError
from compressor.model.opened import DTYPES

MAX_NEW_TOKENS = 128
MAX_SEED = 2**63


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What is asked of a model beside the prompt."""

    max_new_tokens: int = MAX_NEW_TOKENS
    temperature: float = 0.0  # 0 is greedy: always the likeliest token
    top_p: float | None = None  # sampling only: the fewest tokens that hold this probability
    top_k: int | None = None  # sampling only: this many of the likeliest tokens
    seed: int = 0
    chat: bool = False  # the prompt is a user's message, in the tokenizer's chat template
    device: str = "auto"
    dtype: str = "auto"  # of a safetensors checkpoint; an ONNX graph has its own
    revision: str | None = None

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        if self.max_new_tokens < 1:
            raise CompressionError(f"--max-new-tokens {self.max_new_tokens} generates nothing; give at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise CompressionError(
                f"--temperature {self.temperature} is no temperature; give 0 for the likeliest token, or more to sample"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise CompressionError(f"--top-p {self.top_p} is no probability; give a number above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise CompressionError(f"--top-k {self.top_k} leaves no token; give at least 1")
        if self.temperature == 0 and (self.top_p is not None or self.top_k is not None):
            raise CompressionError("--top-p and --top-k have no effect without sampling; add --temperature 1")
        if not 0 <= self.seed < MAX_SEED:
            raise CompressionError(f"--seed {self.seed} is out of range; give a whole number from 0 to below 2**63")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise CompressionError(f"there is no dtype {self.dtype!r}; known are auto, {', '.join(DTYPES)}")
