"""Compare the figures that two checkouts show a user: in terminal, JSON, report, card, comparison and gate.md.

    python -m scripts.compare_figures OLD [NEW] [--only merge,constants]

OLD and NEW (default: this checkout) are folders of the project; both run the same command lines on the embedded demo,
each in an empty folder. A figure is a number as it is written, with its unit if that is a percent sign. OLD runs twice,
and what only one of its runs shows is left out (seconds, sizes of compressed pages), and so are lines of memory, hashes
and versions. Printed is what OLD shows and NEW lacks, which makes the exit status 1, and the reverse.
"""

import argparse
import html
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.hub import Hub, serve

ROOT = Path(__file__).resolve().parents[1]
TEXT = "--calibration demo --samples 16 --sequence-length 64 --dtype float32"
CASES = {
    "merge": f"--experts 12 --strategy hc-smoe --correct ridge --protect auto {TEXT}",
    "split": f"--experts 12 --split 2 --correct none {TEXT}",
    "combined": f"--experts 12 --correct tune --routers router --distill experts --set distill.steps=4 {TEXT}",
    "constants": f"--experts 12 --format mone --budget uneven {TEXT}",
    "onnx": f"--experts 12 --strategy count-guided --correct none --format safetensors,onnx {TEXT}",
}
AFTER = (  # of each output, where it can be loaded
    "report out -o report.html",
    "report out -o again.html --json",
    "gate model out --tasks moe_demo_sorting,moe_demo_recall --limit 40 --max-drop 0.2 -o gate",
    "push out org/smaller",
)
ONCE = (
    f"compare model --experts 12 --strategies reap,hc-smoe -o comparison {TEXT}",
    f"attribute model -o attribution {TEXT}",
    "inspect model",
    "inspect model --json",
)
FILES = ("report.html", "gate.md", "gate.json", "comparison.md", "comparison.json", "hubs.json")
NUMBER = re.compile(r"(?<![\w.#])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?%?(?![\w])")
UNSTABLE = re.compile(r"peak memory|\d s\b|version|sha256|fingerprint|revision|digest|loopback|commit", re.I)
UNSTABLE_KEYS = re.compile(r"seconds|memory|version|sha256|fingerprint|digest|command|commit|url|created|key", re.I)
TOKEN = "hf_" + "loopback" * 4


def numbers(text: str) -> Iterator[str]:
    """Numbers of a text, line by line, without those of lines that no two runs share."""
    for line in text.splitlines():
        if not UNSTABLE.search(line):
            yield from NUMBER.findall(line)


def json_numbers(value: Any) -> Iterator[str]:
    """Numbers and those within strings, wherever they are in JSON."""
    if isinstance(value, dict):
        for name, entry in value.items():
            if not UNSTABLE_KEYS.search(name):
                yield from json_numbers(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from json_numbers(entry)
    elif isinstance(value, str):
        yield from numbers(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield f"{value:.10g}"


def page_numbers(page: str) -> Iterator[str]:
    """Numbers of a page's text; pictures count by their descriptions and labels, not by coordinates."""
    text = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.S)
    yield from numbers(html.unescape(re.sub(r"<[^>]+>", "\n", text)))


def figures(text: str) -> set[str]:
    """The figures of a command's output or of a file, by what it is."""
    if text.lstrip().startswith(("{", "[")):
        return set(json_numbers(json.loads(text)))
    return set(page_numbers(text) if text.lstrip().startswith("<!") else numbers(text))


def run(root: Path, place: Path, line: str, hub: Hub, found: dict[str, set[str]], name: str) -> None:
    """Run a command of the checkout `root` in `place` and keep the figures that it prints, by `name`."""
    environment = {
        **os.environ, "PYTHONPATH": str(root), "MOE_COMPRESSOR_CACHE": str(place / "cache"), "COLUMNS": "200",
        "OMP_NUM_THREADS": "1", "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "compressor", *line.split()]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    found[name] = figures(done.stdout) | {f"status {done.returncode}"}
    if done.returncode not in (0, 1, 3):
        print(f"{name}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)


def collect(root: Path, names: list[str]) -> dict[str, set[str]]:
    """The figures of everything that a checkout shows, by case and output."""
    found: dict[str, set[str]] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as scratch, serve(tokens={TOKEN: "write"}) as hub:
            place = Path(scratch)
            (place / "model").symlink_to(ROOT / "compressor" / "demo" / "checkpoint")
            if name == "once":
                for line in ONCE:
                    run(
                        root, place, line, hub, found, f"once: {line.split(' -', 1)[0]}{' --json' * ('--json' in line)}"
                    )
            else:
                run(root, place, f"compress model -o out {CASES[name]}", hub, found, f"{name}: compress")
                run(root, place, f"compress model -o same {CASES[name]} --json", hub, found, f"{name}: compress --json")
                for line in AFTER:
                    json_too = " --json" * ("--json" in line)
                    run(root, place, line, hub, found, f"{name}: {line.split()[0]}{json_too}")
            for file in sorted(place.rglob("*")):
                if file.name in FILES:
                    found[f"{name}: {file.relative_to(place)}"] = figures(file.read_text(encoding="utf-8"))
            for repository in hub.repositories.values():
                card = repository.files()["README.md"].decode()
                found[f"{name}: card"] = figures(card)
    return found


def main() -> int:
    """Run both and print what differs."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--only", help=f"cases, separated by commas: {', '.join([*CASES, 'once'])} (default: all)")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else [*CASES, "once"]
    old, again, new = (collect(root.resolve(), names) for root in (given.old, given.old, given.new))
    lost = 0
    for name in {**old, **new}:
        first, second, after = (found.get(name, set()) for found in (old, again, new))
        gone, added = sorted((first & second) - after), sorted(after - first - second)
        lost += len(gone)
        print(f"{name}: {len(first & second & after)} the same, lost {gone or 'none'}, new {added or 'none'}")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
