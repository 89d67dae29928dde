#!/usr/bin/env bash
# C3PO (arXiv:2504.07964), its open question: the average optimised pathway, put into the routers for good.
#
# As it stands it prunes the demo model, on a CPU, in a minute. Of OLMoE, on a GPU of 48 GB, by estimate 2 hours:
#   MODEL=allenai/OLMoE-1B-7B-0924 TEXT=allenai/c4:en recipes/c3po/routers.sh
# The bias goes in at the best of its scales, even where held-out text says that none is a gain; record and card say so.
# SAMPLES is the number of calibration sequences; for NGD in place of each item's own answer: OPTIMIZER=ngd.
source "$(dirname "${BASH_SOURCE[0]}")/run.sh" "$@"
moe-compress compress "$MODEL" -o "$OUT/model" --ratio 0.25 --correct none --calibration "${TEXT:-demo}" \
    --samples "${SAMPLES:-64}" --routers bias --set routers.sequences="${SAMPLES:-64}" --set routers.rounds=1 \
    --set routers.accept=always --set routers.optimizer="${OPTIMIZER:-own}"
