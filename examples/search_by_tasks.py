"""Choose experts by task score, one layer at a time (Zhang et al. 2024, arXiv:2407.09590, A.1).

    python examples/search_by_tasks.py MODEL --experts 6 --tasks boolq,rte --limit 100 -o kept.json
    moe-compress compress MODEL -o smaller --experts 6 --strategy aimer --protect kept.json --correct ridge

In the order of the layers, each set of experts that may stay in a layer answers the items of the tasks, with the layers
before pruned as chosen (or, with --alone as in the paper, whole) and those behind it as they are, and the set with the
best mean score stays. Where a layer has
more sets than --most, as many are drawn. Each set takes a streamed pass over all items: a model with 32 layers of 8
experts takes 32 x 28 of them to keep 6. Scores are kept beside the output, so the same command goes on after an
interruption. The items decide, so evaluate the result on others. Tasks that write their answers are not possible.
"""

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from compressor.answers.journal import Journal
from compressor.answers.lm_eval_run import item_scores
from compressor.answers.options import TaskOptions
from compressor.answers.streamed import StreamedModel
from compressor.answers.tasks import EvaluationOptions, EvaluationTask, quiet_lm_eval, resolve_tasks
from compressor.errors import CompressionError
from compressor.files import write_whole
from compressor.model.moe_layer import MoeLayer, layers_by_decoder_layer
from compressor.model.opened import OpenModel, refuse_shared_experts
from compressor.model.streaming import LayerVisitor
from compressor.model.substitution import SideBySide, Substitution
from compressor.pipeline.resolve import open_run
from compressor.progress import Silent
from compressor.recipe.plan import LayerPlan
from compressor.run_record import request_key
from compressor.steps.cutting import cut_layers
from compressor.steps.prune.selection import blocks_of
from strategies.enumerate_subsets import count_subsets, subsets

ROWS = 8  # of a batch
SCORE = TypeAdapter(
    tuple[str, tuple[int, ...], float]
)  # a decoder layer, the experts that stay, the mean score

Kept = tuple[int, ...]


def candidates(layer: MoeLayer, experts: int, most: int, seed: int) -> Iterator[Kept]:
    """Yield the sets of experts that can stay in a layer: all of them, or as many as are wanted, drawn at random."""
    blocks = blocks_of(layer, experts, frozenset())
    if count_subsets(blocks) <= most:
        yield from subsets(blocks)
        return
    draw = random.Random(f"{seed} {layer.name}")
    drawn = set[Kept]()
    while len(drawn) < most:
        kept = list[int]()
        for block in blocks:
            kept += draw.sample(block.free, block.take)
        drawn.add(tuple(sorted(kept)))
    yield from sorted(drawn)


def pruned(model: OpenModel, plans: Mapping[str, LayerPlan], experts: int) -> Substitution:
    """Return the model with the layers that have a plan cut, and the others as they are."""
    layers = layers_by_decoder_layer(model.architecture.layers)

    def tensors(decoder_layer: str) -> Mapping[str, Tensor] | None:
        planned = [layer for layer in layers.get(decoder_layer, ()) if layer.name in plans]
        return cut_layers(model.partial.model, planned, plans) if planned else None

    return Substitution(tensors, experts)


class VariantModel(StreamedModel):
    """A streamed model, of which the `variant` that is set answers."""

    variant = Substitution()

    def variants(self, batches: Sequence[Any]) -> Sequence[LayerVisitor]:
        assert self.model is not None
        return [SideBySide(self.model, [self.variant] * len(batches))]


