# Settings of this folder's recipes, which source it: environment variables, else those of the demo model or the paper.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
name=$(basename "$0" .sh)
if [ -n "${PAPER:-}" ]; then
    MODEL=${1:-${MODEL:-$paper_model}}
    EXPERTS=${EXPERTS:-$paper_experts}
    TEXT=${TEXT:-allenai/c4}
    LENGTH=${LENGTH:-2048}
    TASKS=${TASKS:-mmlu,boolq,openbookqa,rte}
    LIMIT=${LIMIT-}
fi
MODEL=${1:-${MODEL:-$root/compressor/demo/checkpoint}}  # a folder or an id of the Hub
EXPERTS=${EXPERTS:-12,8}                                # numbers that stay in each layer; the demo model has 16
TEXT=${TEXT:-demo}                                      # calibration text
SAMPLES=${SAMPLES:-128}                                 # sequences of it
LENGTH=${LENGTH:-128}                                   # tokens in each
TASKS=${TASKS:-moe_demo}                                # of lm-eval
LIMIT=${LIMIT-20}                                       # items of each task; LIMIT= for all
OUT=${OUT:-$name}                                       # a new folder

read=(--calibration "$TEXT" --samples "$SAMPLES" --sequence-length "$LENGTH")

# The strategies, as --strategies of `compare` names them.
count=count-guided
router=router-guided
enumerate=enumerate
vectorized=model-centric:representation=vectorized
surrogate=model-centric:representation=surrogate
uniform=data-centric:similarity=mean-output
learn=data-centric:similarity=mean-output:merge=learned
max=data-centric:similarity=mean-output:merge=max

# compare STRATEGIES [OPTION ...]: a table of the strategies by number of experts and task, and a plot
compare() {
    local strategies=$1
    shift
    moe-compress compare "$MODEL" --strategies "$strategies" --experts "$EXPERTS" --correct none --random-seeds 1 \
        --evaluation-samples 16 "${read[@]}" --tasks "$TASKS" ${LIMIT:+--limit "$LIMIT"} -o "$OUT" "$@"
}
