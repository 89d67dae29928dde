"""Measure what judging without generating costs over plain streamed passes of the same tokens; a ratio within one run.

    python -m scripts.benchmarks.judge [MODEL SMALLER] [--prompt 256] [--answer 256] [--rows 16] [--rounds 3]
        [--folder DIR] [--gigabytes 1] [--device cpu]

Judging reads the base's answers with base and smaller model, as `evaluate --answers` does: KL, flips and the
probabilities of ends over the answers' tokens. A plain pass is one of each model over the same batches through all
layers and the head, without comparing anything. Random tokens do as well as others here. Without models, a synthetic
one is made, which stands for both. Prints CPU seconds of both, at their least, and their ratio, for answers and, the
same way, for text of which every token counts.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from compressor.checkpoint.source import locate
from compressor.data.batches import BATCH_SIZE, EvaluationSet
from compressor.model.opened import OpenModel, open_model
from compressor.model.streaming import Pass
from compressor.quality_gate.teacher_forced import END, TeacherForcedAnswer, answer_sets, measure_divergence
from scripts.benchmarks.frame import Sizes, head, options, row, warm


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of a call, of all threads."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def compare(what: str, base: OpenModel, smaller: OpenModel, sets: list[EvaluationSet], rounds: int,
            judging: Callable[[], object]) -> None:  # fmt: skip
    """Print a row: tokens, CPU seconds of plain passes and of judging, each at its least, and their ratio."""
    batches = [batch for entry in sets for batch in entry.batches]

    def plain() -> None:
        for model in (base, smaller):
            Pass(model, batches, to_end=True).run()

    least = [min(times) for times in zip(*((seconds(plain), seconds(judging)) for _ in range(rounds)), strict=True)]
    row(what, sum(batch.numel() for batch in batches), f"{least[0]:.2f}", f"{least[1]:.2f}", least[1] / least[0])


def main() -> None:
    """Print the rows."""
    parser = options(__doc__, prompt=256, answer=256, rows=16, rounds=3, gigabytes=1.0, device="cpu")
    parser.add_argument("models", nargs="*", help="base and smaller model")
    parser.add_argument("--folder", type=Path, help="where the synthetic checkpoint is made, or lies already (kept)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch) / "model"
        if not given.models:
            Sizes().write(folder, given.gigabytes)
        names = given.models or [str(folder)] * 2
        for name in names:
            warm(Path(name))
        base, smaller = (open_model(locate(name), device=given.device) for name in names)
        length = given.prompt + given.answer
        ids = torch.randint(5, base.vocabulary, (given.rows, length), generator=torch.Generator().manual_seed(0))
        answers = [
            TeacherForcedAnswer(str(n), "all", (*x[: given.prompt],), (*x[given.prompt :],))
            for n, x in enumerate(ids.tolist())
        ]
        texts = [EvaluationSet("all", ids.split(BATCH_SIZE))]
        head("of", "tokens", "two plain passes, CPU s", "judging, CPU s", "ratio")
        forced, _ = answer_sets(answers, base.vocabulary)
        compare(
            "answers",
            base,
            smaller,
            [*forced],
            given.rounds,
            lambda: measure_divergence(base, smaller, (), answers, {END: [1]}),
        )
        compare("text", base, smaller, texts, given.rounds, lambda: measure_divergence(base, smaller, texts))


if __name__ == "__main__":
    main()
