"""The CI examples: their scripts run with stub programs, whose arguments the real command lines have to accept."""

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from compressor.cli import main as cli

CI = Path(__file__).parent.parent / "examples" / "ci"
WORKFLOW, ACTION, README = CI / "compress-gate-publish.yml", CI / "gate-action" / "action.yml", CI / "README.md"
VALUES = {
    "model": "org/model", "experts": "48", "repository": "org/smaller", "base": "org/model",
    "compressed": "./a folder", "tasks": "boolq,rte", "limit": "100",
}  # fmt: skip
PROGRAMS: dict[str, Any] = {"moe-compress": cli.app}
STUB = """#!/bin/bash
printf '%s\\0' "$(basename "$0")" "$@" >> "$CALLS"
printf '\\n' >> "$CALLS"
[ "$(basename "$0")" != moe-compress ] || exit "${STATUS:-0}"
"""


def read(file: Path) -> Any:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {("on" if name is True else name): value for name, value in content.items()}  # YAML 1.1 takes on for true


def snippets() -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def steps_of(content: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(job, step) of a workflow or an action."""
    if "runs" in content:
        return [("action", step) for step in content["runs"]["steps"]]
    return [(name, step) for name, job in content["jobs"].items() for step in job["steps"]]


def inputs_of(content: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["inputs"] if "runs" in content else content["on"]["workflow_dispatch"]["inputs"]
    return found


def texts(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        for name, value in content.items():
            yield from (str(name), *texts(value))
    elif isinstance(content, list):
        for value in content:
            yield from texts(value)
    else:
        yield str(content)


def filled(text: str, inputs: Mapping[str, Any]) -> str:
    """Text with its inputs, which are the only expressions that a step's environment may have beside secrets."""
    values = {name: VALUES.get(name, str(entry.get("default", ""))) for name, entry in inputs.items()}
    return re.sub(r"\$\{\{ *(inputs|secrets)\.([\w-]+) *\}\}", lambda m: values.get(m[2], "a-secret"), text)


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    calls: list[list[str]]
    outputs: dict[str, str]


def run(step: Mapping[str, Any], inputs: Mapping[str, Any], folder: Path, status: int = 0, **others: str) -> Ran:
    """A step's script in bash as GitHub calls it, programs being stubs; `others` replace variables of the step."""
    for name in (*PROGRAMS, "python", "python3"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    calls, outputs = folder / "calls", folder / "outputs"
    calls.write_text("")
    outputs.write_text("")
    own = {name: filled(str(value), inputs) for name, value in step.get("env", {}).items()}
    paths = {"PATH": f"{folder}:/usr/bin:/bin", "CALLS": str(calls), "GITHUB_OUTPUT": str(outputs)}
    (folder / "script.sh").write_text(step["run"])
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(folder / "script.sh")]
    environment = {**own, **others, **paths, "STATUS": str(status)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=30)
    assert not done.stderr, done.stderr
    made = [line.split("\0")[:-1] for line in calls.read_text().split("\n")[:-1]]
    return Ran(
        done.returncode, done.stdout, made, dict(line.split("=", 1) for line in outputs.read_text().splitlines())
    )


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """What a program's own parser makes of its arguments, without running anything; a fault raises."""
    program, *rest = arguments
    app = PROGRAMS[program]
    group: Any = app if hasattr(app, "commands") else typer.main.get_command(app)
    context = group.context_class(group, info_name=program)
    name, command, rest = group.resolve_command(context, rest)
    values: dict[str, Any] = command.make_context(name, rest, parent=context).params
    return values


SCRIPTS = [
    pytest.param(step, inputs_of(read(file)), id=f"{file.stem}-{step.get('name', step.get('id'))}-{number}")
    for file in (WORKFLOW, ACTION)
    for number, (_, step) in enumerate(steps_of(read(file)))
    if "run" in step
]


@pytest.mark.parametrize(("step", "inputs"), SCRIPTS)
def test_scripts_are_bash_that_calls_programs_as_they_are(step: Any, inputs: Any, tmp_path: Path) -> None:
    subprocess.run(["bash", "-n"], input=step["run"], text=True, check=True)
    assert "${{" not in step["run"]  # an input there would be read as part of the script
    ran = run(step, inputs, tmp_path)
    assert ran.status == 0 and ran.calls
    for call in ran.calls:
        if call[0] in PROGRAMS:
            parse(call)
        else:
            assert call[1:4] == ["-m", "pip", "install"]


def gate_step() -> tuple[dict[str, Any], dict[str, Any]]:
    ((_, step),) = steps_of(read(ACTION))
    return step, inputs_of(read(ACTION))


def test_the_gate_gets_every_input(tmp_path: Path) -> None:
    (call,) = run(*gate_step(), tmp_path, CONFIDENCE="0.9", REPORT="a report", MAX_TASK_DROP="0.05").calls
    found = parse(call)
    assert (found["base"], found["compressed"], found["tasks"]) == ("org/model", "./a folder", "boolq,rte")
    assert (found["max_drop"], found["max_task_drop"]) == (0.01, 0.05)
    assert (found["confidence"], found["limit"]) == (0.9, 100)
    assert str(found["output"]) == "a report" and found["overwrite"] and found["inconclusive"] is None
    (call,) = run(*gate_step(), tmp_path, LIMIT="").calls
    assert parse(call)["limit"] is parse(call)["max_task_drop"] is None


@pytest.mark.parametrize("accepted", ["fail", "pass"])
@pytest.mark.parametrize(
    ("status", "verdict"), [(0, "pass"), (1, "fail"), (2, "error"), (3, "inconclusive"), (130, "error")]
)
def test_the_step_tells_the_verdict(status: int, verdict: str, accepted: str, tmp_path: Path) -> None:
    ran = run(*gate_step(), tmp_path, status, INCONCLUSIVE=accepted)
    assert ran.outputs == {"verdict": verdict, "report": "gate-report"}
    assert ran.status == (0 if (verdict, accepted) == ("inconclusive", "pass") else status)
    assert ran.out.startswith("::warning") == (verdict == "inconclusive")


def test_inputs_are_never_run_and_odd_ones_are_refused(tmp_path: Path) -> None:
    odd = "$(touch hit) `touch hit`; touch hit"
    (call,) = run(*gate_step(), tmp_path, BASE=odd, TASKS=odd).calls
    assert (parse(call)["base"], parse(call)["tasks"]) == (odd, odd) and not (tmp_path / "hit").exists()
    ran = run(*gate_step(), tmp_path, INCONCLUSIVE="maybe")
    assert (ran.status, ran.outputs["verdict"], ran.calls) == (2, "error", [])


def test_what_steps_refer_to_exists() -> None:
    for content in (read(WORKFLOW), read(ACTION)):
        text, inputs = " ".join(texts(content)), inputs_of(content)
        outputs = read(ACTION)["outputs"] if "jobs" in content else {"verdict", "report"}
        ids = {step["id"] for _, step in steps_of(content) if "id" in step}
        assert set(re.findall(r"\binputs\.([\w-]+)", text)) == set(inputs)
        for step, output in re.findall(r"\bsteps\.([\w-]+)\.outputs\.([\w-]+)", text):
            assert step in ids and output in outputs
        for job, output in re.findall(r"\bneeds\.([\w-]+)\.outputs\.([\w-]+)", text):
            assert output in content["jobs"][job]["outputs"]


def test_the_action_is_called_with_its_inputs() -> None:
    known = inputs_of(read(ACTION))
    required = {name for name, entry in known.items() if entry.get("required")}
    calls = [step for _, step in steps_of(read(WORKFLOW))] + [
        step for text in snippets() for step in yaml.safe_load(text)
    ]
    found = [step for step in calls if "gate-action" in step.get("uses", "")]
    assert len(found) == 2
    for step in found:
        assert required <= set(step["with"]) <= set(known)
    assert (CI.parent.parent / found[0]["uses"] / "action.yml").resolve() == ACTION.resolve()
    told = README.read_text(encoding="utf-8").split("Inputs: ")[1]
    assert all(f"`{name}`" in told for name in (*known, *read(ACTION)["outputs"]))


def test_only_what_passed_is_published_and_only_that_job_has_a_token() -> None:
    content = read(WORKFLOW)
    publish = content["jobs"]["publish"]
    assert publish["needs"] == "gate" and publish["if"] == "${{ needs.gate.outputs.verdict == 'pass' }}"
    assert content["permissions"] == {}
    assert content["jobs"]["gate"]["permissions"] == publish["permissions"] == {"contents": "read"}
    for name, job in content["jobs"].items():
        text = " ".join(texts(job))
        assert ("secrets." in text) == ("moe-compress push" in text) == (name == "publish")
    assert any("moe-compress compress" in step.get("run", "") for _, step in steps_of(content))
    (call,) = [step["run"] for step in publish["steps"] if "push" in step.get("run", "")]
    assert str(parse(shlex.split(call))["require_gate"]) == "gate-report/gate.json"
    handed = {
        step["with"]["name"]: step.get("if")
        for _, step in steps_of(content)
        if "upload-artifact" in step.get("uses", "")
    }
    assert handed["gate-report"] == "${{ !cancelled() && steps.gate.outputs.report }}"


def test_commands_of_the_readme_are_accepted() -> None:
    lines = re.findall(r"^moe-compress .*$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 2
    assert parse(shlex.split(lines[0]))["max_drop"] == 0.01
    assert parse(shlex.split(lines[1]))["gate"] == ["boolq,openbookqa,rte"]
