"""Kill commands at random moments, run them again, and compare what they leave with what undisturbed runs leave.

    python -m scripts.kill_tests [--kills 100] [--seed 0] [--only apply,export]

Every trial runs one command in a folder of its own, kills its whole process group (SIGKILL) one to three times, and
then lets the same command through. Half of the kills fall just before or after a rename, or while a file is written;
each moment of a watched run is as likely. The others fall at any time of an undisturbed run, most of them after the
first such moment. Pushes go to a Hub on loopback.

After each kill an output is whole: the older one, or the new one, or absent where none was. In the end folder, temporary
folder, records of runs and Hub hold what the undisturbed run left, byte for byte but for times and memory, and nothing
else, hidden files included. Exits with 1 when anything differed.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.audit import Moment, happening, listening
from tests.support.hub import Hub, serve

# Durations, bytes of memory and a date; of gates also the times of change of the weights that were judged.
NOT_COMPARED = ("seconds", "peak_memory", "finished")
NOT_COMPARED_OF_GATES = ("seconds", "items_per_second", "reused_base")
# Reports that say what gate.json says, times included: they have to be there.
SAYING_THE_SAME = ("gate.md", "gate.xml")
OUT = "out"
CACHE = "home/cache"
BASELINE = "out.baseline.json"
SECONDS = re.compile(rb'"seconds":[^,}]*')
MOST_KILLS = 3  # of one trial
WRITING = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True, slots=True)
class Case:
    """A command, and what is run once before it."""

    name: str
    command: str
    before: str = ""
    demo: bool = False  # takes the embedded model, whose tasks a gate needs
    parts: bool = False  # has an output that is put in place one part after another
    gguf: bool = False


DATA = "--calibration calibration.txt --samples 16 --sequence-length 32"
OWN = "--calibration calibration.txt --sequence-length 32"  # text of a command that is one step
COMPRESS = f"compress MODEL -o {OUT} --experts 4 {DATA}"
RIDGE = "--strategy hc-smoe --correct ridge"
PLAN = f"plan MODEL -o plan.json --experts 4 {DATA} {RIDGE}"
SMALL = f"compress MODEL -o small --experts 4 {DATA} --strategy count-guided --correct none"
OLDER = f"compress MODEL -o {OUT} --experts 2 {DATA} --correct none"
ROUNDS = f"--rounds 2 --sequences 16 {OWN}"
TRAIN = f"--steps 6 --tokens-per-step 128 --learning-rate 1e-3 --evaluate-every 2 {OWN}"
ALL = (
    "--routers router --set routers.sequences=16 --set routers.sequence_length=32 --distill experts"
    " --set distill.steps=6 --set distill.tokens_per_step=128 --set distill.sequence_length=32"
)
SEARCH = "--strategy model-centric --search --gate moe_demo_sorting --limit 20 --max-drop 0.2"
PROMPTS = "--prompts demo --limit 40 --max-new-tokens 64 --temperature 0.7"
TASKS = "--tasks moe_demo_sorting,moe_demo_facts --limit 20"
GATED = f"{TASKS} --max-drop 0.9 --inconclusive pass"
CASES = (
    Case("compress drop", f"{COMPRESS} --strategy count-guided --correct none"),
    Case("compress ridge", f"{COMPRESS} {RIDGE}"),
    Case("compress tune", f"{COMPRESS} --strategy hc-smoe --correct tune"),
    Case("compress --sequential", f"{COMPRESS} {RIDGE} --sequential"),
    Case("compress --overwrite", f"{COMPRESS} {RIDGE} --overwrite", OLDER),
    Case("compress --format onnx", f"{COMPRESS} --correct none --format onnx"),
    Case("compress two formats", f"{COMPRESS} --correct none --format safetensors,onnx"),
    Case("compress all steps", f"{COMPRESS} {RIDGE} {ALL}"),
    Case("split", f"split MODEL -o {OUT} --parts 2"),
    Case("calibrate-router", f"calibrate-router small -o {OUT} --base MODEL {ROUNDS}", SMALL),
    Case("distill", f"distill small -o {OUT} --base MODEL {TRAIN}", SMALL),
    Case("apply", f"apply plan.json -o {OUT}", PLAN),
    Case("export", f"export MODEL -o {OUT}"),
    Case("gate --search", f"compress MODEL -o {OUT} {SEARCH}", demo=True, parts=True),
    Case("traces", f"traces MODEL -o {OUT}.jsonl {PROMPTS}", demo=True, parts=True),
    Case("evaluate", f"evaluate MODEL small -o {OUT} {PROMPTS}", SMALL, demo=True),
    Case("gate", f"gate MODEL small -o {OUT} {GATED}", SMALL, demo=True),
    Case("baseline", f"gate baseline MODEL {BASELINE} {TASKS}", demo=True),
    Case("check --write", f"check --write MODEL --output {OUT}.json"),
    Case("gguf", f"compress MODEL -o {OUT}.gguf --experts 4 --imatrix imatrix.gguf", gguf=True),
    Case("quantize", f"compress quantize.yaml -o {OUT}"),
    Case("push", "push small REPOSITORY --yes", SMALL),
)
QUANTIZE = "model: MODEL\nsteps: [{quantize: {scheme: int4}}]\n"
COUNTS = np.arange(1, 9)  # of a file's experts
SQUARES = np.outer(COUNTS, np.ones(32))


def content(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file by its path, and every folder; links count as what they name."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_dir():
            found[name] = "folder"
        else:
            found[name] = sha256(compared_bytes(path)).hexdigest()
    return found


def compared_bytes(path: Path) -> bytes:
    """Return a file's bytes without what no two runs share; a gate.json that is not whole as it is."""
    raw = path.read_bytes()
    if path.name in SAYING_THE_SAME:
        return b""
    if path.name == "SHA256SUMS":
        return b"".join(line for line in raw.splitlines() if b"  gate." not in line)
    if path.name == BASELINE:
        return SECONDS.sub(b"", raw)
    if path.name != "gate.json":
        return raw
    try:
        result = json.loads(raw)
        for name in NOT_COMPARED_OF_GATES:
            result.pop(name, None)
        for identity in (result["base_identity"], result["compressed_identity"]):
            identity["weights"] = [entry[:2] for entry in identity["weights"]]  # name and size
    except (ValueError, KeyError, TypeError, AttributeError):
        return raw
    return json.dumps(result).encode()


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of one trial: where the command runs, its temporary folder and its cache."""

    folder: Path
    hub: Hub

    @property
    def place(self) -> Path:
        return self.folder / "place"

    def start(
        self, command: str, model: Path, moment: Moment | None = None, watch: bool = False
    ) -> "subprocess.Popen[bytes]":
        """Start the command in a process group of its own; kill it at a moment, if any, or write its moments down."""
        for name in ("place", "tmp", "home"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        named = {"MODEL": str(model), "REPOSITORY": f"org/{self.folder.name}"}
        words = [named.get(word, word) for word in command.split()]
        program = ["-m", "compressor"]
        if moment is not None or watch:
            program = ["-c", f"from scripts.kill_tests import run_watched; run_watched({moment!r})"]
        folders = {"TMPDIR": "tmp", "HOME": "home", "MOE_COMPRESSOR_CACHE": CACHE, "MOMENTS": "moments"}
        environment = {
            **os.environ, **{name: str(self.folder / value) for name, value in folders.items()},
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
            "HF_HUB_OFFLINE": "0" if words[0] == "push" else "1", "HF_ENDPOINT": self.hub.url, "HF_TOKEN": "hf_test",
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        }  # fmt: skip
        with (self.folder / "errors").open("wb") as errors:
            streams = {"stdout": subprocess.DEVNULL, "stderr": errors}
            line = [sys.executable, *program, *words]
            return subprocess.Popen(line, cwd=self.place, env=environment, start_new_session=True, **streams)

    def output(self) -> dict[str, str]:
        """Return the digests of the files of the output, and of those beside it that are named after it."""
        found = content(self.place).items()
        return {name: kind for name, kind in found if name.startswith(OUT) and kind != "folder"}

    def left(self) -> dict[str, str]:
        """Return what the command left: files, names in the temporary folder, records of runs, files on the Hub."""
        found = content(self.place)
        found |= dict.fromkeys((f"tmp/{name}" for name in os.listdir(self.folder / "tmp")), "there")
        for path in sorted((self.folder / CACHE / "runs").glob("*.json")):
            record = json.loads(path.read_text(encoding="utf-8").replace(str(self.folder), ""))
            kept = {key: value for key, value in record.items() if key not in NOT_COMPARED}
            found[f"record {path.stem}"] = json.dumps(kept)
        repository = self.hub.repositories.get(f"org/{self.folder.name}")
        for name, raw in repository.files().items() if repository else ():
            found[f"Hub {name}"] = str(raw.replace(self.folder.name.encode(), b""))
        return found

    def last_error(self) -> str:
        """Return the last line of the errors, without the trial's own folder."""
        lines = (self.folder / "errors").read_text(errors="replace").strip().splitlines() or [""]
        return lines[-1].replace(f"{self.place}/", "").replace(str(self.folder), "")


