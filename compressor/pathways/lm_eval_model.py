"""What lm-eval asks instead of a model: multiple choice on optimised pathways, also by the name `moe-c3po`.

    python -m compressor.pathways.lm_eval_model --model moe-c3po \
        --model_args pretrained=FOLDER,reference=reference,optimizer=ngd --tasks boolq

lm-eval finds models by no entry point, so this registers the model and goes on as lm-eval's own command line.
Importing this module imports lm-eval.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from compressor.errors import CompressionError
from compressor.evaluation.evaluate import Spent
from compressor.evaluation.model import AnswerWatch
from compressor.pathways.answering import Answering, open_answering
from compressor.pathways.options import PathwayOptions
from compressor.records import read_as

logger = logging.getLogger(__name__)

IGNORED = ("batch_size", "max_batch_size")  # which lm-eval passes to every model
ONLY = "moe-c3po answers multiple choice alone, items of another kind have no prompt to optimise; ask the plain model"


class RoutedModel(LM):
    """Answers requests of one prompt together; a prompt of its own for each choice is a pathway for each choice."""

    def __init__(self, answering: Answering) -> None:
        super().__init__()
        self.answering = answering
        self.watcher: AnswerWatch | None = None
        self._before = self._counted()

    def watch(self, watch: AnswerWatch) -> None:
        """Who sees the next answers; what they take is counted from here."""
        self.watcher, self._before = watch, self._counted()
        self.set_cache_hook(watch)

    @property
    def spent(self) -> Spent:
        return Spent(*(now - before for now, before in zip(self._counted(), self._before, strict=True)))

    def _counted(self) -> tuple[int, int, int]:
        return self.answering.model.work, self.answering.plain_work, self.answering.left_plain

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log likelihood in nats, whether it is greedy) of each continuation."""
        if self.watcher is not None:
            self.watcher.start(len(requests))
        found = list[tuple[float, bool]]()
        for prompt, asked in groupby((request.args for request in requests), key=lambda pair: pair[0]):
            pairs = list(asked)
            answers = self.answering.answer(prompt, [continuation for _, continuation in pairs])
            for pair, answer in zip(pairs, answers, strict=True):
                found.append(answer)
                self.cache_hook.add_partial("loglikelihood", pair, answer)
        if self.watcher is None:
            logger.warning("moe-c3po has cost %.2f plain forwards of these items", self.answering.cost)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        raise CompressionError(ONLY)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        raise CompressionError(ONLY)


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
