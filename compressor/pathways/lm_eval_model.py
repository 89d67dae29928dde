"""C3PO as lm-eval's model `moe-c3po`: multiple choice on optimised pathways.

    python -m compressor.pathways.lm_eval_model --model moe-c3po \
        --model_args pretrained=FOLDER,reference=reference,optimizer=ngd --tasks boolq

lm-eval finds models by no entry point, so this registers the model and goes on as lm-eval's own
command line. Importing this module imports lm-eval. """

import logging
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from compressor.errors import CompressionError
from compressor.pathways.answering import ORACLE, open_answering
from compressor.pathways.options import OWN, PathwayOptions
from compressor.records import read_as

logger = logging.getLogger(__name__)

ONLY = (
    "moe-c3po answers multiple choice alone, items of another kind have no prompt to optimise; "
    "ask the plain model"
)


@register_model("moe-c3po")
class PathwayLM(LM):
    """Answers requests of one prompt together; a prompt of its own for each choice is a pathway for
    each choice."""

    def __init__(
        self,
        pretrained: str,
        reference: str,
        embedding: str = OWN,
        trust_remote_code: bool = False,  # of the embedding model
        device: str = "auto",
        dtype: str = "auto",
        revision: str | None = None,
        batch_size: Any = None,  # lm-eval passes both to every model
        max_batch_size: Any = None,
        **pathway_options: Any,
    ) -> None:
        super().__init__()
        options = read_as(PathwayOptions, pathway_options, "model_args", closed=True)
        if options.optimizer == "oracle":
            raise CompressionError(f"lm-eval does not say which answer is right; {ORACLE}")
        self.answering = open_answering(
            pretrained,
            reference,
            options,
            embedding=embedding,
            trust_remote_code=trust_remote_code,
            device=device,
            dtype=dtype,
            revision=revision,
        )

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log likelihood in nats of each continuation, and True if it is greedy."""
        results = list[tuple[float, bool]]()
        for prompt, pairs in groupby(
            (request.args for request in requests), key=lambda pair: pair[0]
        ):
            continuations = [continuation for _, continuation in pairs]
            answers = self.answering.answer(prompt, continuations)
            for continuation, answer in zip(continuations, answers, strict=True):
                self.cache_hook.add_partial("loglikelihood", (prompt, continuation), answer)
            results += answers
        logger.warning("moe-c3po has cost %.2f plain forwards of these items", self.answering.cost)
        return results

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        raise CompressionError(ONLY)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        raise CompressionError(ONLY)


def main() -> None:
    """Run lm-eval's command line; faults that a user can mend are one sentence and exit status
    2."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except CompressionError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