def mean_score(
    answering: Any, tasks: Sequence[EvaluationTask], options: EvaluationOptions
) -> float:
    """Return the mean score of all items that a streamed model answers."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    with quiet_lm_eval():
        evaluated: Any = lm_eval.simple_evaluate(
            model=answering,
            tasks=[task.loaded for task in tasks],
            task_manager=TaskManager(include_defaults=False),
            limit=options.limit,
            bootstrap_iters=0,
            log_samples=True,
        )
    scores = list[float]()
    for task in tasks:
        scores += item_scores(task, evaluated["samples"]).values
    return fmean(scores)


def search(
    model: OpenModel,
    options: EvaluationOptions,
    experts: int,
    most: int,
    seed: int,
    alone: bool,
    out: Path,
) -> list[dict[str, Any]]:
    """Return the experts that stay, as `--protect` takes them."""
    refuse_shared_experts(model)
    for layer in model.architecture.layers:
        if not layer.top_k <= experts < layer.experts:
            raise CompressionError(
                f"{layer.name} has {layer.experts} experts and a top-k of {layer.top_k}"
            )
    tasks = resolve_tasks(options)
    if any("generate_until" in task.kinds for task in tasks):
        raise CompressionError(
            "tasks that write their answers are not possible; name tasks of multiple choice"
        )
    facts = [
        model.fingerprint,
        [task.version for task in tasks],
        options.facts(),
        experts,
        most,
        seed,
    ]
    facts += ["alone"] if alone else []  # earlier journals stay valid
    journal = Journal(out.with_name(f"{out.name}.{request_key(facts)[:8]}.jsonl"), SCORE)
    known = {(decoder_layer, kept): score for decoder_layer, kept, score in journal.read()}
    from compressor.answers.lm_eval_adapter import LmEvalModel

    rows = options.batch_size if isinstance(options.batch_size, int) else ROWS
    streamed = VariantModel(model.source, rows=rows, model=model)
    answering = LmEvalModel(streamed, options)
    answering.watch("all tasks", Silent())
    plans = dict[str, LayerPlan]()
    entries = list[dict[str, Any]]()
    for decoder_layer, layers in layers_by_decoder_layer(model.architecture.layers).items():
        scores = dict[Kept, float]()
        for kept in candidates(layers[0], experts, most, seed):
            if (decoder_layer, kept) not in known:
                tried = {layer.name: LayerPlan.keep(layer, kept) for layer in layers}
                streamed.variant = pruned(model, tried if alone else {**plans, **tried}, experts)
                known[decoder_layer, kept] = mean_score(answering, tasks, options)
                journal.add((decoder_layer, kept, known[decoder_layer, kept]))
            scores[kept] = known[decoder_layer, kept]
        best = max(scores, key=lambda kept: scores[kept])
        print(
            f"{decoder_layer}: {', '.join(map(str, best))} of {len(scores)} sets, mean score {scores[best]:.4f}"
        )
        for layer in layers:
            plans[layer.name] = LayerPlan.keep(layer, best)
            entries += [
                {"layer": layer.index, "module": layer.name, "expert": expert} for expert in best
            ]
    return entries


def main() -> None:
    """Search with the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--experts", type=int, required=True, help="experts to keep in every layer")
    parser.add_argument("--tasks", required=True, help="lm-eval tasks, comma-separated")
    parser.add_argument("--limit", type=int, help="items of each task, the first ones")
    parser.add_argument(
        "--include-path", type=Path, help="a folder with lm-eval task files of your own"
    )
    parser.add_argument("--batch-size", default="auto")
    parser.add_argument(
        "--most", type=int, default=100, help="sets to try in a layer; more are drawn from (100)"
    )
    parser.add_argument(
        "--alone", action="store_true", help="score each layer with all others whole"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file for --protect")
    given = parser.parse_args()
    try:
        names = ("tasks", "limit", "include_path", "batch_size")
        task_options = TaskOptions(**{name: getattr(given, name) for name in names})
        options = EvaluationOptions.of(task_options, given.device, given.dtype)
        with open_run(given.model, dtype=given.dtype, device=given.device) as run:
            entries = search(
                run.model, options, given.experts, given.most, given.seed, given.alone, given.output
            )
    except CompressionError as error:
        raise SystemExit(f"Error: {error}") from error
    write_whole(given.output, json.dumps(entries))


if __name__ == "__main__":
    main()
