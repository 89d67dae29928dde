"""The model `moe-c3po` of lm-eval: multiple choice on optimised pathways.

    python -m compressor.pathways.lm_eval_model --model moe-c3po \
        --model_args pretrained=FOLDER,reference=reference,optimizer=ngd --tasks boolq

lm-eval finds models by no entry point, so this registers the model and goes on as lm-eval's own command line.
Importing this module imports lm-eval.
"""

import sys
from dataclasses import fields
from typing import Any

from lm_eval.api.registry import register_model

from compressor.errors import CompressionError
from compressor.pathways.answering import open_answering
from compressor.pathways.options import PathwayOptions
from compressor.pathways.routed_model import RoutedModel
from compressor.records import read_as

IGNORED = ("batch_size", "max_batch_size")  # which lm-eval passes to every model


@register_model("moe-c3po")
class PathwayLM(RoutedModel):
    """The model by its arguments: those of `open_answering` and `PathwayOptions`."""

    def __init__(self, pretrained: str, reference: str, **more: Any) -> None:
        names = {entry.name for entry in fields(PathwayOptions)}
        options = read_as(PathwayOptions, {name: more.pop(name) for name in list(more) if name in names}, "model_args")
        settings = {name: value for name, value in more.items() if name not in IGNORED and value is not None}
        unknown = sorted(settings.keys() - {"embedding", "device", "dtype", "revision"})
        if unknown:
            known = ", ".join(sorted(names))
            raise CompressionError(f"moe-c3po takes no {unknown[0]!r}; known are embedding, device, dtype, {known}")
        super().__init__(open_answering(pretrained, reference, options, **settings))


def main() -> None:
    """lm-eval's command line; faults that a user can mend are one sentence and exit status 2."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except CompressionError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
