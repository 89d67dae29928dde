#!/usr/bin/env bash
# C3PO (arXiv:2504.07964), reference sets of two kinds of tasks, REFERENCE_TASKS and OTHER_TASKS, on the same TASKS.
#
# As it stands it asks the demo model, on a CPU, in a minute. As in the paper, on a GPU of 48 GB, by estimate 10 hours a row of NGD:
#   MODEL=allenai/OLMoE-1B-7B-0924 ASK="--embedding nvidia/NV-Embed-v2 --trust-remote-code" recipes/c3po/transfer.sh
# A model of your own is the argument: recipes/c3po/transfer.sh MODEL. See run.sh for all settings.
source "$(dirname "${BASH_SOURCE[0]}")/run.sh" "$@"
collect "$OUT/other" "$OTHER_TASKS"
tabulate --reference "$OUT/other" --set optimizer=kernel,ngd --set layers="$NEARBY"
