#!/usr/bin/env bash
# "Understanding Cross-Layer Contributions to MoE Routing in LLMs" (ICLR 2026): AARV of one expert and of its neighbours.
#
# The paper zeroes the scores of OLMoE's M1E9, and of the other experts of its layer, and ranks the experts of M5, M10 and
# M15 again. Needs: the demo model, offline, a CPU and a minute; EXPERT=L1E9 PAPER=yes for OLMoE and C4 from the Hub.
# Prints the AARV on every later router: of EXPERT (default: the strongest of the model), and over its layer's others.
source "$(dirname "$0")/settings.sh"
attribute "$OUT"
python - "$OUT/attribution.json" "${EXPERT:-}" <<'PYTHON'
import json
import sys
from statistics import fmean

content = json.load(open(sys.argv[1], encoding="utf-8"))
experts = [sender for sender in content["senders"] if sender["kind"] == "expert"]
label = "L{layer}E{number}".format_map
strongest = max(experts, key=lambda sender: sender["total_rank_change"])
chosen = next((sender for sender in experts if label(sender) == sys.argv[2]), strongest)
others = [sender for sender in experts if sender["module"] == chosen["module"] and sender is not chosen]
print(f"router  {label(chosen)}  mean of the {len(others)} others  largest")
for number, receiver in enumerate(content["receivers"]):
    if chosen["rank_change"][number] is not None:
        beside = [sender["rank_change"][number] for sender in others]
        print(f"L{receiver['layer']}  {chosen['rank_change'][number]:.4f}  {fmean(beside):.4f}  {max(beside):.4f}")
PYTHON
