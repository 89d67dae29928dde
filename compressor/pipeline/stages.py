"""Steps in their order: which are done together, and what cannot follow what."""

from collections.abc import Sequence

from compressor.distributed.ranks import launched
from compressor.errors import CompressionError
from compressor.recipe.step import Step

LAST = 3  # rank of layerwise steps that only change tensors: any number of them may end a stage


def stage_numbers(steps: Sequence[Step], first: int = 0) -> list[int]:
    """The number of each step's stage, from `first` on.

    Layerwise steps of ascending rank are done together; a step on the whole model is a stage of its own.
    """
    found, stage, before = list[int](), first - 1, -1
    for step in steps:
        rank = step.order
        if rank is None or before < 0 or rank < before or (rank == before and rank < LAST):
            stage += 1
        found.append(stage)
        before = -1 if rank is None else rank
    return found


def of_stage(steps: Sequence[Step], stage: int) -> list[Step]:
    """The steps that are done together in a stage, of those of a run."""
    return [step for step, number in zip(steps, stage_numbers(steps), strict=True) if number == stage]


def check_order(steps: Sequence[Step]) -> None:
    """Refuse an order that cannot work, and what several processes cannot do."""
    numbers = stage_numbers(steps)
    for number, step in enumerate(steps):
        for before in steps[:number]:
            if before.name in step.not_after:
                reason = step.not_after[before.name]
                raise CompressionError(
                    f"steps[{number}]: {step.name} cannot stand after {before.name}: {reason}; put it before, or leave "
                    "one of them out"
                )
        together = {other.name for other in of_stage(steps, numbers[number])}
        if step.only_after and not together & set(step.only_after):
            raise CompressionError(
                f"steps[{number}]: {step.name} works on what {' or '.join(step.only_after)} leaves; put "
                f"{step.only_after[0]} right before it"
            )
        if not step.processes and not launched().is_alone:
            raise CompressionError(f"the step {step.name} is done by one process; start the command without torchrun")
