import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from string import Template
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
import typer
import yaml

from compressor.cli import main as cli
from compressor.quality_gate.report import write_gate
from compressor.quality_gate.verdict import EXIT_STATUS
from tests.support import pip_install
from tests.support.doc_pages import ROOT
from tests.support.gate_results import gate, mixed, task
from tests.support.hub import serve
from tests.support.hub_pushes import CANARY

CI = ROOT / "examples" / "ci"
WORKFLOW, ACTION, README = CI / "compress-gate-publish.yml", CI / "gate-action" / "action.yml", CI / "README.md"
EVENTS = ("workflow_dispatch", "pull_request", "schedule")
INSTALLING = f'#!/bin/bash\nexec {sys.executable} {pip_install.__file__} "$(dirname "$0")" "$@"\n'
BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")
STUB = '#!/bin/bash\nprintf "%s\\0" "$@" >> "$CALLS"\nexit "$STATUS"\n'  # of a status that no model gives at will


def read(file: Path) -> Any:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {("on" if name is True else name): value for name, value in content.items()}  # YAML 1.1 takes on for true


def snippets() -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def steps_of(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    jobs = [content["runs"]] if "runs" in content else content["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def inputs_of(content: Mapping[str, Any]) -> dict[str, Any]:
    declared: dict[str, Any] = content["inputs"] if "runs" in content else content["on"]["workflow_dispatch"]["inputs"]
    return declared


def texts(content: Any) -> Iterator[str]:
    if isinstance(content, dict):
        for name, value in content.items():
            yield from (str(name), *texts(value))
    elif isinstance(content, list):
        for value in content:
            yield from texts(value)
    else:
        yield str(content)


def evaluated(expression: str, contexts: Mapping[str, Any]) -> Any:
    """The value of a GitHub expression of names, strings, ==, !=, &&, || and !cancelled()."""

    def value(match: re.Match[str]) -> str:
        found: Any = contexts
        for name in match[0].split("."):
            found = found.get(name, "") if isinstance(found, Mapping) else ""
        return repr(found)

    code = re.sub(r"(?<!['\w./-])[a-z]\w*(\.[\w-]+)+", value, expression.replace("!cancelled()", "True"))
    return eval(code.replace("&&", " and ").replace("||", " or "), {"__builtins__": {}})


def filled(text: object, contexts: Mapping[str, Any]) -> str:
    return re.sub(r"\$\{\{ *(.*?) *\}\}", lambda match: str(evaluated(match[1], contexts)), str(text))


def holds(condition: str | None, contexts: Mapping[str, Any]) -> bool:
    inner = re.fullmatch(r"\$\{\{ *(.*?) *\}\}", condition or "${{ 'always' }}")
    assert inner is not None
    return bool(evaluated(inner[1], contexts))


@dataclass
class Job:
    """A job on its own runner, with the checkout, earlier artifacts, and the programs that it installs."""

    folder: Path
    artifacts: Path
    contexts: dict[str, Any]
    environment: dict[str, str]

    def __post_init__(self) -> None:
        self.programs = self.folder / "bin"
        self.workspace = self.folder / "workspace"
        for each in (self.programs, self.workspace):
            each.mkdir(parents=True)
        (self.programs / "python").write_text(INSTALLING)
        (self.programs / "python").chmod(0o755)
        (self.folder / "summary.md").touch()

    def script(self, step: Mapping[str, Any], contexts: Mapping[str, Any]) -> tuple[dict[str, str], str]:
        """Run a step's script; returns its outputs, and what it printed. A status other than 0 ends the test."""
        outputs = self.folder / "outputs"
        outputs.write_text("")
        own = {name: filled(value, contexts) for name, value in step.get("env", {}).items()}
        paths = {"PATH": f"{self.programs}:/usr/bin:/bin", "GITHUB_OUTPUT": str(outputs), "HOME": str(self.folder)}
        summary = {"GITHUB_STEP_SUMMARY": str(self.folder / "summary.md")}
        done = subprocess.run(
            [*BASH, step["run"]],
            cwd=self.workspace, env={**self.environment, **own, **paths, **summary}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{step['run']}\n{done.stdout}\n{done.stderr}"
        return dict(line.split("=", 1) for line in outputs.read_text().splitlines()), done.stdout

    def run(self, steps: list[dict[str, Any]]) -> None:
        for step in steps:
            if not holds(step.get("if"), self.contexts):
                continue
            uses, given = step.get("uses", ""), step.get("with", {})
            values = {name: filled(value, self.contexts) for name, value in given.items()}
            outputs = dict[str, str]()
            if "run" in step:
                outputs, _ = self.script(step, self.contexts)
            elif uses.startswith("./"):
                action = read(ROOT / uses / "action.yml")
                defaults = {name: entry.get("default", "") for name, entry in action["inputs"].items()}
                known = {"inputs": {**defaults, **values}, "github": self.contexts["github"]}
                for inner in action["runs"]["steps"]:
                    if holds(inner.get("if"), {**known, "steps": {"gate": {"outputs": outputs}}}):
                        outputs |= self.script(inner, known)[0]
            elif uses.startswith("actions/upload-artifact@"):
                shutil.copytree(self.workspace / values["path"], self.artifacts / values["name"])
            elif uses.startswith("actions/download-artifact@"):
                shutil.copytree(self.artifacts / values["name"], self.workspace / values["path"])
            else:
                assert uses.startswith(("actions/checkout@", "actions/setup-python@", "actions/cache")), uses
            self.contexts["steps"][step.get("id", "")] = {"outputs": outputs}


def run_workflow(folder: Path, event: str, inputs: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, Job]:
    """The jobs of the workflow that run at an event, with what they left."""
    content, jobs = read(WORKFLOW), dict[str, Job]()
    contexts = {"github": {"event_name": event}, "inputs": inputs, "secrets": {"HF_TOKEN": CANARY}, "needs": {}}
    values = {name: filled(value, contexts) for name, value in content["env"].items()}
    for name, job in content["jobs"].items():
        if not holds(job.get("if"), contexts):
            continue
        github = {"event_name": event, "workspace": str(folder / name / "workspace")}
        own = {**contexts, "github": github, "env": {**values}, "steps": {}}
        own["env"] |= {each: filled(value, own) for each, value in job.get("env", {}).items()}
        jobs[name] = Job(folder / name, folder / "artifacts", own, {**environment, **own["env"]})
        jobs[name].run(job["steps"])
        given = {each: filled(value, jobs[name].contexts) for each, value in job.get("outputs", {}).items()}
        contexts["needs"][name] = {"outputs": given}
    return jobs


@pytest.mark.full
def test_the_workflow_compresses_gates_and_publishes_with_what_it_installs(tmp_path: Path) -> None:
    values = {
        "model": str(ROOT / "compressor" / "demo" / "checkpoint"), "experts": "12", "repository": "org/smaller",
        "calibration": "demo", "tasks": "moe_demo_sorting", "max-drop": "0.05",
    }  # fmt: skip
    with serve(tokens={CANARY: "write"}) as hub:
        environment = {
            "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path),
        }  # fmt: skip
        assert list(run_workflow(tmp_path, "workflow_dispatch", values, environment)) == ["gate", "publish"]
        files = hub.repositories["org/smaller"].files()
    artifacts = tmp_path / "artifacts"
    reports = sorted(path.name for path in (artifacts / "gate-report").iterdir())
    assert reports == ["gate.json", "gate.md", "gate.xml"]
    assert "moe_demo_sorting" in (tmp_path / "gate" / "summary.md").read_text()
    for path in (artifacts / "compressed").iterdir():
        assert files[path.name] == path.read_bytes()
    assert "images/experts.png" in files and b"moe_demo_sorting" in files["README.md"]


class Comments(BaseHTTPRequestHandler):
    """The comments of a pull request as GitHub's REST API has them, two a page."""

    kept: ClassVar[list[dict[str, Any]]] = []

    def answer(self, content: Any, status: int = 200) -> None:
        allowed = self.headers["Authorization"] == f"Bearer {CANARY}"
        self.send_response(status if allowed else 403)
        self.end_headers()
        self.wfile.write(json.dumps(content if allowed else {}).encode())

    def do_GET(self) -> None:
        page = int(self.path.rpartition("page=")[2])
        self.answer(self.kept[2 * page - 2 : 2 * page])

    def body(self) -> str:
        return str(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["body"])

    def do_POST(self) -> None:
        assert self.path == "/repos/org/model/issues/7/comments"
        self.kept.append({"id": len(self.kept), "user": {"type": "Bot"}, "body": self.body()})
        self.answer({}, 201)

    def do_PATCH(self) -> None:
        self.kept[int(self.path.removeprefix("/repos/org/model/issues/comments/"))]["body"] = self.body()
        self.answer({})

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("curl")), reason="the step takes jq and curl")
def test_a_pull_request_has_one_comment_which_is_updated(tmp_path: Path) -> None:
    step = steps_of(read(ACTION))[1]
    pull_request = {"event": {"pull_request": {"number": "7"}}, "token": CANARY}
    contexts: dict[str, Any] = {"inputs": {"comment": "true", "report": "report"}, "github": pull_request}
    for verdict, others, runs in (("fail", {}, True), ("error", {}, False), ("pass", {"github": {}}, False)):
        assert holds(step["if"], {**contexts, "steps": {"gate": {"outputs": {"verdict": verdict}}}, **others}) == runs
    Comments.kept = [{"id": number, "user": {"type": "User"}, "body": "<!-- moe-compress"} for number in range(3)]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Comments)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    job = Job(tmp_path, tmp_path, contexts, {"GITHUB_API_URL": f"http://127.0.0.1:{server.server_port}"})
    job.environment["GITHUB_REPOSITORY"] = "org/model"
    for result in (mixed(), gate(task(), options={"why": "é % \"'"}), gate(task(), compressed="org/other")):
        write_gate(result, job.workspace / "report", overwrite=True)
        assert job.script(step, contexts)[1] == ""
        page = (job.workspace / "report" / "gate.md").read_text(encoding="utf-8")
        assert page in [comment["body"] for comment in Comments.kept] and page.startswith("<!-- moe-compress gate: org")
    assert [comment["user"]["type"] for comment in Comments.kept] == ["User", "User", "User", "Bot", "Bot"]
    assert "Accuracy gate: pass" in Comments.kept[3]["body"]
    pull_request["token"] = "of a fork"  # which may not write
    assert job.script(step, contexts)[1].startswith("::warning title=Accuracy gate::the comment takes permissions")
    server.shutdown()


