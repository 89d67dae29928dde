#!/usr/bin/env bash
# lm-eval's standard error of a group leaves out how far its tasks are apart: 100% and 0% give 50%
# with an error of 0.
#
# Versions: lm-eval 0.4.13, torch 2.13.0.
# Guess:    the error beside a group's accuracy is that of the mean of all its items, as the
#           accuracy is their mean.
# Seen:     a model that is right on all 50 items of one task and wrong on all 50 of another gets
#           0.5 with an error of 0; the mean of the 100 items has 0.0503. Errors within tasks are
#           pooled, differences between them are dropped.
# Where:    a comment beside the formula says that it seems to match the error of all items
#           together.
# Hurts:    whoever judges MMLU's or another uneven group's difference by the printed error: it's
#           too small for that of new items, and too large for that of two models on the same ones,
#           which pairs items.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet torch==2.13.0 lm-eval==0.4.13
export HF_HOME=$folder/cache HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1

venv/bin/python - <<'END' 2> log || { cat log; exit 1; }
import json
import math
import os
import sys
from pathlib import Path
import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [first, second]
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GROUP = """
group: both
task: [easy, hard]
aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]
"""


class AlwaysFirst(LM):
    """Finds the first choice likelier, whatever is asked."""

    def loglikelihood(self, requests):
        return [(-1.0 if "first" in request.args[1] else -2.0, False) for request in requests]

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    def generate_until(self, requests):
        raise NotImplementedError


Path("tasks").mkdir()
for name, answer in (("easy", 0), ("hard", 1)):
    rows = Path(f"{name}.jsonl").resolve()
    rows.write_text("".join(json.dumps({"question": f"{n}?", "answer": answer}) + "\n" for n in range(50)))
    Path(f"tasks/{name}.yaml").write_text(TASK.format(name=name, rows=rows))
Path("tasks/both.yaml").write_text(GROUP)
manager = TaskManager(include_path=os.path.abspath("tasks"))
results = lm_eval.simple_evaluate(AlwaysFirst(), tasks=["both"], task_manager=manager, bootstrap_iters=100)["results"]
accuracies = [results[name]["acc,none"] for name in ("easy", "hard", "both")]
error = results["both"]["acc_stderr,none"]
items = math.sqrt(0.25 / 99)  # the standard error of the mean of fifty ones and fifty zeros
print(f"accuracy of the tasks {accuracies[0]} and {accuracies[1]}, of the group {accuracies[2]} with a standard error of "
      f"{error}; of the 100 items {items:.4f}")
sys.exit(0 if accuracies == [1.0, 0.0, 0.5] and error == 0 else "changed")
END
