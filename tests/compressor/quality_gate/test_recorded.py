import csv
import json
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta

import compressor
from compressor.answers.forms import TaskForm
from compressor.answers.scores import AnsweredItem, ItemScores
from compressor.answers.tasks import quiet_lm_eval
from compressor.errors import CompressionError
from compressor.quality_gate.baseline import Baseline
from compressor.quality_gate.options import GateOptions
from compressor.quality_gate.recorded import gate_results
from compressor.quality_gate.report import gate_page
from compressor.quality_gate.verdict import GateResult
from tests.support.command_line import Run, refused

SAMPLE = {"filter": "none", "metrics": ["acc"], "doc_hash": "d", "prompt_hash": "p"}
RUN = {"n-shot": {"boolq": 0}, "versions": {"boolq": 1}, "configs": {"boolq": {}}, "chat_template_sha": "a"}


def table(file: Path, scores: Mapping[tuple[str, str], float]) -> Path:
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["task", "item", "score"])
        writer.writerows((*key, score) for key, score in scores.items())
    return file


def judged(base: Path, compressed: Path, **options: Any) -> GateResult:
    return gate_results(base, compressed, GateOptions(tasks=("all",), **options))


def test_items_are_paired_as_by_brute_force(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generator = np.random.default_rng(1)
    keys = [(task, f"item {number}") for task in ("one", "two") for number in range(100)]
    first = {key: float(generator.integers(2)) for key in keys[2:]}
    second = {key: float(generator.integers(2)) for key in reversed(keys[:-3])}
    result = judged(table(tmp_path / "a.csv", first), table(tmp_path / "b.csv", second))
    for row in result.tasks:
        drops = [first[key] - second[key] for key in first if key in second and key[0] == row.task]
        assert (row.items, row.lost, row.gained) == (len(drops), drops.count(1), drops.count(-1))
    assert result.pooled is not None and result.pooled.items == 195
    assert "3 of 198 items of" in caplog.text and "2 of 197 items of" in caplog.text
    few = dict(list(first.items())[:90])
    with pytest.raises(Exception, match=r"107 of 197 items of .* and 0 of 90 items of .* more than 5%"):
        judged(tmp_path / "b.csv", table(tmp_path / "few.csv", {key: few[key] for key in few if key in second}))


def evalplus(file: Path, statuses: Mapping[str, list[tuple[str, str]]], old: bool = False) -> Path:
    problems: dict[str, Any] = {}
    for name, pairs in statuses.items():
        problems[name] = [{"base_status": base, "plus_status": plus} for base, plus in pairs]
        if old:
            problems[name] = {"base": [[base, []] for base, _ in pairs], "plus": [[plus, []] for _, plus in pairs]}
    file.write_text(json.dumps({"date": "", "hash": "h", "eval": problems}))
    return file


def test_evalplus_counts_a_problem_once_in_the_pool(tmp_path: Path) -> None:
    statuses = {f"HumanEval/{number}": [("pass", "pass" if number % 2 else "fail")] for number in range(40)}
    new = evalplus(tmp_path / "a_eval_results.json", statuses)
    result = judged(new, evalplus(tmp_path / "b_eval_results.json", statuses, old=True))
    assert [(row.task, row.items, row.base, row.drop) for row in result.rows] == [
        ("humaneval", 40, 1.0, 0.0), ("humaneval+", 40, 0.5, 0.0), ("all together", 40, 0.5, 0.0)
    ]  # fmt: skip
    several = {name: [*pairs, ("fail", "pass"), ("pass", "pass")] for name, pairs in statuses.items()}
    shares = judged(evalplus(tmp_path / "c.json", several), new).tasks
    assert [(row.base, row.decides) for row in shares] == [(pytest.approx(2 / 3), True), (pytest.approx(0.5), True)]


def inspect_log(file: Path, right: set[int], **more: Any) -> Path:
    samples: list[dict[str, Any]] = []
    for number in range(30):
        for epoch in (1, 2):
            message = {"id": f"{file.name}{number}", "role": "user", "content": f"question {number}"}
            scores = {"match": {"value": "C" if number in right else "I"}, "other": {"value": 0.25}}
            samples.append({"id": number, "epoch": epoch, "input": [message], "scores": scores})
    header = {"status": "success", "eval": {"task": "gsm8k", "task_version": 2, **more}}
    if file.suffix == ".json":
        file.write_text(json.dumps({**header, "samples": samples}))
        return file
    with zipfile.ZipFile(file, "w") as log:
        log.writestr("header.json", json.dumps(header))
        for sample in samples:
            log.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample))
    return file