def run_watched(moment: Moment | None) -> None:
    """Run the command of this process, and kill its group at a moment, or write down all moments."""
    from compressor.cli import main as cli

    if moment is not None:
        with happening(moment, lambda: os.killpg(0, signal.SIGKILL)):
            cli.main()
    place, begin = os.getcwd(), time.monotonic()
    counts = Counter[tuple[str, str]]()
    with open(os.environ["MOMENTS"], "w", encoding="utf-8") as moments:

        def note(event: str, arguments: tuple[Any, ...]) -> None:
            if event not in ("os.rename", "open"):
                return
            path = str(arguments[1] if event == "os.rename" else arguments[0])
            pattern = re.escape(os.path.basename(path))
            if not os.path.abspath(path).startswith(place):
                return
            counts[event, pattern] += 1
            if event == "os.rename" or arguments[2] & WRITING:
                for is_after in (False, True):
                    happened = [event, pattern, counts[event, pattern], is_after]
                    moments.write(json.dumps([time.monotonic() - begin, happened]) + "\n")

        with listening(note):
            cli.main()


@dataclass(frozen=True, slots=True)
class Setup:
    """A case with its model, the folder to start from, and a run that nobody killed."""

    case: Case
    model: Path
    base: Home
    first: float  # seconds to its first moment
    end: float
    older: dict[str, str]
    output: dict[str, str]
    left: dict[str, str]
    moments: list[Moment]


