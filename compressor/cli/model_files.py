"""Models that are no checkpoints but files of another format: packages that work on them are found
by entry points."""

from pathlib import Path
from typing import Annotated, Any

import typer

from compressor.cli.options import flag
from compressor.entry_points import MODEL_FILES, load, working
from compressor.errors import CompressionError

Imatrix = Annotated[
    Path | None,
    flag("Of a GGUF model: an importance matrix of llama-imatrix, by which experts are chosen."),
]


def package_of(context: typer.Context, model: str | None, imatrix: Path | None = None) -> Any:
    """Return the package that carries out this command on a model's file, its options checked; None
    for a checkpoint.

    It has the functions `recognises`, `check_options`, `inspect`, `plan`, `compress` and `apply`.
    """
    for package in working(MODEL_FILES, lambda name: load(MODEL_FILES, name)):
        if model is not None and package.recognises(model):
            given = set()  # which stand on the command line
            for name in context.params:
                source = context.get_parameter_source(name)
                if source is not None and source.name == "COMMANDLINE":
                    given.add(name)
            package.check_options(
                {option.name: option.opts[0] for option in context.command.params}, given
            )
            return package
    if imatrix is not None:
        raise CompressionError(
            "--imatrix goes with a GGUF file; name one as the model, or leave it out"
        )
    return None
