"""Tune LoRA experts (CoMoE) on questions with answers, without and with the contrastive loss, and ask held-out items.

python examples/lora_experts.py MODEL ITEMS.jsonl TASK[,TASK ...] STEPS
"""

import sys

from compressor import evaluate_comoe, train_comoe
from compressor.comoe.options import ComoeConfig, TuningOptions

model, items, tasks, steps = sys.argv[1:]
for contrastive in (0.0, 0.01):
    options = TuningOptions(
        config=ComoeConfig(rank=8, experts=4), steps=int(steps), contrastive=contrastive
    )
    folder = f"adapters-{contrastive}"
    trained = train_comoe(model, folder, calibration=items, options=options, overwrite=True)
    asked = evaluate_comoe(model, folder, tasks=tasks.split(","), limit=20)
    scores = ", ".join(f"{result.task} {result.accuracy:.0%}" for result in asked.tasks)
    print(f"contrastive {contrastive}: {trained.share:.1%} trained; {scores}")
