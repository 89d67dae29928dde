#!/usr/bin/env bash
# "Understanding Cross-Layer Contributions to MoE Routing in LLMs" (ICLR 2026): hubs that steer together, or not at all.
#
# The paper removes OLMoE's M1E9 or M4E14, and the other's influence drops from layer 5 on. Needs: the demo model, offline,
# a CPU and two minutes; PAPER=yes EXPERTS="L1E9 L4E14" for OLMoE and C4 from the Hub.
# EXPERTS: two experts (default: the strongest two of different layers, hubs first). OUT/without-*: each is blocked alone,
# and both together; experts.png there draws the strongest others, with all experts and without the blocked ones.
source "$(dirname "$0")/settings.sh"
if [ -z "${EXPERTS:-}" ]; then
    attribute "$OUT/all"
    EXPERTS=$(python - "$OUT/all/attribution.json" <<'PYTHON'
import json
import sys

content = json.load(open(sys.argv[1], encoding="utf-8"))
experts = [(hub["layer"], hub["expert"]) for hub in content["hubs"]]
for sender in sorted(content["senders"], key=lambda sender: -sender["total_influence"]):
    if sender["kind"] == "expert":
        experts.append((sender["layer"], sender["number"]))
strongest = {}
for layer, expert in experts:
    strongest.setdefault(layer, f"L{layer}E{expert}")
print(*[*strongest.values()][:2])
PYTHON
    )
fi
read -r first second <<<"$EXPERTS"
for blocked in "$first" "$second" "$first,$second"; do
    attribute "$OUT/without-${blocked/,/-}" --without "$blocked"
done