def prepare(case: Case, folder: Path, model: Path, hub: Hub) -> Setup:
    """Make what a case starts from, and run it undisturbed, once watched and once not."""
    from tests.support import gguf_models, small

    base = Home(folder / f"base {case.name}", hub)
    base.place.mkdir(parents=True)
    small.text_file(base.place)
    counts = {f"blk.{block}.ffn_down_exps.weight": (SQUARES, COUNTS) for block in (1, 2)}
    gguf_models.imatrix(base.place / "imatrix.gguf", counts)
    (base.place / "quantize.yaml").write_text(QUANTIZE.replace("MODEL", str(model)))
    if case.before and base.start(case.before, model).wait() != 0:
        raise SystemExit(f"{case.name}: {case.before} failed: {base.last_error()}")
    home = Home(folder / f"whole-{CASES.index(case)}", hub)
    watched = Home(folder / f"{home.folder.name}-watched", hub)
    for run in (watched, home):
        shutil.copytree(base.folder, run.folder)
        older, begin = run.output(), time.monotonic()
        if run.start(case.command, model, watch=run is watched).wait() != 0:
            raise SystemExit(f"{case.name}: the undisturbed run failed: {run.last_error()}")
        end = time.monotonic() - begin
    noted = [json.loads(line) for line in (watched.folder / "moments").read_text().splitlines()]
    first = min((seconds for seconds, _ in noted), default=0.0)
    moments = [Moment(*happened) for _, happened in noted]
    return Setup(case, model, base, first, end, older, home.output(), home.left(), moments)


