"""Options that `compare` and `compress` share for a limit of bytes."""

from typing import Annotated

from compressor.cli.options import SIZES, flag

Bytes = Annotated[
    str | None,
    flag(
        "Prune or quantise, as is best, to so many bytes: 16GB, 500MB, 2.5GiB or a number.",
        SIZES,
        "--bytes",
    ),
]
For = Annotated[
    str | None,
    flag(
        "Only formats that these load: vllm, sglang, llama.cpp, transformers, comma-separated.",
        SIZES,
        "--for",
    ),
]
