# What all recipes of C3PO share: `tabulate OPTIONS` makes the reference set, unless it is there, and prints the table.
#
# The first argument is the model. Environment:
#   MODEL            checkpoint folder or Hub id (default: the demo model)
#   REFERENCE_TASKS  lm-eval tasks of multiple choice, of which the reference set is made
#   TASKS            those on which settings are compared; other ones, so that no answer is known
#   LIMIT            items of each task (default: 10 of the demo's, 200 of others)
#   NEARBY           layers that "5 layers" stands for (default: 5; 1 of the demo's four)
#   ASK              further options of both commands, such as "--device cuda --embedding ID --include-path FOLDER"
#   OUT              folder for the reference sets (default: c3po)
#   JSON             a value prints JSON, with coverage for every number of experts
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
demo=$(cd "$here/../../compressor/demo/checkpoint" && pwd)
MODEL=${1:-${MODEL:-$demo}}
OUT=${OUT:-c3po}
mkdir -p "$OUT"
if [ "$MODEL" = "$demo" ]; then
    REFERENCE_TASKS=${REFERENCE_TASKS:-moe_demo_facts,moe_demo_sorting}
    OTHER_TASKS=${OTHER_TASKS:-moe_demo_arithmetic}
    TASKS=${TASKS:-moe_demo_recall,moe_demo_reversal}
    LIMIT=${LIMIT:-10}
    NEARBY=${NEARBY:-1}
else
    REFERENCE_TASKS=${REFERENCE_TASKS:-commonsense_qa,openbookqa,social_iqa}
    OTHER_TASKS=${OTHER_TASKS:-logiqa,mathqa}
    TASKS=${TASKS:-arc_challenge,arc_easy,hellaswag,mmlu,piqa,winogrande}
    LIMIT=${LIMIT:-200}
    NEARBY=${NEARBY:-5}
fi

collect() {  # FOLDER TASKS
    [ -d "$1" ] || moe-compress reference "$MODEL" -o "$1" --tasks "$2" --limit "$LIMIT" ${ASK:-} >&2
}

tabulate() {  # OPTIONS of run.py
    collect "$OUT/reference" "$REFERENCE_TASKS"
    "${PYTHON:-python}" "$here/run.py" "$MODEL" --reference "$OUT/reference" --tasks "$TASKS" --limit "$LIMIT" \
        ${ASK:-} ${JSON:+--json} "$@"
}