def run_killed(setup: Setup, home: Home, dice: random.Random) -> bool:
    """Start the command and kill it at a moment drawn by the dice; returns whether it was still running then."""
    if setup.moments and dice.random() < 0.5:
        moment = dice.choice(setup.moments)
        return home.start(setup.case.command, setup.model, moment).wait() == -signal.SIGKILL
    seconds = dice.uniform(setup.first if dice.random() < 0.9 else 0.0, setup.end)
    process = home.start(setup.case.command, setup.model)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    alive = process.poll() is None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return alive


def trial(setup: Setup, home: Home, dice: random.Random, tally: Counter[str]) -> list[str]:
    """Kill a command up to three times, let it through, and return what is wrong."""
    wrong = []
    shutil.copytree(setup.base.folder, home.folder)
    for _ in range(dice.randint(1, MOST_KILLS)):
        tally["kills"] += run_killed(setup, home, dice)
        out = home.output()
        is_whole = out.keys() <= setup.output.keys() if setup.case.parts else out == setup.output
        if out != setup.older and not is_whole:
            wrong.append("a kill left an output that is neither the older nor the new one")
    status = home.start(setup.case.command, setup.model).wait()
    left = home.left()
    names = sorted({*left, *setup.left})
    differing = [f"{name} differs" for name in names if left.get(name) != setup.left.get(name)]
    if status == 2 and not differing and "exists already" in home.last_error():
        status = 0  # the last kill came after a report was in place, which no repeat replaces
    if status != 0:
        differing.append(f"status {status}: {home.last_error()}")
    tally["trials"] += 1
    tally["identical"] += not differing
    return wrong + differing


def table(tallies: dict[str, Counter[str]], faults: Counter[str]) -> str:
    """Return the result as Markdown; shares are of the trials, each of which is one to three kills."""
    lines = ["| command | kills | ran to identical bytes |", "|---|---|---|"]
    lines += [
        f"| {name} | {tally['kills']} | {tally['identical']}/{tally['trials']} |" for name, tally in tallies.items()
    ]
    shown = [f"- {fault} ({count})" for fault, count in faults.items()]
    return "\n".join([*lines, "", *(shown or ["Nothing differed."])])


def main() -> None:
    """Try the commands in turn until there were so many kills; exit with 1 when anything differed."""
    from compressor.data.demo import demo_checkpoint
    from tests.support import gguf_models, small

    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="names of commands, separated by commas (default: all)")
    given = parser.parse_args()
    cases = [case for case in CASES if not given.only or case.name in given.only.split(",")]
    dice, tallies = random.Random(given.seed), {case.name: Counter[str]() for case in cases}
    faults = Counter[str]()
    with tempfile.TemporaryDirectory() as scratch, demo_checkpoint() as demo, serve() as hub:
        folder, number = Path(scratch), 0
        model = small.save(folder / "model", shard="60KB")
        file = gguf_models.quantised(folder / "model.gguf")
        setups: dict[str, Setup] = {}
        while sum(tally["kills"] for tally in tallies.values()) < given.kills:
            case = cases[number % len(cases)]
            if case.name not in setups:
                source = Path(demo) if case.demo else model
                source = file if case.gguf else source
                setups[case.name] = prepare(case, folder, source, hub)
            home = Home(folder / f"trial-{number}", hub)
            wrong = trial(setups[case.name], home, dice, tallies[case.name])
            faults.update(f"{case.name}: {fault}" for fault in wrong)
            shutil.rmtree(home.folder)
            number += 1
            print(f"\n{table(tallies, faults)}", file=sys.stderr, flush=True)  # so far
    print(table(tallies, faults))
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
