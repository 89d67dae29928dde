#!/usr/bin/env bash
# C3PO (arXiv:2504.07964), figure 5: core experts, accuracy and coverage by their number.
#
# As it stands it asks the demo model, on a CPU, in a minute. As in the paper, on a GPU of 48 GB, by estimate 10 hours a row of NGD:
#   MODEL=allenai/OLMoE-1B-7B-0924 ASK="--embedding nvidia/NV-Embed-v2 --trust-remote-code" recipes/c3po/figure5.sh
# A model of your own is the argument: recipes/c3po/figure5.sh MODEL. See run.sh for all settings.
# The row of most experts, which may move all, says how many of the top-k then come from the n largest before.
source "$(dirname "${BASH_SOURCE[0]}")/run.sh" "$@"
tabulate --set experts="${EXPERTS:-8,12,16,20,32,64}" --set layers="$NEARBY"
