#!/usr/bin/env bash
# C3PO (arXiv:2504.07964), table 9: which tokens are optimised, by task and method.
#
# As it stands it asks the demo model, on a CPU, in a minute. As in the paper, on a GPU of 48 GB, by estimate 10 hours a row of NGD:
#   MODEL=allenai/OLMoE-1B-7B-0924 ASK="--embedding nvidia/NV-Embed-v2 --trust-remote-code" recipes/c3po/table9.sh
# A model of your own is the argument: recipes/c3po/table9.sh MODEL. See run.sh for all settings.
# All moved tokens get the same shift of their logits. scored: the prompt's last token and those of the answer.
source "$(dirname "${BASH_SOURCE[0]}")/run.sh" "$@"
tabulate --set optimizer=kernel,ngd --set tokens=first:1,middle:1,last:1,last:3,all,scored --set layers="$NEARBY"
