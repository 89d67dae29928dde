"""Kill commands at random moments, run them again, and compare what they leave with what undisturbed runs leave.

    python -m scripts.kill_tests [--kills 100] [--seed 0] [--model FOLDER] [--only apply,export]

Every trial runs one command in a folder of its own, kills its whole process group (SIGKILL) one to three times, and
then lets the same command through. Half of the kills fall just before or after a rename, or while a layer's file,
golden answers, a baseline or another file is written; each moment of the undisturbed run is as likely. A quarter falls
anywhere between the first file of the work and the end, a fifth between the last new file and the end, when the output
is put in place, and the rest into the start-up.

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
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.audit import Moment, happening, listening
from tests.support.hub import Hub, serve

NOT_COMPARED = (
    "seconds",
    "peak_memory",
    "finished",
)  # of a run's record: durations, bytes of memory, a date
NOT_COMPARED_OF_GATES = (
    "seconds",
    "items_per_second",
    "reused_base",
)  # and the times of change of the weights that were judged
TOLD_AGAIN = (
    "gate.md",
    "gate.xml",
)  # which say what gate.json says, times included: they have to be there
OUT = "out"
CACHE = "home/cache"
BASELINE = "out.baseline.json"
SECONDS = re.compile(rb'"seconds":[^,}]*')
MOST_KILLS = 3  # of one trial
PAUSE = 0.002  # seconds between two looks at the folder
LIMIT = 900.0  # seconds after which a run hangs
DATA = ("--calibration", "calibration.txt", "--samples", "16", "--sequence-length", "32")


@dataclass(frozen=True, slots=True)
class Case:
    """A command, and what is run once before it; `demo` takes the embedded model, whose tasks a gate needs.

    An output in `parts` is put in place one after another. REPOSITORY stands for one of the trial's own on the Hub.
    """

    name: str
    command: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()
    demo: bool = False
    parts: bool = False
    gguf: bool = False


def _compress(*more: str, experts: str = "4") -> tuple[str, ...]:
    return ("compress", "MODEL", "-o", OUT, "--experts", experts, *DATA, *more)


RIDGE = ("--strategy", "hc-smoe", "--correct", "ridge")
PLAN = ("plan", "MODEL", "-o", "plan.json", "--experts", "4", *DATA, *RIDGE)
SMALL = (
    "compress",
    "MODEL",
    "-o",
    "small",
    "--experts",
    "4",
    *DATA,
    "--strategy",
    "count-guided",
    "--correct",
    "none",
)
OWN = (
    "--calibration",
    "calibration.txt",
    "--sequence-length",
    "32",
)  # text of a command that is one step
TRAIN = (
    "--steps",
    "6",
    "--tokens-per-step",
    "128",
    "--learning-rate",
    "1e-3",
    "--evaluate-every",
    "2",
    *OWN,
)
MOVE = ("--rounds", "2", "--sequences", "16", *OWN)
ALL = ("--routers", "router", "--set", "routers.sequences=16", "--set", "routers.sequence_length=32",
       "--distill", "experts", "--set", "distill.steps=6", "--set", "distill.tokens_per_step=128",
       "--set", "distill.sequence_length=32")  # fmt: skip
SEARCH = (
    "--strategy",
    "model-centric",
    "--search",
    "--gate",
    "moe_demo_sorting",
    "--limit",
    "20",
    "--max-drop",
    "0.2",
)
ASKED = ("--prompts", "demo", "--limit", "40", "--max-new-tokens", "64", "--temperature", "0.7")
GATED = (
    "--tasks",
    "moe_demo_sorting,moe_demo_facts",
    "--limit",
    "20",
    "--max-drop",
    "0.9",
    "--inconclusive",
    "pass",
)
CASES = (
    Case("compress drop", _compress("--strategy", "count-guided", "--correct", "none")),
    Case("compress ridge", _compress(*RIDGE)),
    Case("compress tune", _compress("--strategy", "hc-smoe", "--correct", "tune")),
    Case("compress --sequential", _compress(*RIDGE, "--sequential")),
    Case(
        "compress --overwrite",
        _compress(*RIDGE, "--overwrite"),
        (_compress("--correct", "none", experts="2"),),
    ),
    Case("compress --format onnx", _compress("--correct", "none", "--format", "onnx")),
    Case(
        "compress --format safetensors,onnx",
        _compress("--correct", "none", "--format", "safetensors,onnx"),
    ),
    Case("compress all steps", _compress(*RIDGE, *ALL)),
    Case("split", ("split", "MODEL", "-o", OUT, "--parts", "2")),
    Case(
        "calibrate-router",
        ("calibrate-router", "small", "-o", OUT, "--base", "MODEL", *MOVE),
        (SMALL,),
    ),
    Case("distill", ("distill", "small", "-o", OUT, "--base", "MODEL", *TRAIN), (SMALL,)),
    Case("apply", ("apply", "plan.json", "-o", OUT), (PLAN,)),
    Case("export", ("export", "MODEL", "-o", OUT)),
    Case("gate --search", ("compress", "MODEL", "-o", OUT, *SEARCH), demo=True, parts=True),
    Case("traces", ("traces", "MODEL", "-o", f"{OUT}.jsonl", *ASKED), demo=True, parts=True),
    Case("evaluate", ("evaluate", "MODEL", "small", "-o", OUT, *ASKED), (SMALL,), demo=True),
    Case("gate", ("gate", "MODEL", "small", "-o", OUT, *GATED), (SMALL,), demo=True),
    Case("baseline", ("gate", "baseline", "MODEL", BASELINE, *GATED[:4]), demo=True),
    Case("check --write", ("check", "--write", "MODEL", "--output", f"{OUT}.json")),
    Case(
        "gguf",
        ("compress", "MODEL", "-o", f"{OUT}.gguf", "--experts", "4", "--imatrix", "imatrix.gguf"),
        gguf=True,
    ),
    Case("quantize", ("compress", "quantize.yaml", "-o", OUT)),
    Case("push", ("push", "small", "REPOSITORY", "--yes"), (SMALL,)),
)
QUANTIZE = "model: MODEL\nsteps: [{quantize: {scheme: int4}}]\n"
COUNTS = np.arange(1, 9)  # of a file's experts
SQUARES = np.outer(COUNTS, np.ones(32))
WRITING = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True, slots=True)
class Content:
    """What a folder holds: SHA-256 of every file by its path, and every folder."""

    files: dict[str, str]
    folders: frozenset[str]

    @classmethod
    def of(cls, folder: Path) -> "Content":
        """The content of `folder`, which is empty where there is none; links count as what they name."""
        files, folders = {}, set()
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_symlink():
                files[name] = f"link to {os.readlink(path)}"
            elif path.is_dir():
                folders.add(name)
            else:
                raw = path.read_bytes()
                if path.name in TOLD_AGAIN:
                    raw = b""
                elif path.name == "gate.json":
                    raw = _without_times(raw)
                elif path.name == "SHA256SUMS":
                    raw = b"".join(line for line in raw.splitlines() if b"  gate." not in line)
                elif path.name == BASELINE:
                    raw = SECONDS.sub(b"", raw)
                files[name] = sha256(raw).hexdigest()
        return cls(files, frozenset(folders))


def _without_times(gate: bytes) -> bytes:
    """gate.json without the fields that no two runs share; as it is where it is not whole."""
    try:
        content = {
            name: value
            for name, value in json.loads(gate).items()
            if name not in NOT_COMPARED_OF_GATES
        }
        for identity in (content["base_identity"], content["compressed_identity"]):
            identity["weights"] = [entry[:2] for entry in identity["weights"]]  # name and size
    except (ValueError, KeyError, TypeError, AttributeError):
        return gate
    return json.dumps(content).encode()


def differences(expected: Content, found: Content) -> tuple[list[str], list[str]]:
    """What differs or is missing, and what is there beside; names of files and folders."""
    changed = [name for name, digest in expected.files.items() if found.files.get(name) != digest]
    missing = sorted(expected.folders - found.folders)
    beside = sorted({*found.files, *found.folders} - {*expected.files, *expected.folders})
    return changed + missing, beside


def run_records(home: Path) -> dict[str, dict[str, Any]]:
    """What is kept of each run, by the digest of its output, without `home` and the fields that no two runs share."""
    found = {}
    for path in sorted((home / "home" / "cache" / "runs").glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8").replace(str(home), ""))
        found[path.stem] = {
            name: value for name, value in content.items() if name not in NOT_COMPARED
        }
    return found


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of one trial: where the command runs, its temporary folder and its cache."""

    folder: Path

    @property
    def place(self) -> Path:
        return self.folder / "place"

    @property
    def repository(self) -> str:
        """The trial's own on the Hub."""
        return f"org/{self.folder.name}"

    @property
    def moments(self) -> list[Moment]:
        """What a run that was watched has renamed, and what it has opened to write."""
        return [
            Moment(*json.loads(line)) for line in (self.folder / "moments").read_text().splitlines()
        ]

    def start(
        self,
        command: Sequence[str],
        model: Path,
        hub: Hub,
        moment: Moment | None = None,
        is_watched: bool = False,
    ) -> "subprocess.Popen[bytes]":
        """The command in a process group of its own, on one thread and offline but for the Hub.

        It is killed at a moment, if there is one, or its moments are written down.
        """
        for name in ("place", "tmp", "home"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        named = {"MODEL": str(model), "REPOSITORY": self.repository}
        words = [named.get(word, word) for word in command]
        own = {"TMPDIR": "tmp", "HOME": "home", "MOE_COMPRESSOR_CACHE": CACHE}
        program = ["-m", "compressor"]
        if moment is not None or is_watched:
            program = ["-c", f"from scripts.kill_tests import run_watched; run_watched({moment!r})"]
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "0" if command[0] == "push" else "1",
            "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": "hf_test",
            "MOMENTS": str(self.folder / "moments"),
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
            **{name: str(self.folder / value) for name, value in own.items()},
        }  # fmt: skip
        with (self.folder / "errors").open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, *program, *words],
                cwd=self.place, env=environment, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
            )  # fmt: skip

    def seen(self, *more: str) -> set[str]:
        """Names of all that is in the place now, and in further folders; of folders too."""
        folders = (self.place, *(self.folder / name for name in more))
        walks = chain.from_iterable(map(os.walk, folders))
        return {os.path.join(at, name) for at, *names in walks for name in (*names[0], *names[1])}

    def output(self) -> dict[str, str]:
        """The digests of the files of the output, and of those beside it that are named after it."""
        return {
            name: digest
            for name, digest in Content.of(self.place).files.items()
            if name.startswith(OUT)
        }

    def said(self) -> str:
        """The last line of the errors, without the trial's own folder."""
        lines = (self.folder / "errors").read_text(errors="replace").strip().splitlines() or [""]
        return lines[-1].replace(f"{self.place}/", "").replace(str(self.folder), "")


