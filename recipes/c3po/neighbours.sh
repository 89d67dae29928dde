#!/usr/bin/env bash
# C3PO (arXiv:2504.07964), the number of neighbours (the paper's best is 3), or all within a radius.
#
# As it stands it asks the demo model, on a CPU, in a minute. As in the paper, on a GPU of 48 GB, by estimate 10 hours a row of NGD:
#   MODEL=allenai/OLMoE-1B-7B-0924 ASK="--embedding nvidia/NV-Embed-v2 --trust-remote-code" recipes/c3po/neighbours.sh
# A model of your own is the argument: recipes/c3po/neighbours.sh MODEL. See run.sh for all settings.
source "$(dirname "${BASH_SOURCE[0]}")/run.sh" "$@"
tabulate --set neighbours=1,3,5,10 --set layers="$NEARBY"
tabulate --set radius="${RADIUS:-0.5}" --set layers="$NEARBY"
