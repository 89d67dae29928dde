"""Answer questions with C3PO: make a reference set, then compare how its options answer other tasks' items.

python examples/pathways.py MODEL REFERENCE_TASKS TASK
"""

import sys

from compressor import reference
from compressor.answers.tasks import items_of
from compressor.pathways.answering import open_answering
from compressor.pathways.options import PathwayOptions

model, reference_tasks, task = sys.argv[1:]
reference(model, "reference", tasks=reference_tasks.split(","), limit=20, overwrite=True)
items = items_of([task], None, 10, None, False)
for optimizer in ("mode", "kernel", "oracle"):  # the oracle knows the answers: an upper bound
    answering = open_answering(model, "reference", PathwayOptions(optimizer, layers=1))
    grades = [answering.grade(item) for item in items]
    right = sum(is_right for is_right, _ in grades)
    nats = sum(likelihood for _, likelihood in grades) / len(grades)
    print(
        f"{optimizer}: {right} of {len(items)} right, {nats:.3f} nats, {answering.cost:.1f} passes"
    )