def run_watched(moment: Moment | None) -> None:
    """Run the command of this process, and kill its group at a moment, or write down all moments."""
    from compressor.cli import main as cli

    if moment is not None:
        with happening(moment, lambda: os.killpg(0, signal.SIGKILL)):
            cli.main()
    place = os.getcwd()
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
                    moments.write(
                        json.dumps([event, pattern, counts[event, pattern], is_after]) + "\n"
                    )

        with listening(note):
            cli.main()


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A run that nobody killed: when its first and last new file appeared, when it ended, and what it left."""

    first: float
    last: float
    end: float
    last_name: str
    older: dict[str, str]
    output: dict[str, str]
    place: Content
    temporary: frozenset[str]
    records: dict[str, dict[str, Any]]
    moments: list[Moment]
    pushed: dict[str, bytes]


def pushed(hub: Hub, home: Home) -> dict[str, bytes]:
    """Return the files that a trial has on the Hub, without names of its own folder."""
    if home.repository not in hub.repositories:
        return {}
    files = hub.repositories[home.repository].files()
    return {
        name: content.replace(home.folder.name.encode(), b"") for name, content in files.items()
    }


def undisturbed(case: Case, base: Home, home: Home, model: Path, hub: Hub) -> Undisturbed:
    """Run a command to its end and watch it; raises SystemExit when it fails."""
    shutil.copytree(base.folder, home.folder)
    older, known, news = home.output(), home.seen(CACHE), list[tuple[float, str]]()
    begin = time.monotonic()
    process = home.start(case.command, model, hub)
    while process.poll() is None:
        now, seen = time.monotonic() - begin, home.seen(CACHE)
        news += [(now, os.path.relpath(name, home.folder)) for name in sorted(seen - known)]
        known |= seen
        time.sleep(PAUSE)
    if process.returncode != 0:
        raise SystemExit(f"{case.name}: the undisturbed run failed: {home.said()}")
    end = time.monotonic() - begin
    kept = {os.path.relpath(name, home.folder) for name in home.seen(CACHE)}
    hidden = [(at, name) for at, name in news if name.startswith("place/.")]
    cached = [(at, name) for at, name in news if name.startswith(CACHE) and name in kept]
    last, last_name = (hidden or cached or news or [(end, "")])[-1]
    watched = Home(home.folder.with_name(f"{home.folder.name}-watched"))
    shutil.copytree(base.folder, watched.folder)
    if watched.start(case.command, model, hub, is_watched=True).wait() != 0:
        raise SystemExit(f"{case.name}: the watched run failed: {watched.said()}")
    return Undisturbed(
        first=min(hidden + cached or news or [(end, "")])[0], last=last, end=end, last_name=last_name, older=older,
        output=home.output(), place=Content.of(home.place), temporary=frozenset(os.listdir(home.folder / "tmp")),
        records=run_records(home.folder), moments=watched.moments, pushed=pushed(hub, home),
    )  # fmt: skip


def run_killed(
    case: Case, home: Home, model: Path, whole: Undisturbed, dice: random.Random, hub: Hub
) -> bool:
    """Start the command and kill it at a moment drawn by the dice; whether it was still running then."""
    kind = dice.random()
    if kind < 0.5 and whole.moments:
        return (
            home.start(case.command, model, hub, dice.choice(whole.moments)).wait()
            == -signal.SIGKILL
        )
    begin, known = time.monotonic(), home.seen(CACHE)
    process = home.start(case.command, model, hub)

    def wait(until: float, name: str | None = None) -> None:
        """Wait for the end, for a time, or for a name, or any new one, in the place."""
        while process.poll() is None and time.monotonic() - begin < until:
            seen = home.seen(CACHE) if name is not None else known
            if seen - known if name == "" else str(home.folder / str(name)) in seen:
                return
            time.sleep(PAUSE)

    if not whole.last_name:  # of a push, which leaves no file here
        wait(dice.uniform(0, whole.end))
    elif kind < 0.75:
        wait(LIMIT, "")
        wait(time.monotonic() - begin + dice.uniform(0, whole.end - whole.first))
    elif kind < 0.95:
        wait(LIMIT, whole.last_name)
        wait(time.monotonic() - begin + dice.uniform(0, whole.end - whole.last))
    else:
        wait(dice.uniform(0, whole.first))
    alive = process.poll() is None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return alive


def run_through(case: Case, home: Home, model: Path, hub: Hub) -> tuple[int, bool]:
    """The command's exit status, and whether it took up files, or the output, that an earlier run had left."""
    with ExitStack() as held:  # an open file's inode is given to no other
        earlier, hidden = set[tuple[str, int]](), set[tuple[str, int]]()
        for name in filter(os.path.isfile, home.seen()):
            top = Path(name).relative_to(home.place).parts[0]
            entry = name, os.fstat(held.enter_context(open(name, "rb")).fileno()).st_ino
            if top == OUT:
                earlier.add(entry)
            elif top.startswith(".") and os.path.basename(name) != "lock":
                hidden.add(entry)
        process, kept = home.start(case.command, model, hub), set[tuple[str, int]]()
        while process.poll() is None:
            now = set()
            for name, _ in hidden:
                with suppress(OSError):
                    now.add((name, os.stat(name).st_ino))
            kept = (now & hidden) if now else kept
            time.sleep(PAUSE)
        standing = {(name, os.stat(name).st_ino) for name, _ in earlier if os.path.exists(name)}
    return process.returncode, bool(kept or standing & earlier)


