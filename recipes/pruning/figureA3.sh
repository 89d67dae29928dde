#!/usr/bin/env bash
# Zhang et al. 2024, arXiv:2407.09590, figure A3 and section 4.6: all pairs dropped from each layer alone, by task score.
#
# As it stands it prunes the demo model, offline, on a CPU, in minutes. As in the paper, with the Hub and a GPU of 80 GB
# (nobody has run it here at that size; allow a day): PAPER=yes recipes/pruning/figureA3.sh
# A model of your own is the argument, and settings.sh has the rest: EXPERTS=6,4 recipes/pruning/figureA3.sh MODEL
# The paper's task is TASKS=mmlu. OUT.json has the best set of each layer, OUT.json.*.jsonl the score of every set, of
# which at most MOST are tried in a layer, and OUT is the model of the best sets. Each set is a pass over all items.
paper_model=mistralai/Mixtral-8x7B-v0.1
paper_experts=6
source "$(dirname "$0")/settings.sh"
python "$root/examples/search_by_tasks.py" "$MODEL" --experts "${EXPERTS%%,*}" --tasks "$TASKS" \
    ${LIMIT:+--limit "$LIMIT"} --alone --most "${MOST:-28}" -o "$OUT.json"
moe-compress compress "$MODEL" -o "$OUT" --experts "${EXPERTS%%,*}" --strategy aimer --protect "$OUT.json" --correct none
