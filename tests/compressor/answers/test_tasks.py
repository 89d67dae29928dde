from pathlib import Path

import pytest

from compressor.answers.tasks import EvaluationOptions, resolve_tasks
from compressor.errors import CompressionError
from compressor.options import validated
from compressor.quality_gate.options import GateOptions

pytestmark = pytest.mark.usefixtures("asked")


@pytest.mark.full
def test_an_unknown_task_is_refused_with_its_neighbours() -> None:
    with pytest.raises(CompressionError, match=r"^there is no task 'boolqq'.* did you mean [^\n]*\bboolq\b[^\n]*\?$"):
        resolve_tasks(EvaluationOptions(tasks=("moe_demo_facts", "boolqq")))


def test_a_task_that_counts_twice_is_refused() -> None:
    with pytest.raises(CompressionError, match="'moe_demo_facts' is asked for twice, by 'moe_demo' and by"):
        resolve_tasks(EvaluationOptions(tasks=("moe_demo", "moe_demo_facts")))


def test_a_task_without_its_data_is_refused(own: Path) -> None:
    (own / "sums.jsonl").unlink()
    with pytest.raises(CompressionError, match=r"^task 'sums' could not be loaded \([^\n]*sums.jsonl[^\n]*; check"):
        resolve_tasks(EvaluationOptions(tasks=("sums",), include_path=own))


def test_a_tag_stands_for_its_tasks(own: Path) -> None:
    for name in ("sums", "sums_worse"):
        path = own / f"{name}.yaml"
        path.write_text(path.read_text() + "tag: all_sums\n")
    found = resolve_tasks(EvaluationOptions(tasks=("all_sums",), include_path=own))
    assert [(task.name, task.grouped) for task in found] == [("sums", False), ("sums_worse", False)]


def test_a_version_depends_on_helpers_in_the_file_of_a_function(own: Path) -> None:
    path = own / "sums.yaml"
    path.write_text(path.read_text() + "process_docs: !function helpers.change\n")
    versions = []
    for number in (1, 1, 2):
        text = f"def helper():\n    return {number}\n\n\ndef change(docs):\n    return docs\n"
        (own / "helpers.py").write_text(text)
        versions.append(resolve_tasks(EvaluationOptions(tasks=("sums",), include_path=own))[0].version)
    assert versions[0] == versions[1] != versions[2]


def test_batch_sizes_as_text() -> None:
    assert [EvaluationOptions(batch_size=text).batch_size for text in ("auto", "16")] == ["auto", 16]
    with pytest.raises(CompressionError, match=r"batch_size is 1\.5; it should be auto, or a number"):
        validated(EvaluationOptions, {"batch_size": "1.5"}, "the options")
    with pytest.raises(CompressionError, match="a gate judges tasks, answers or text"):
        validated(GateOptions, {"tasks": " "}, "the options")