@dataclass(slots=True)
class Tally:
    """What came of the kills of one command."""

    trials: int = 0
    kills: int = 0
    identical: int = 0
    beside: int = 0
    taken_up: int = 0
    faults: Counter[str] = field(default_factory=Counter)


def trial(
    case: Case,
    home: Home,
    base: Home,
    model: Path,
    whole: Undisturbed,
    dice: random.Random,
    tally: Tally,
    hub: Hub,
) -> None:
    """Kill a command up to three times, let it through, and count what is wrong."""
    shutil.copytree(base.folder, home.folder)
    for _ in range(dice.randint(1, MOST_KILLS)):
        tally.kills += run_killed(case, home, model, whole, dice, hub)
        out = home.output()
        is_whole = out.keys() <= whole.output.keys() if case.parts else out == whole.output
        if out != whole.older and not is_whole:
            tally.faults["a kill left an output that is neither the older nor the new one"] += 1
    status, taken_up = run_through(case, home, model, hub)
    tally.trials += 1
    tally.taken_up += taken_up
    changed, beside = differences(whole.place, Content.of(home.place))
    beside += sorted(set(os.listdir(home.folder / "tmp")) - whole.temporary)
    if status == 2 and not changed and "exists already" in home.said():
        status = 0  # the last kill came after a report was in place, which no repeat replaces
    tally.identical += not changed and status == 0
    tally.beside += bool(beside)
    tally.faults.update(
        [f"{name} differs" for name in changed] + [f"{name} is left" for name in beside]
    )
    if status != 0:
        tally.faults[f"status {status}: {home.said()}"] += 1
    there = pushed(hub, home)
    for name in sorted(there.keys() | whole.pushed.keys()):
        if there.get(name) != whole.pushed.get(name):
            tally.faults[f"the Hub holds another {name}"] += 1
    if run_records(home.folder) != whole.records:
        tally.faults["the record of the run differs"] += 1


