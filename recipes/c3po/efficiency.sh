#!/usr/bin/env bash
# C3PO (arXiv:2504.07964), cost: plain forwards and seconds for an item, by method, layers and experts.
#
# As it stands it asks the demo model, on a CPU, in a minute. As in the paper, on a GPU of 48 GB, by estimate 10 hours a row of NGD:
#   MODEL=allenai/OLMoE-1B-7B-0924 ASK="--embedding nvidia/NV-Embed-v2 --trust-remote-code" recipes/c3po/efficiency.sh
# A model of your own is the argument: recipes/c3po/efficiency.sh MODEL. See run.sh for all settings.
# Forwards count decoder layers times tokens, thrice for a backward pass; 1000 experts are all.
source "$(dirname "${BASH_SOURCE[0]}")/run.sh" "$@"
tabulate --set optimizer=mode,kernel,ngd --set layers="$NEARBY,all" --set experts=20,1000
