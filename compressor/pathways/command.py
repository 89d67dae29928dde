"""The command `reference`, which is announced by an entry point and loads torch only when it
runs."""

from typing import Annotated

import compressor
from compressor.cli.items import Items
from compressor.cli.options import Model, Out, Reading, flag, spread
from compressor.cli.terminal import alone, print_report, progress_bars, written_line


@spread
@alone
def reference(
    model: Model,
    output: Out,
    running: Reading,
    items: Items,
    embedding: Annotated[
        str,
        flag(
            "How prompts are compared: own (the model's embeddings), or a sentence-transformers id."
        ),
    ] = "own",
    trust_remote_code: Annotated[
        bool, flag("Run the code of the --embedding model's repository, which must be trusted.")
    ] = False,
) -> None:
    """Ask a model items and keep those that it answers right, each with the experts it is routed
    to."""
    items.check_packages()
    from compressor.pathways.reference import reference_blocks
    from compressor.records import plain_json

    with progress_bars(running.as_json) as progress:
        reference_set = compressor.reference(
            model,
            output,
            **items.arguments("calibration"),
            embedding=embedding,
            trust_remote_code=trust_remote_code,
            overwrite=running.overwrite,
            **running.reading(progress),
        )
    print_report(
        running.as_json,
        plain_json(reference_set),
        (
            *reference_blocks(reference_set.facts, reference_set.asked),
            *written_line(reference_set.files),
        ),
    )