def measured(cases: Sequence[Case], kills: int, seed: int, given: Path | None) -> dict[str, Tally]:
    """Trials of each command, in turn, until there were so many kills."""
    from compressor.data.demo import demo_checkpoint
    from tests.support import gguf_models, small

    dice, tallies = random.Random(seed), {case.name: Tally() for case in cases}
    with tempfile.TemporaryDirectory() as scratch, demo_checkpoint() as demo, serve() as hub:
        folder = Path(scratch)
        model = given.resolve() if given else small.save(folder / "model", shard="60KB")
        file = gguf_models.quantised(folder / "model.gguf")
        prepared: dict[str, tuple[Home, Undisturbed, Path]] = {}
        number = 0
        while sum(tally.kills for tally in tallies.values()) < kills:
            case = cases[number % len(cases)]
            if case.name not in prepared:
                base, own = (
                    Home(folder / f"base-{number}"),
                    Path(demo) if case.demo and not given else model,
                )
                own = file if case.gguf else own
                base.place.mkdir(parents=True)
                small.text_file(base.place)
                counts = {
                    f"blk.{block}.ffn_down_exps.weight": (SQUARES, COUNTS) for block in (1, 2)
                }
                gguf_models.imatrix(base.place / "imatrix.gguf", counts)
                (base.place / "quantize.yaml").write_text(QUANTIZE.replace("MODEL", str(own)))
                for command in case.before:
                    if base.start(command, own, hub).wait() != 0:
                        raise SystemExit(f"{case.name}: {command[0]} failed: {base.said()}")
                prepared[case.name] = (
                    base,
                    undisturbed(case, base, Home(folder / f"whole-{number}"), own, hub),
                    own,
                )
            base, whole, own = prepared[case.name]
            home = Home(folder / f"trial-{number}")
            trial(case, home, base, own, whole, dice, tallies[case.name], hub)
            shutil.rmtree(home.folder)
            number += 1
            print(f"\n{table(tallies)}", file=sys.stderr, flush=True)  # so far
    return tallies


def table(tallies: dict[str, Tally]) -> str:
    """The result as Markdown; shares are of the trials, each of which is one to three kills."""
    columns = "| command | kills | ran to identical bytes | left something beside | took up earlier work |"
    lines = [columns, "|---|---|---|---|---|"]
    for name, tally in tallies.items():
        shares = [
            f"{count}/{tally.trials}" for count in (tally.identical, tally.beside, tally.taken_up)
        ]
        lines.append(f"| {name} | {tally.kills} | {' | '.join(shares)} |")
    found = [(name, *fault) for name, tally in tallies.items() for fault in tally.faults.items()]
    faults = [f"- {name}: {fault} ({count})" for name, fault, count in found]
    return "\n".join([*lines, "", *(faults or ["Nothing differed."])])


def main() -> None:
    """Print the table; exit with 1 when anything differed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--model", type=Path, help="a checkpoint folder (default: tiny ones that are made here)"
    )
    parser.add_argument("--only", help="names of commands, separated by commas (default: all)")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else [case.name for case in CASES]
    tallies = measured(
        [case for case in CASES if case.name in names], given.kills, given.seed, given.model
    )
    print(table(tallies))
    raise SystemExit(any(tally.faults for tally in tallies.values()))


if __name__ == "__main__":
    main()
