"""A model that is streamed, a layer in memory at a time: it scores all requests in one pass.

Equal inputs run once, and there are logits only where they count. B rows of a batch, S tokens, N
scored positions, H hidden size, V words of the vocabulary."""

from collections import ChainMap, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compressor.answers.answering import Likelihood, Scoring
from compressor.answers.asking import padded
from compressor.answers.stock import StockModel, free
from compressor.distributed import ranks
from compressor.divergence.logits import LogitReader
from compressor.errors import CompressionError
from compressor.memory import available
from compressor.model.opened import OpenModel, open_model
from compressor.model.streaming import DEFAULT_ACTIVATION_BUDGET, LayerVisitor, Pass
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Progress

# rows of a batch where nobody says how many; all of the device but a layer is free for them
CPU_ROWS, GPU_ROWS = 8, 32
LOGIT_BYTES = 2**29  # of a batch's logits in float32, unless one row alone has more
TOGETHER = 256  # positions whose probabilities are held at once
# a part this large of free memory holds hidden states; what is beyond goes to disk
WAITING_SHARE = 4


@dataclass
class StreamedModel(StockModel):
    """A checkpoint of a causal language model; several ranks share the work."""

    model: OpenModel | None = field(default=None, repr=False)  # while it is open

    @property
    def max_length(self) -> int:
        from lm_eval.models.utils import resolve_max_length

        assert self.model is not None
        tokenizer = load_tokenizer(self.source.folder)
        return int(resolve_max_length(self.model.config, tokenizer))

    @contextmanager
    def loaded(self) -> Iterator[None]:
        self.model = open_model(self.source, self.dtype, self.device)
        partial = self.model.partial
        try:
            yield
        finally:
            self.model = None
            partial.release("")
            free(partial.device)

    def variants(self, batches: Sequence[Any]) -> Sequence[LayerVisitor]:
        """Return what has a variant of the model answer the batches; nothing for the model as it
        is."""
        return ()

    def score(
        self, requests: Sequence[Scoring], task: str, progress: Progress, rolling: bool = False
    ) -> Iterator[tuple[int, Likelihood]]:
        """Yield the answers once all batches have passed one layer after the other.

        Each rank gets all answers. Progress is told in layers."""
        assert self.model is not None
        model = self.model
        longest = self.max_length
        # By tokens that the model runs once, what follows them with the number of its request. The
        # answers A and B to one question differ in their last token alone, so they share an input,
        # cut on the left like lm-eval's.
        asked = defaultdict[tuple[int, ...], list[tuple[int, Sequence[int]]]](list)
        # positions, the last ones of an input, whose logits are needed
        scored = dict[tuple[int, ...], int]()
        for number, (before, after) in enumerate(requests):
            if not before or not after:
                raise CompressionError(
                    "an item has a prompt or an answer without a token; give both some text"
                )
            if len(after) > longest:
                raise CompressionError(
                    f"an answer has {len(after):,} tokens, the model takes {longest:,}; shorten it"
                )
            row = (*before, *after)[-longest - 1 : -1]
            asked[row].append((number, after))
            scored[row] = max(scored.get(row, 0), len(after))
        rows = self.rows or (CPU_ROWS if model.partial.device.type == "cpu" else GPU_ROWS)
        batches = list[list[tuple[int, ...]]]()
        left = 0  # positions whose logits the batch has room for
        for row in sorted(asked, key=lambda row: (-len(row), row)):
            if not batches or len(batches[-1]) == rows or scored[row] > left:
                batches.append([])
                left = LOGIT_BYTES // (4 * model.vocabulary)
            batches[-1].append(row)
            left -= scored[row]
        budget = DEFAULT_ACTIVATION_BUDGET
        if (free_memory := available()) is not None:
            budget = min(budget, free_memory // WAITING_SHARE)
        input_ids = list[Tensor]()
        chosen = list[Tensor]()
        for batch in batches:
            # padded on the right: what follows a token does not reach it, so no mask is needed
            tokens, mask = padded(batch, 0)
            for row, of_row in zip(batch, mask, strict=True):
                of_row[: len(row) - scored[row]] = 0
            input_ids.append(tokens)
            chosen.append(mask.bool())
        answers = dict[int, Likelihood]()

        def read(number: int, logits: Tensor) -> None:
            batch = batches[number]
            sizes = [scored[row] for row in batch]
            for row, of_row in zip(batch, logits.split(sizes), strict=True):
                for request, after in asked[row]:
                    answers[request] = _likelihood(of_row, after)

        reader = LogitReader(chosen, read)
        with reader.attached(model.partial.model), torch.no_grad():
            streamed = Pass(
                model,
                input_ids,
                progress,
                f"Evaluating {self.label} on {task}, layer by layer",
                to_end=True,
                shared=True,
                activation_budget=budget,
            )
            streamed.run(*self.variants(batches), reader)
        answers = dict(ChainMap(*ranks().all_gather(answers)))
        for number in range(len(requests)):
            yield number, answers[number]


def _likelihood(logits: Tensor, after: Sequence[int]) -> Likelihood:
    """Return the likelihood of tokens that the last logits [N, V] predict."""
    targets = torch.tensor(after, device=logits.device)[:, None]
    scored = logits[-len(after) :]
    value = 0.0
    for part, expected in zip(scored.split(TOGETHER), targets.split(TOGETHER), strict=True):
        logs = part.log_softmax(-1, dtype=torch.float32)
        value += float(logs.gather(1, expected).sum())
    return value, torch.equal(scored.argmax(-1, keepdim=True), targets)