def gitlab_job() -> dict[str, Any]:
    (job,) = read(CI / "gitlab-ci.yml").values()
    return dict(job)


def test_gitlab_shows_the_report_that_the_command_writes() -> None:
    job = gitlab_job()
    command = next(line for line in job["script"] if line.startswith("moe-compress gate"))
    folder = str(parse(shlex.split(Template(command).substitute(job["variables"]))[1:])["output"])
    assert job["artifacts"]["reports"]["junit"] == f"{folder}/gate.xml" and job["artifacts"]["when"] == "always"
    assert job["artifacts"]["paths"] == [folder] and job["allow_failure"]["exit_codes"] == EXIT_STATUS["inconclusive"]


@pytest.mark.full
def test_the_gitlab_job_compresses_and_gates_with_what_it_installs(tmp_path: Path) -> None:
    content = gitlab_job()
    values = {name: value.replace("$CI_PROJECT_DIR", str(tmp_path)) for name, value in content["variables"].items()}
    values |= {"MODEL": str(ROOT / "compressor" / "demo" / "checkpoint"), "EXPERTS": "12", "CALIBRATION": "demo"}
    values |= {"TASKS": "moe_demo_sorting", "MAX_DROP": "0.05", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    job = Job(tmp_path / "job", tmp_path, {}, values)
    job.script({"run": "\n".join(content["script"])}, {})
    report = ElementTree.parse(job.workspace / content["artifacts"]["reports"]["junit"]).getroot()
    assert (report.attrib["tests"], report.attrib["failures"], report.attrib["errors"]) == ("2", "0", "0")


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_without_inputs_has_every_value(event: str) -> None:
    content = read(WORKFLOW)
    assert set(content["on"]) == {*EVENTS}
    contexts = {"github": {"event_name": event}, "inputs": {}}
    values = {name: filled(value, contexts) for name, value in content["env"].items()}
    assert all(values.values())
    typed = {name: f"{name}-typed" for name in inputs_of(content)}
    assert {filled(value, {"inputs": typed}) for value in content["env"].values()} == {*typed.values()}
    verdict = {"outputs": {"verdict": "pass"}}
    passed = {**contexts, "needs": {"gate": verdict}, "steps": {"gate": verdict}}
    assert holds(content["jobs"]["publish"]["if"], passed) == (event != "pull_request")
    (upload,) = [step for step in steps_of(content) if step.get("name") == "Hand the model on"]
    assert holds(upload["if"], passed) == (event != "pull_request")
    for verdict in ("fail", "inconclusive", "error", ""):
        undecided = {**contexts, "needs": {"gate": {"outputs": {"verdict": verdict}}}}
        assert not holds(content["jobs"]["publish"]["if"], undecided)


@pytest.mark.parametrize("file", [WORKFLOW, ACTION], ids=["workflow", "action"])
def test_no_input_is_read_as_a_part_of_a_script(file: Path) -> None:
    scripts = [step["run"] for step in steps_of(read(file)) if "run" in step]
    assert scripts and not [script for script in scripts if "${{" in script]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def parse(arguments: list[str]) -> dict[str, Any]:
    """What the command line makes of its arguments, without running anything; a fault raises."""
    group: Any = typer.main.get_command(cli.app)
    context = group.context_class(group, info_name="moe-compress")
    name, command, rest = group.resolve_command(context, arguments)
    values: dict[str, Any] = command.make_context(name, rest, parent=context).params
    return values


def gated(folder: Path, status: int, **others: str) -> tuple[int, dict[str, str], list[str], str]:
    """The action's status, outputs, arguments of the command and first line, where that ends with `status`."""
    action = read(ACTION)
    step = steps_of(action)[0]
    (folder / "moe-compress").write_text(STUB)
    (folder / "moe-compress").chmod(0o755)
    calls, outputs = folder / "calls", folder / "outputs"
    calls.write_text("")
    outputs.write_text("")
    inputs = {name: str(entry.get("default", "")) for name, entry in action["inputs"].items()}
    inputs |= {"base": "org/model", "compressed": "./a folder", "tasks": "boolq,rte"}
    own = {name: filled(value, {"inputs": inputs}) for name, value in step["env"].items()}
    paths = {"PATH": f"{folder}:/usr/bin:/bin", "CALLS": str(calls), "GITHUB_OUTPUT": str(outputs)}
    environment = {**own, **others, **paths, "STATUS": str(status)}
    done = subprocess.run([*BASH, step["run"]], cwd=folder, env=environment, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    found = dict(line.split("=", 1) for line in outputs.read_text().splitlines())
    return done.returncode, found, calls.read_text().split("\0")[:-1], done.stdout


def test_the_gate_gets_every_input(tmp_path: Path) -> None:
    given = {"CONFIDENCE": "0.9", "REPORT": "a report", "MAX_TASK_DROP": "0.05", "LIMIT": "100"}
    values = parse(gated(tmp_path, 0, **given)[2])
    assert (values["base"], values["compressed"], values["tasks"]) == ("org/model", "./a folder", "boolq,rte")
    assert (values["max_drop"], values["max_task_drop"]) == (0.01, 0.05)
    assert (values["confidence"], values["limit"]) == (0.9, 100)
    assert str(values["output"]) == "a report" and values["overwrite"] and values["inconclusive"] is None
    values = parse(gated(tmp_path, 0)[2])
    assert values["limit"] is values["max_task_drop"] is None
    values = parse(gated(tmp_path, 0, BASE="", TASKS="", OPTIONS="--prompts a.jsonl --max-loop-rise 0.02")[2])
    assert (values["base"], values["tasks"], values["prompts"]) == ("./a folder", None, ["a.jsonl"])
    several = """--prompts 'my chats.jsonl' \\
      --prompts org/data#column
    --text "it's $HOME; `touch hit`.txt" --include-path=a\\ b
    """
    values = parse(gated(tmp_path, 0, OPTIONS=several)[2])
    assert values["prompts"] == ["my chats.jsonl", "org/data#column"]
    assert values["text"] == ["it's $HOME; `touch hit`.txt"] and values["include_path"] == Path("a b")
    assert not (tmp_path / "hit").exists()
    ended, outputs, call, told = gated(tmp_path, 0, OPTIONS="--text 'open")
    assert (ended, outputs["verdict"], call) == (2, "error", []) and "options" in told


@pytest.mark.parametrize("accepted", ["fail", "pass"])
@pytest.mark.parametrize(
    ("status", "verdict"), [(0, "pass"), (1, "fail"), (2, "error"), (3, "inconclusive"), (130, "error")]
)
def test_the_step_tells_the_verdict(status: int, verdict: str, accepted: str, tmp_path: Path) -> None:
    ended, outputs, _, _ = gated(tmp_path, status, INCONCLUSIVE=accepted)
    assert outputs == {"verdict": verdict, "report": "gate-report"}
    assert ended == (0 if (verdict, accepted) == ("inconclusive", "pass") else status)


def test_inputs_are_never_run_and_odd_ones_are_refused(tmp_path: Path) -> None:
    odd = "$(touch hit) `touch hit`; touch hit"
    values = parse(gated(tmp_path, 0, BASE=odd, TASKS=odd)[2])
    assert (values["base"], values["tasks"]) == (odd, odd) and not (tmp_path / "hit").exists()
    ended, outputs, call, _ = gated(tmp_path, 0, INCONCLUSIVE="maybe")
    assert (ended, outputs["verdict"], call) == (2, "error", [])


def test_the_action_is_called_with_its_inputs() -> None:
    known = inputs_of(read(ACTION))
    required = {name for name, entry in known.items() if entry.get("required")}
    calls = steps_of(read(WORKFLOW)) + [step for text in snippets() for step in yaml.safe_load(text)]
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
    assert publish["needs"] == "gate"
    assert content["permissions"] == {}
    assert publish["permissions"] == {"contents": "read"}
    assert content["jobs"]["gate"]["permissions"] == {"contents": "read", "pull-requests": "write"}
    for name, job in content["jobs"].items():
        text = " ".join(texts(job))
        assert ("secrets.HF_TOKEN" in text) == ("moe-compress push" in text) == (name == "publish")
    assert "secrets." not in " ".join(texts(content["env"]))
    tokens = {step["name"]: step for step in steps_of(content) if "secrets." in " ".join(texts(step))}
    assert list(tokens) == ["Compress", "Gate", publish["steps"][-1]["name"]]
    reading = tokens["Compress"]["env"]["HF_TOKEN"], tokens["Gate"]["with"]["token"]
    assert set(reading) == {"${{ secrets.HF_READ_TOKEN }}"}
    (call,) = [step["run"] for step in publish["steps"] if "push" in step.get("run", "")]
    pushed = parse(shlex.split(call)[1:])
    assert str(pushed["require_gate"]) == "gate-report/gate.json" and pushed["private"]
    (made,) = [step["run"] for step in steps_of(content) if step.get("run", "").startswith("moe-compress compress")]
    assert parse(shlex.split(made.replace("$EXPERTS", "48"))[1:])["fast"]
    assert content["concurrency"]["cancel-in-progress"] == "${{ github.event_name == 'pull_request' }}"
    for pattern in content["on"]["pull_request"]["paths"]:
        assert pattern.startswith(".github/") or list(CI.parent.parent.glob(pattern)), pattern
    handed = {
        step["with"]["name"]: step.get("if") for step in steps_of(content) if "upload-artifact" in step.get("uses", "")
    }
    assert handed["gate-report"] == "${{ !cancelled() && steps.gate.outputs.report }}"


def test_commands_of_the_readme_are_accepted() -> None:
    lines = re.findall(r"^moe-compress .*$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 2
    assert parse(shlex.split(lines[0])[1:])["max_drop"] == 0.01
    assert parse(shlex.split(lines[1])[1:])["gate"] == ["boolq,openbookqa,rte"]
