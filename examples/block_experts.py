"""Find the experts that steer the routers most, and see who takes over when a router can't choose them.

python examples/block_experts.py MODEL TEXT
"""

import sys

from compressor import TextOptions, attribute

model, text = sys.argv[1:]
reading = TextOptions(data=text, samples=8, sequence_length=128)
before = attribute(model, calibration=reading)
experts = sorted(before.of_kind("expert"), key=lambda sender: -sender.total_influence)
strongest = f"L{experts[0].layer}E{experts[0].number}"
after = attribute(model, calibration=reading, without=[strongest])
influence = {sender.name: sender.total_influence for sender in after.of_kind("expert")}
print(f"without {strongest}:")
for sender in experts[:6]:
    label = f"L{sender.layer}E{sender.number}"
    print(
        f"{label}: influence {sender.total_influence:.3f}, now {influence.get(sender.name, 0.0):.3f}"
    )
