"""A whole recipe: steps, gate, the search for a size, and formats."""

from collections.abc import Callable
from dataclasses import replace

from compressor.checkpoint.source import find_model
from compressor.distributed import held, ranks
from compressor.evaluation.gate import Outlook
from compressor.evaluation.gate_report import NAMES, write_gate
from compressor.evaluation.gate_verdict import EXIT_STATUS
from compressor.files import check_folder
from compressor.pipeline.gate import prepare_gate, request_of
from compressor.pipeline.outcome import GateFailedError, Outcome
from compressor.pipeline.run import Delivery, run
from compressor.pipeline.search import Search, find_candidates, shared_among, try_recipe
from compressor.progress import Silent
from compressor.recipe.recipe import Recipe


def carry_out(recipe: Recipe, delivery: Delivery, announce: Callable[[Outlook], None] | None = None) -> Outcome:
    """Carry out a recipe; with a gate, leave the output in place only if it passes.

    With `gate.search` the number of experts is bisected for the smallest model that passes; what was tried is kept, so
    that a search that was killed tries nothing twice. The reports of the gate lie in OUT.gate. `announce` gets what the
    gate can show, before any work. Raises `GateFailedError` for a gate that was not passed.
    """
    options = recipe.gate
    if options is None:
        return run(recipe, delivery)
    request, candidates = request_of(recipe, delivery.device), None
    reports = delivery.out.with_name(f"{delivery.out.name}.gate")
    ranks().broadcast(lambda: check_folder(reports, NAMES, overwrite=True))
    source = find_model(str(recipe.model), recipe.revision, delivery.progress or Silent())
    recipe = recipe.model_copy(update={"revision": source.revision})
    if options.search:
        candidates = find_candidates(recipe, source, delivery.device)
        request = shared_among(request, candidates.counts)
    gate = prepare_gate(source, request, options.keep_failed)
    with held(delivery.out):
        if announce is not None:
            announce(gate.outlook)
        if candidates is None:
            attempt, outcome = try_recipe(recipe, delivery, gate)
            attempts = [attempt]
        else:
            attempts, outcome = Search(recipe, delivery, gate, candidates).run()
    decisive = attempts[-1]
    if outcome is not None:
        decisive = next((attempt for attempt in reversed(attempts) if attempt.accepted), decisive)
    written = write_gate(decisive.result, reports, overwrite=True) if ranks().is_first else []
    if outcome is None or not decisive.accepted:
        status = EXIT_STATUS[request.counted(decisive.result.verdict)]
        raise GateFailedError(delivery.out, attempts, status, outcome, written)
    return replace(outcome, attempts=tuple(attempts), reports=tuple(written))
