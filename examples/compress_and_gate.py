"""Compress a model, and keep the result only if it passes a gate: exit status 0, else 1.

python examples/compress_and_gate.py MODEL TEXT OUT TASK[,TASK ...]
"""

import shutil
import sys

from compressor import GateOptions, Prune, compress, gate

model, text, out, tasks = sys.argv[1:]
steps = [Prune(strategy="reap", ratio=0.25, correct="ridge")]
outcome = compress(model, out, steps, calibration=text, sequence_length=128)
print(f"{outcome.experts_before} experts became {outcome.experts_after}")
result = gate(model, out, GateOptions(tasks=tuple(tasks.split(",")), max_drop=0.05))
print(result.verdict)
if result.verdict != "pass":
    shutil.rmtree(out)
    sys.exit(1)
