"""Train a compressed model toward its base, and write its report and the card with which it would be published.

python examples/distill_and_publish.py COMPRESSED BASE TEXT OUT NAMESPACE/NAME
"""

import sys
from pathlib import Path

from compressor import distill, push, write_report

compressed, base, text, out, repository = sys.argv[1:]
outcome = distill(compressed, out, base, calibration=text, steps=20, sequence_length=128)
assert outcome.heldout is not None
print(outcome.heldout.overall.loss)
write_report(out, Path(out).with_suffix(".html"), run_models=False)
pushed = push(out, repository, private=True, dry_run=True, card=Path(out).with_suffix(".md"))
print(f"{len(pushed.uploaded)} files would go to {pushed.url}")
