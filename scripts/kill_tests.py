"""Kill commands at random moments, run them again, and compare what they leave with what undisturbed runs leave.

    python -m scripts.kill_tests [--kills 100] [--seed 0] [--model FOLDER] [--only apply,export]

Every trial runs one command in a folder of its own, kills its whole process group (SIGKILL) one to three times, and
then lets the same command through. Half of the kills fall just before or after a rename, or while a layer's file,
golden answers, a baseline or another file is written; each moment of a watched run is as likely. The others fall at
any time of an undisturbed run, most of them after the first such moment.

After each kill an output is whole: the older one, or the new one, or absent where none was. In the end the folder
holds what the undisturbed run left, byte for byte, and nothing else, hidden files included, and the temporary folder
holds no name that an undisturbed run does not leave there. Times and memory in the run's record and in a gate's reports
are left out. Pushes go to a Hub on loopback, which has to hold the same files. Exits with 1 when anything differed.
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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
    """A command, and what is run once before it; `demo` takes the embedded model, whose tasks a gate needs.

    An output in `parts` is put in place one after another. REPOSITORY stands for one of the trial's own on the Hub.
    """

    name: str
    command: str
    before: str = ""
    demo: bool = False
    parts: bool = False
    gguf: bool = False


DATA = "--calibration calibration.txt --samples 16 --sequence-length 32"
OWN = "--calibration calibration.txt --sequence-length 32"  # text of a command that is one step
COMPRESS = f"compress MODEL -o {OUT} --experts 4 {DATA}"
RIDGE = "--strategy hc-smoe --correct ridge"
PLAN = f"plan MODEL -o plan.json --experts 4 {DATA} {RIDGE}"
SMALL = f"compress MODEL -o small --experts 4 {DATA} --strategy count-guided --correct none"
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
    Case(
        "compress --overwrite",
        f"{COMPRESS} {RIDGE} --overwrite",
        f"compress MODEL -o {OUT} --experts 2 {DATA} --correct none",
    ),
    Case("compress --format onnx", f"{COMPRESS} --correct none --format onnx"),
    Case("compress two formats", f"{COMPRESS} --correct none --format safetensors,onnx"),
    Case("compress all steps", f"{COMPRESS} {RIDGE} {ALL}"),
    Case("split", f"split MODEL -o {OUT} --parts 2"),
    Case(
        "calibrate-router",
        f"calibrate-router small -o {OUT} --base MODEL --rounds 2 --sequences 16 {OWN}",
        SMALL,
    ),
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
            raw = path.read_bytes()
            if path.name in SAYING_THE_SAME:
                raw = b""
            elif path.name == "gate.json":
                raw = _without_times(raw)
            elif path.name == "SHA256SUMS":
                raw = b"".join(line for line in raw.splitlines() if b"  gate." not in line)
            elif path.name == BASELINE:
                raw = SECONDS.sub(b"", raw)
            found[name] = sha256(raw).hexdigest()
    return found


def _without_times(gate: bytes) -> bytes:
    """Return gate.json without the fields that no two runs share; as it is where it is not whole."""
    try:
        result = json.loads(gate)
        for name in NOT_COMPARED_OF_GATES:
            result.pop(name, None)
        for identity in (result["base_identity"], result["compressed_identity"]):
            identity["weights"] = [entry[:2] for entry in identity["weights"]]  # name and size
    except (ValueError, KeyError, TypeError, AttributeError):
        return gate
    return json.dumps(result).encode()


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of one trial: where the command runs, its temporary folder and its cache."""

    folder: Path

    @property
    def place(self) -> Path:
        return self.folder / "place"

    @property
    def repository(self) -> str:
        """Return the trial's own repository on the Hub."""
        return f"org/{self.folder.name}"

    def start(
        self, command: str, model: Path, hub: Hub, moment: Moment | None = None, watch: bool = False
    ) -> "subprocess.Popen[bytes]":
        """Start the command in a process group of its own, on one thread and offline but for the Hub.

        It is killed at a moment, if there is one, or its moments are written down.
        """
        for name in ("place", "tmp", "home"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        named = {"MODEL": str(model), "REPOSITORY": self.repository}
        words = [named.get(word, word) for word in command.split()]
        program = ["-m", "compressor"]
        if moment is not None or watch:
            program = ["-c", f"from scripts.kill_tests import run_watched; run_watched({moment!r})"]
        folders = {"TMPDIR": "tmp", "HOME": "home", "MOE_COMPRESSOR_CACHE": CACHE}
        environment = {
            **os.environ,
            **{name: str(self.folder / value) for name, value in folders.items()},
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "0" if words[0] == "push" else "1",
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_TOKEN": "hf_test",
            "MOMENTS": str(self.folder / "moments"),
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        }
        with (self.folder / "errors").open("wb") as errors:
            streams = {"stdout": subprocess.DEVNULL, "stderr": errors}
            line = [sys.executable, *program, *words]
            return subprocess.Popen(line, cwd=self.place, env=environment, start_new_session=True, **streams)

    def output(self) -> dict[str, str]:
        """Return the digests of the files of the output, and of those beside it that are named after it."""
        found = content(self.place).items()
        return {name: kind for name, kind in found if name.startswith(OUT) and kind != "folder"}

    def left(self, hub: Hub) -> dict[str, str]:
        """Return what the command left: files, names in the temporary folder, records of runs, files on the Hub."""
        found = content(self.place)
        found |= dict.fromkeys((f"tmp/{name}" for name in os.listdir(self.folder / "tmp")), "there")
        for path in sorted((self.folder / CACHE / "runs").glob("*.json")):
            text = path.read_text(encoding="utf-8").replace(str(self.folder), "")
            record = {k: v for k, v in json.loads(text).items() if k not in NOT_COMPARED}
            found[f"record {path.stem}"] = json.dumps(record)
        if self.repository in hub.repositories:
            for name, raw in hub.repositories[self.repository].files().items():
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
class Undisturbed:
    """A run that nobody killed: seconds to its first moment and to its end, and what it left."""

    first: float
    end: float
    older: dict[str, str]
    output: dict[str, str]
    left: dict[str, str]
    moments: list[Moment]


def undisturbed(case: Case, base: Home, home: Home, model: Path, hub: Hub) -> Undisturbed:
    """Run a command to its end, and once more watched; raises SystemExit when it fails."""
    watched = Home(home.folder.with_name(f"{home.folder.name}-watched"))
    for own, watch in ((watched, True), (home, False)):
        shutil.copytree(base.folder, own.folder)
        older, begin = own.output(), time.monotonic()
        if own.start(case.command, model, hub, watch=watch).wait() != 0:
            raise SystemExit(f"{case.name}: the undisturbed run failed: {own.last_error()}")
        end = time.monotonic() - begin
    lines = (watched.folder / "moments").read_text().splitlines()
    times, moments = zip(*map(json.loads, lines), strict=True) if lines else ((), ())
    found = [Moment(*happened) for happened in moments]
    return Undisturbed(min(times, default=0.0), end, older, home.output(), home.left(hub), found)


def run_killed(case: Case, home: Home, model: Path, whole: Undisturbed, dice: random.Random, hub: Hub) -> bool:
    """Start the command and kill it at a moment drawn by the dice; returns whether it was still running then."""
    if whole.moments and dice.random() < 0.5:
        moment = dice.choice(whole.moments)
        return home.start(case.command, model, hub, moment).wait() == -signal.SIGKILL
    seconds = dice.uniform(whole.first if dice.random() < 0.9 else 0.0, whole.end)
    process = home.start(case.command, model, hub)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    alive = process.poll() is None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return alive


@dataclass(slots=True)
class Tally:
    """What came of the kills of one command."""

    trials: int = 0
    kills: int = 0
    identical: int = 0
    faults: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Setup:
    """A case with its model, the folder to start from, and its undisturbed run."""

    case: Case
    model: Path
    base: Home
    whole: Undisturbed


def prepare(case: Case, folder: Path, model: Path, hub: Hub) -> Setup:
    """Make what a case starts from, and run it undisturbed."""
    from tests.support import gguf_models, small

    base = Home(folder / f"base {case.name}")
    base.place.mkdir(parents=True)
    small.text_file(base.place)
    counts = {f"blk.{block}.ffn_down_exps.weight": (SQUARES, COUNTS) for block in (1, 2)}
    gguf_models.imatrix(base.place / "imatrix.gguf", counts)
    (base.place / "quantize.yaml").write_text(QUANTIZE.replace("MODEL", str(model)))
    if case.before and base.start(case.before, model, hub).wait() != 0:
        raise SystemExit(f"{case.name}: {case.before} failed: {base.last_error()}")
    whole = undisturbed(case, base, Home(folder / f"whole-{CASES.index(case)}"), model, hub)
    return Setup(case, model, base, whole)


def trial(setup: Setup, home: Home, dice: random.Random, tally: Tally, hub: Hub) -> None:
    """Kill a command up to three times, let it through, and count what is wrong."""
    case, whole = setup.case, setup.whole
    shutil.copytree(setup.base.folder, home.folder)
    for _ in range(dice.randint(1, MOST_KILLS)):
        tally.kills += run_killed(case, home, setup.model, whole, dice, hub)
        out = home.output()
        is_whole = out.keys() <= whole.output.keys() if case.parts else out == whole.output
        if out != whole.older and not is_whole:
            tally.faults["a kill left an output that is neither the older nor the new one"] += 1
    status = home.start(case.command, setup.model, hub).wait()
    left = home.left(hub)
    names = sorted({*left, *whole.left})
    wrong = [f"{name} differs" for name in names if left.get(name) != whole.left.get(name)]
    if status == 2 and not wrong and "exists already" in home.last_error():
        status = 0  # the last kill came after a report was in place, which no repeat replaces
    if status != 0:
        wrong.append(f"status {status}: {home.last_error()}")
    tally.trials += 1
    tally.identical += not wrong
    tally.faults.update(wrong)


def run_trials(cases: Sequence[Case], kills: int, seed: int, given: Path | None) -> dict[str, Tally]:
    """Run trials of each command, in turn, until there were so many kills."""
    from compressor.data.demo import demo_checkpoint
    from tests.support import gguf_models, small

    dice, tallies = random.Random(seed), {case.name: Tally() for case in cases}
    with tempfile.TemporaryDirectory() as scratch, demo_checkpoint() as demo, serve() as hub:
        folder, number = Path(scratch), 0
        model = given.resolve() if given else small.save(folder / "model", shard="60KB")
        file = gguf_models.quantised(folder / "model.gguf")
        setups: dict[str, Setup] = {}
        while sum(tally.kills for tally in tallies.values()) < kills:
            case = cases[number % len(cases)]
            if case.name not in setups:
                own = Path(demo) if case.demo and not given else model
                setups[case.name] = prepare(case, folder, file if case.gguf else own, hub)
            home = Home(folder / f"trial-{number}")
            trial(setups[case.name], home, dice, tallies[case.name], hub)
            shutil.rmtree(home.folder)
            number += 1
            print(f"\n{table(tallies)}", file=sys.stderr, flush=True)  # so far
    return tallies


def table(tallies: dict[str, Tally]) -> str:
    """Return the result as Markdown; shares are of the trials, each of which is one to three kills."""
    lines = ["| command | kills | ran to identical bytes |", "|---|---|---|"]
    faults = []
    for name, tally in tallies.items():
        lines.append(f"| {name} | {tally.kills} | {tally.identical}/{tally.trials} |")
        faults += [f"- {name}: {fault} ({count})" for fault, count in tally.faults.items()]
    return "\n".join([*lines, "", *(faults or ["Nothing differed."])])


def main() -> None:
    """Print the table; exit with 1 when anything differed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a checkpoint folder (default: tiny ones)")
    parser.add_argument("--only", help="names of commands, separated by commas (default: all)")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else [case.name for case in CASES]
    cases = [case for case in CASES if case.name in names]
    tallies = run_trials(cases, given.kills, given.seed, given.model)
    print(table(tallies))
    raise SystemExit(any(tally.faults for tally in tallies.values()))


if __name__ == "__main__":
    main()