def test_logs_of_inspect_are_read_packed_and_as_json(run: Run, tmp_path: Path) -> None:
    base = inspect_log(tmp_path / "a.eval", set(range(25)))
    smaller = inspect_log(tmp_path / "b.json", {*range(3, 25), 28})
    (row,) = judged(base, smaller).tasks
    assert (row.task, row.metric, row.items, row.lost, row.gained) == ("gsm8k", "match", 30, 3, 1)
    other = compressor.gate_results(str(base), smaller, metric="other")
    assert other.tasks[0].base == 0.25 and other.tasks[0].equivalent is False
    refused(
        run("gate", "results", base, inspect_log(tmp_path / "c.json", {1}, task_version=3)), "version of gsm8k is 2"
    )
    base.write_bytes(base.read_bytes()[:-40])
    refused(run("gate", "results", base, smaller), "a.eval cannot be read")


def samples(folder: Path, rows: list[dict[str, Any]], date: str = "2026-01-02T03-04-05.678", **run: Any) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"doc_id": number, **SAMPLE, **row}) for number, row in enumerate(rows)]
    (folder / f"samples_boolq_{date}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / f"results_{date}.json").write_text(json.dumps({**RUN, **run}))
    return folder


def test_samples_that_differ_in_anything_but_the_model_are_refused_by_name(run: Run, tmp_path: Path) -> None:
    rows = [{"acc": 1.0} for _ in range(20)]
    base = samples(tmp_path / "base", [{"acc": 0.0} for _ in range(20)], "2025-12-02T03-04-05.678")
    samples(base, rows)  # which is newer
    assert judged(base, samples(tmp_path / "same", rows)).tasks[0].drop == 0
    for message, other in {
        "are results of two benchmarks": samples(tmp_path / "a", [{"acc": 1.0, "doc_hash": "e"}] * 20),
        "asked by other prompts": samples(tmp_path / "b", [{"acc": 1.0, "prompt_hash": "q"}] * 20),
        "n-shot of boolq is 0 in .* and 5": samples(tmp_path / "c", rows, **{"n-shot": {"boolq": 5}}),
        "version of boolq is 1 in .* and 2": samples(tmp_path / "d", rows, versions={"boolq": 2}),
        "chat_template_sha of boolq is a in .* and b": samples(tmp_path / "e", rows, chat_template_sha="b"),
        "has 20 of 25 items": samples(tmp_path / "f", rows, **{"n-samples": {"boolq": {"effective": 25}}}),
        "no number for each item under": samples(tmp_path / "g", [{"acc": "yes"}] * 20),
        "is empty; evaluate": samples(tmp_path / "h", []),
    }.items():
        refused(run("gate", "results", base, other, "-o", tmp_path / "out"), message)
    (file,) = (tmp_path / "same").glob("*.jsonl")
    file.write_text(file.read_text()[:-9])
    refused(run("gate", "results", base, file), "jsonl, line 20 is no whole JSON")
    (tmp_path / "empty").mkdir()
    (tmp_path / "some.txt").write_text("item,score")
    (tmp_path / "cut.csv").write_text("item,score\na,1\nb")
    refused(run("gate", "results", tmp_path / "empty", base), "empty has no results")
    refused(run("gate", "results", tmp_path / "some.txt", base), "some.txt")
    refused(run("gate", "results", tmp_path / "cut.csv", base), "cut.csv, line 3: the score is 'None'")
    refused(run("gate", "results", base, base, "--limit", 3), "No such option: --limit; see .*gate results --help")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["gate.xml"]  # which has the error


@pytest.mark.parametrize("words", [("results",), ("--results",)])  # the second as it was written first
def test_recorded_results_need_no_torch(words: tuple[str, ...], tmp_path: Path) -> None:
    same = table(tmp_path / "a.csv", {("t", str(number)): 1.0 for number in range(400)})
    code = "import sys; from compressor.cli import main; sys.argv[1:] = ['gate', *sys.argv[1:]]\n"
    code += "try: main.main()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *words, same, same], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False" and "equivalent within 0.01" in done.stdout


def test_a_baseline_of_ten_thousand_items_is_small(tmp_path: Path) -> None:
    bytes_of = np.random.default_rng(3).bytes
    names = [f"mmlu_high_school_european_history/{number}" for number in range(10_000)]
    items = [AnsweredItem(name, float(bytes_of(1)[0] % 2), 1.0, bytes_of(4).hex(), bytes_of(4).hex()) for name in names]
    form = TaskForm(None, None, (0,), False, None, None, None, None, None, 1)
    scores = ItemScores("mmlu", "acc", "1", "score", tuple(items))
    baseline = Baseline("org/model", {"commit": "c"}, {}, {}, {}, (scores,), {"mmlu": form})
    for file in (tmp_path / "base.json", tmp_path / "base.json.gz"):
        baseline.write(file)
        assert Baseline.read(file) == baseline
    assert file.stat().st_size < 300_000
    broken = replace(scores, items=(replace(items[0], score=float("nan")), *items[1:]))
    with pytest.raises(CompressionError, match=r"score on mmlu, item .*/0, should be a number, it is nan"):
        replace(baseline, tasks=(broken,)).write(tmp_path / "broken.json")
    assert not (tmp_path / "broken.json").exists()


Cells = dict[str, float | None]  # scores of items; None for an item without an answer


def written_as(form: str, folder: Path, cells: Cells) -> Path:
    """Write right and wrong answers as a tool does; an item without an answer does not occur, or has no score."""
    folder.mkdir()
    answered = {name: score for name, score in cells.items() if score is not None}
    if form == "csv":
        rows = [f"{name},{'' if score is None else score}" for name, score in cells.items()]
        (folder / "a.csv").write_text("\n".join(["item,score", *rows]))
    if form == "evalplus":
        statuses = {f"HumanEval/{name}": [("pass" if score else "fail",) * 2] for name, score in answered.items()}
        evalplus(folder / "a_eval_results.json", statuses)
    if form == "lm-eval":
        lines = [json.dumps({"doc_id": int(name), **SAMPLE, "acc": score}) for name, score in answered.items()]
        (folder / "samples_boolq_2026.jsonl").write_text("\n".join(lines))
    if form == "inspect":
        scores = [{} if score is None else {"m": {"value": score}} for score in cells.values()]
        logged = [{"id": name, "scores": entry} for name, entry in zip(cells, scores, strict=True)]
        (folder / "a.json").write_text(json.dumps({"samples": logged}))
    return folder


@pytest.mark.parametrize("form", ["csv", "evalplus", "lm-eval", "inspect"])
def test_an_answer_that_one_model_lacks_is_the_worst_for_the_smaller_one(form: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(4)
    for trial in range(3):
        right = generator.random(400) < 0.9
        base: Cells = {str(number): float(value) for number, value in enumerate(right)}
        smaller = dict(base)
        for name in generator.choice(400, 16, replace=False).tolist():
            (smaller if trial else base)[str(name)] = None
        folder = tmp_path / str(trial)
        folder.mkdir()
        paths = [written_as(form, folder / name, cells) for name, cells in (("a", base), ("b", smaller))]
        result = judged(*paths)
        firsts = [1.0 if value is None else value for value in base.values()]
        seconds = [0.0 if value is None else value for value in smaller.values()]
        worst = sum(first - second for first, second in zip(firsts, seconds, strict=True)) / 400
        (condition,) = result.conditions
        assert condition.observed == pytest.approx(worst) and condition.items == 400
        assert result.pooled is not None and (result.pooled.verdict, result.pooled.drop) == ("pass", 0.0)
        assert (result.verdict, condition.verdict) == ("inconclusive", "inconclusive")
        # without a gain the upper bound of the losses is no lower than Clopper and Pearson's
        assert condition.upper >= beta.ppf(0.95, 400 * worst + 1, 400 - 400 * worst) - 1e-3 > 0.01
        lacking = [name for name, value in (smaller if trial else base).items() if value is None]
        page = gate_page(result)
        assert all(f"{name}" in page for name in lacking) and page.count("Inconclusive") == 1
        assert judged(*paths, max_drop=0.2).verdict == "pass"


@pytest.mark.parametrize("form", ["csv", "inspect"])
def test_items_that_neither_model_has_answered_are_named(form: str, tmp_path: Path) -> None:
    cells: Cells = {f"item {number}": None if number < 12 else 1.0 for number in range(400)}
    result = judged(*(written_as(form, tmp_path / name, cells) for name in ("a", "b")))
    assert result.pooled is not None and result.pooled.items == 388
    (note,) = [note for note in result.notes if "neither model has an answer" in note]
    assert "item 0" in note and "item 12," not in note


def test_a_missing_answer_of_several_and_scores_without_an_end(tmp_path: Path) -> None:
    lines = [f"t,{number},{score}" for number in range(50) for score in (0.25, 0.75)]
    first, second = tmp_path / "a.csv", tmp_path / "b.csv"
    first.write_text("\n".join(["task,item,score", *lines]))
    second.write_text("\n".join(["task,item,score", *lines[:-1]]))
    (condition,) = judged(first, second, max_drop=0.5).conditions
    assert condition.observed == pytest.approx((0.5 - (0.25 + 0) / 2) / 50 + 0) and condition.verdict == "pass"
    rows = [{"perplexity": -float(number), "metrics": ["perplexity"]} for number in range(1, 41)]
    result = judged(samples(tmp_path / "c", rows), samples(tmp_path / "d", rows[:-1]), max_drop=99.0)
    assert result.tasks[0].verdict == "pass" and result.verdict == "inconclusive"  # no perplexity is the worst
    assert result.conditions[0].upper == float("inf")


def test_a_sample_with_an_error_is_a_wrong_answer(tmp_path: Path) -> None:
    def logged(name: str, failed: int) -> Path:
        file = tmp_path / name
        entries: list[dict[str, Any]] = [{"id": number, "scores": {"m": {"value": "C"}}} for number in range(100)]
        for entry in entries[:failed]:
            entry |= {"error": {"message": "boom"}, "scores": {}}
        file.write_text(json.dumps({"status": "success", "eval": {"task": "t"}, "samples": entries}))
        return file

    (row,) = judged(logged("a.json", 0), logged("b.json", 20)).tasks
    assert (row.items, row.lost, row.compressed) == (100, 20, 0.8)
    good = "\n".join(["item,score,error", *(f"{number},1," for number in range(50))])
    (tmp_path / "a.csv").write_text(good)
    (tmp_path / "b.csv").write_text(good.replace("7,1,", "7,,timed out"))
    assert judged(tmp_path / "a.csv", tmp_path / "b.csv").tasks[0].lost == 5
    statuses = {f"HumanEval/{number}": [("pass", "pass")] for number in range(40)}
    failed = {**statuses, "HumanEval/3": [("error", "pass")], "HumanEval/4": [("pass", "timeout")]}
    rows = judged(evalplus(tmp_path / "c.json", statuses), evalplus(tmp_path / "d.json", failed)).rows
    assert [row.lost for row in rows] == [1, 2, 2]


def answered(**fields: Any) -> str:
    return json.dumps({"eval": {"task": "t"}, "samples": [{"id": 1, **fields}]})


def scored(value: Any) -> str:
    return answered(scores={"m": {"value": value}})


@pytest.mark.parametrize(
    ("name", "content", "metric", "message"),
    [
        ("a.json", scored(float("nan")), None, r"samples\[0\], scorer m: the answer is unscored, its score nan"),
        ("a.json", scored({"x": 1, "y": 0}), None, "has the parts x and y; name one as --metric SCORER.PART"),
        ("a.json", scored({"x": 1}), "m.z", "the score has no part 'z', only x"),
        ("a.json", scored(None), None, "the answer is unscored"),
        ("a.json", scored([1]), None, r"the score is '\[1\]', no number"),
        ("a.json", scored(1), "n", "has no scorer 'n', only m"),
        ("a.json", answered(scores=3), None, r"samples\[0\].scores should be an object"),
        ("a.json", '{"samples": [3]}', None, r"samples\[0\] should be an object"),
        ("a.json", '{"samples": [], "eval": 3}', None, "eval should be an object"),
        ("a.json", "[" * 100_000, None, "cannot be read as results"),
        ("a.json", "3", None, "no answers to single items in a known form"),
        ("a.json", '{"eval": [1]}', None, "eval should be an object"),
        ("a.json", '{"eval": {"HumanEval/1": [{"plus_status": "pass"}]}}', None, "base_status is missing"),
        ("a.csv", f"item,score\na,1{'0' * 400}", None, "not finite"),
        ("a.csv", "item,score\na,-inf", None, "line 2: the answer is unscored, its score -inf"),
        ("a.csv", f"item,score\na,{'x' * 200_000}", None, "field limit|no number"),
        ("samples_t_1.jsonl", '{"doc_id": 1, "filter": "f", "acc": NaN}', None, "item 1: the answer is un"),
        ("samples_t_1.jsonl", '{"doc_id": 1, "filter": "f", "perplexity": [-1, NaN]}', None, "item 1: the"),
        ("samples_t_1.jsonl", "3", None, "line 1 should be an object"),
        ("samples_t_1.jsonl", '{"doc_id": 1}', None, "line 1 has no filter"),
    ],
)  # fmt: skip
def test_an_odd_result_is_refused_by_its_place(
    name: str, content: str, metric: str | None, message: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    options = ["--metric", metric] if metric else []
    done = run("gate", "results", tmp_path / name, tmp_path / name, *options)
    refused(done, message)
    assert "Traceback" not in done.err and "object has no" not in done.err


def test_words_and_parts_of_scores_are_read(tmp_path: Path) -> None:
    words = enumerate(["yes", "No", "C"])
    entries = [{"id": number, "scores": {"m": {"value": {"x": word}}}} for number, word in words]
    (tmp_path / "a.json").write_text(json.dumps({"samples": entries}))
    (row,) = gate_results(tmp_path / "a.json", tmp_path / "a.json", metric="m.x").tasks
    assert row.base == pytest.approx(2 / 3) and row.metric == "m.x"


def test_a_circle_of_groups_ends(tmp_path: Path) -> None:
    folder = samples(tmp_path / "a", [{"acc": 1.0}] * 3, group_subtasks={"one": ["boolq", "two"], "two": ["one"]})
    assert judged(folder, folder).tasks[0].items == 3


def test_an_archive_is_read_up_to_a_bound(run: Run, tmp_path: Path) -> None:
    file = inspect_log(tmp_path / "a.eval", {1})
    honest = file.read_bytes()
    for size, message in ((2**31 - 1, "unpacks to 6.44 GB, more than"), (3, "cannot be read")):
        data = bytearray(honest)
        at = 0
        changed = 0
        # the sizes that the list at the end of the archive gives of its members
        while (at := data.find(b"PK\1\2", at + 1)) > 0 and changed < 3:
            data[at + 24 : at + 28] = size.to_bytes(4, "little")
            changed += 1
        file.write_bytes(data)
        refused(run("gate", "results", file, file), message)


def test_logs_of_inspect_in_zstandard_are_read(tmp_path: Path) -> None:
    zstd = pytest.importorskip("backports.zstd.zipfile")
    plain = inspect_log(tmp_path / "a.eval", {1, 2})
    packed = tmp_path / "b.eval"
    with zipfile.ZipFile(plain) as source, zstd.ZipFile(packed, "w", zstd.ZIP_ZSTANDARD) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    (row,) = judged(plain, packed).tasks
    assert (row.items, row.drop, row.lost) == (30, 0.0, 0)


def test_a_log_in_zstandard_names_the_package_that_reads_it(run: Run, tmp_path: Path) -> None:
    if sys.version_info >= (3, 14) or (find_spec("backports") and find_spec("backports.zstd")):
        pytest.skip("this Python reads Zstandard")
    file = inspect_log(tmp_path / "a.eval", {1})
    data = bytearray(file.read_bytes())
    at = data.find(b"PK\1\2")
    data[at + 10 : at + 12] = (93).to_bytes(2, "little")
    file.write_bytes(data)
    refused(run("gate", "results", file, file), r"pip install 'moe-compressor\[inspect\]'")


@pytest.mark.full
def test_what_the_hashes_of_lm_eval_leave_out_is_compared(run: Run, tmp_path: Path) -> None:
    import lm_eval
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    rows = [{"question": f"{number} is", "choices": ["odd", "even"], "answer": number % 2} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "boolq", "dataset_path": "json", "test_split": "test", "doc_to_text": "question",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")},
    }  # fmt: skip
    choice = {**task, "output_type": "multiple_choice", "doc_to_target": "answer", "doc_to_choice": "choices"}
    written = {**task, "output_type": "generate_until", "doc_to_target": "answer"}
    written |= {"metric_list": [{"metric": "exact_match"}]}
    versions = {
        "choices": choice,
        "delimiter": {**choice, "target_delimiter": "\n"},
        "edited": {**choice, "doc_to_choice": ["Odd", "Even"]},
        "written": {**written, "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16}},
        "longer": {**written, "generation_kwargs": {"until": ["\n"], "max_gen_toks": 32}},
    }
    hashes = {}
    for name, config in versions.items():
        manager = TaskManager(include_defaults=False)
        tasks: Any = [config]
        with quiet_lm_eval():
            results = lm_eval.simple_evaluate("dummy", tasks=tasks, task_manager=manager, bootstrap_iters=0)
        logged = results["samples"]["boolq"]
        hashes[name] = [(row["doc_hash"], row["prompt_hash"]) for row in logged]
        tracker = EvaluationTracker(output_path=str(tmp_path / name))
        tracker.general_config_tracker.model_name_sanitized = "model"
        tracker.date_id = "2026-01-02T03-04-05.678"
        tracker.save_results_samples("boolq", logged)
    assert hashes["choices"] == hashes["delimiter"] == hashes["edited"] and hashes["written"] == hashes["longer"]
    for first, second in (("choices", "delimiter"), ("choices", "edited"), ("written", "longer")):
        refused(run("gate", "results", tmp_path / first, tmp_path / second), "12 items were asked by other prompts")
    done = run("gate", "results", tmp_path / "choices", tmp_path / "choices")
    assert "do not hold it: lm-eval's settings" in done.out
