"""Measure what keeping a model on its device saves; the ratio is within one run.

    python -m scripts.benchmarks.resident MODEL [--calibration demo] [--ratio 0.25] [--correct tune] [--samples 32]

Compresses a checkpoint one layer at a time and with all of it kept, in turns, each in a process of its own, and prints
the phases' seconds, the peaks of anonymous memory, the ratio of the runs' seconds, and whether the weights are equal.
"""

import filecmp
import json
import shutil
import tempfile
from pathlib import Path

from scripts.benchmarks.frame import COMMAND, options, run_child, warm


def main() -> None:
    """Compress in both ways."""
    parser = options(
        __doc__,
        calibration="demo",
        ratio=0.25,
        correct="tune",
        strategy="count-guided",
        samples=32,
        turns=2,
        device="cpu",
    )
    parser.add_argument("model", type=Path)
    given = parser.parse_args()
    command = [
        *COMMAND,
        "compress",
        str(given.model),
        "--calibration",
        given.calibration,
        "--samples",
        str(given.samples),
    ]
    for name in ("ratio", "correct", "strategy", "device"):
        command += [f"--{name}", str(getattr(given, name))]
    least = dict.fromkeys(("no", "yes"), float("inf"))
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(given.turns):
            for resident in least:
                warm(given.model)
                out = Path(scratch) / resident
                shutil.rmtree(out, ignore_errors=True)
                child = run_child([*command, "--json", "--resident", resident, "-o", str(out)])
                least[resident] = min(least[resident], child.seconds)
                took = json.loads(child.output)["seconds"]
                phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in took.items())
                peak = child.anonymous / 1e9
                print(f"{turn}: {resident:3} {child.seconds:.1f} s, {peak:.2f} GB ({phases})", flush=True)
        files = [path.name for path in (Path(scratch) / "no").glob("*.safetensors")]
        equal = filecmp.cmpfiles(Path(scratch) / "no", Path(scratch) / "yes", files, shallow=False)[0] == files
    print(f"kept takes {least['yes'] / least['no']:.3f} of the time; weights {'equal' if equal else 'DIFFER'}")


if __name__ == "__main__":
    main()
