"""Record what command lines write, as a file of digests and figures, and compare a later version of the code with it.

    python -m scripts.golden record FILE [--only drop,ridge] [--keep FOLDER] [--model FOLDER --calibration FILE]
    python -m scripts.golden compare FILE [the same options]

Every case runs in a fresh folder with a cache of its own, on one thread and offline. Recorded are its exit status, a
SHA-256 of all tensors, groups and dropped experts of every layer, and the figures of layers and steps; no name of an
option. `compare` prints what differs and then exits with 1. `record --keep` leaves the outputs in FOLDER, from which
`compare --keep` measures the largest absolute difference of weights. `record --only` leaves other cases as they are.

With --model the generic cases run on that checkpoint and text instead of the demo, keeping half of its experts.
`scripts/golden_files/demo.json` is the record on the demo; another machine or torch may round differently.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor

from compressor.data.demo import demo_checkpoint
from tests.support import gguf_models, mtp_checkpoints, quantized, small

ROOT = Path(__file__).resolve().parents[1]
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A command line, whose capitals are replaced; `make` writes its model, the demo or the given one if None."""

    name: str
    command: str
    make: Callable[[Path], object] | None = None
    generic: bool = False
    output: str = "out"


def make_quantised(model: Path) -> None:
    quantized.save_fp8(model, sizes={"vocab_size": small.VOCABULARY})
    small.tokenizer().save_pretrained(model)


def make_gguf(model: Path) -> None:
    model.rmdir()
    gguf_models.quantised(model)
    entries = {}
    for name, (shape, _, _) in gguf_models.contents(model).items():
        if name.endswith("ffn_down_exps.weight"):
            counts = torch.arange(1.0, 1 + shape[0]).roll(3).numpy()
            entries[name] = (counts[:, None].repeat(32, 1), counts)
    gguf_models.imatrix(model.with_name("imatrix.gguf"), entries)


TINY = "compress MODEL -o OUT --experts 4 --calibration TEXT --samples 16 --sequence-length 32"
SIZES = "--samples 16 --sequence-length 64"
TEXTS = f"--calibration DATA {SIZES}"
BASE = f"compress MODEL -o OUT --experts KEEP {TEXTS}"
MERGE = f"{BASE} --strategy hc-smoe"
FINE = "--dtype float32"
DISTILL = "--distill experts --set distill.steps=20 --set distill.sequence_length=256"
GGUF = "compress MODEL --imatrix imatrix.gguf --experts 5 -o OUT --strategy count-guided"
ROUTERS = "--routers router --set routers.sequences=24 --set routers.sequence_length=256"
CASES = (
    Case("drop", f"{BASE} --strategy count-guided --correct none", generic=True),
    Case("merge", f"{MERGE} --correct none", generic=True),
    Case("ridge", f"{MERGE} --correct ridge", generic=True),
    Case("tune", f"{MERGE} --correct tune {FINE}", generic=True),
    Case("split", f"{BASE} --split 2 --strategy auto --correct ridge {FINE}", generic=True),
    Case("sequential", f"{MERGE} --correct ridge --sequential {FINE}", generic=True),
    Case("routers", f"{MERGE} --correct none {ROUTERS} {FINE}", generic=True),
    Case("distill", f"{MERGE} --correct none {DISTILL} {FINE}", generic=True),
    Case("combined", f"{MERGE} --correct tune {ROUTERS} {DISTILL} {FINE}", generic=True),
    Case("protect", f"{BASE} --strategy count-guided --correct none --protect auto"),
    Case("constants-even", f"{BASE} --format mone"),
    Case("constants-uneven", f"{BASE} --format mone --budget uneven --correct ridge {FINE}"),
    Case("mtp", f"{TINY} --strategy hc-smoe --correct ridge", partial(mtp_checkpoints.make, "deepseek_v3")),
    Case("quantised", f"{TINY} --strategy count-guided --correct none", make_quantised),
    Case("onnx", f"{BASE} --strategy count-guided --correct none --format onnx"),
    Case("gguf", GGUF, make_gguf, output="out.gguf"),
)


def run(case: Case, place: Path, model: Path | None, calibration: Path | None) -> Facts:
    """Carry out a case in `place`, a new folder, and read what it left there."""
    folders = {"HOME": "home", "TMPDIR": "tmp", "MOE_COMPRESSOR_CACHE": "home/cache"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    for name, folder in folders.items():
        (place / folder).mkdir(parents=True)
        environment[name] = str(place / folder)
    source = place / ("model.gguf" if case.output.endswith(".gguf") else "model")
    if case.make is None:
        with demo_checkpoint() as demo:
            shutil.copytree(model or demo, source)
    else:
        source.mkdir()
        case.make(source)
    config = json.loads((source / "config.json").read_text()) if source.is_dir() else {}
    experts = config.get("num_local_experts", config.get("num_experts", 0))
    words = {
        "MODEL": source.name,
        "TEXT": small.text_file(place).name,
        "OUT": case.output,
        "KEEP": str(experts // 2 if model else experts * 3 // 4),
        "DATA": str(calibration) if calibration else "demo",
    }
    line = [sys.executable, "-m", "compressor", *(words.get(word, word) for word in case.command.split()), "--json"]
    done = subprocess.run(line, cwd=place, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{case.name}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return {"status": done.returncode}
    (place / "stdout.json").write_text(done.stdout)
    return {"status": 0, **facts(place)}


def facts(place: Path) -> Facts:
    """Return what a case left: the one function that knows how plans and results are laid out."""
    out = place / "out"
    if out.is_dir():
        record = json.loads((out / "compression.json").read_text())
    else:
        out = place / "out.gguf"
        record = {"plan": json.loads(gguf_models.metadata(out)["moe_compressor.plans"][-1])}
    printed = json.loads((place / "stdout.json").read_text())
    steps = {step["name"]: step for step in record["plan"]["steps"]}
    plan = (steps.get("prune") or steps["constants"])["plan"]
    found: dict[str, Any] = {name: record.get(name) for name in ("parameters", "bytes")}
    found |= {layer["module"]: layer["figures"] for layer in plan["layers"]}
    found |= {name: steps[name].get("result") for name in ("routers", "distill") if name in steps}
    found |= {"constants": plan.get("figures"), "acceptance": printed.get("acceptance")}
    figures, groups, dropped = dict[str, Any](), {}, {}
    for name, value in found.items():
        figures |= dict(_flat(name, value))
    for layer in plan["layers"]:
        groups[layer["module"]] = [group["members"] for group in layer["groups"]]
        dropped[layer["module"]] = layer["dropped"]
    return {"weights": digest(tensors(out)), "groups": groups, "dropped": dropped, "figures": figures}


def _flat(name: str, value: Any) -> Iterator[tuple[str, float | str]]:
    """Yield numbers below an entry by their path; of texts, only which of several candidates was chosen."""
    is_choice = isinstance(value, str) and name.endswith((".kept", ".chosen"))
    if isinstance(value, int | float) or is_choice:
        yield name, value
    elif isinstance(value, list | dict):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(f"{name}.{key}", entry)


def tensors(out: Path) -> dict[str, Tensor]:
    """Return all weights of an output: a folder of safetensors, an ONNX graph with its kinds of nodes, or a GGUF file."""
    found = dict[str, Tensor]()
    if out.is_file():
        for name, (shape, kind, raw) in gguf_models.contents(out).items():
            found[f"{name} {kind} {shape}"] = torch.tensor(list(raw), dtype=torch.uint8)
    found |= small.tensors_of(out)
    for file in out.glob("*.onnx"):
        graph = onnx.load(file).graph
        for entry in graph.initializer:
            found[entry.name] = torch.from_numpy(onnx.numpy_helper.to_array(entry).copy())
        nodes = " ".join(node.op_type for node in graph.node)
        found["nodes"] = torch.tensor(list(nodes.encode()), dtype=torch.uint8)
    return found


def digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of name, dtype, shape and bytes of all tensors, in the order of their names."""
    total = sha256()
    for name, value in sorted(weights.items()):
        total.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        total.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def differences(old: Facts, new: Facts, kept: Path, place: Path) -> list[str]:
    """Return what differs between two records of a case, whose outputs are in `kept`, maybe, and `place`."""
    lines = []
    if old["status"] != new["status"]:
        lines.append(f"status: {old['status']} -> {new['status']}")
    if old.get("weights") != new.get("weights"):
        lines.append("weights differ" + _distance(kept, place))
    for part in ("groups", "dropped", "figures"):
        before, after = old.get(part, {}), new.get(part, {})
        for name in {**before, **after}:
            one, two = before.get(name), after.get(name)
            if one != two:
                numbers = isinstance(one, int | float) and isinstance(two, int | float) and one
                relative = f" ({(two - one) / abs(one):+.2e})" if numbers else ""
                lines.append(f"{part} {name}: {one} -> {two}{relative}")
    return lines


def _distance(kept: Path, place: Path) -> str:
    """Return how far the weights of two outputs are apart, in words, where both are there."""
    name = "out" if (place / "out").exists() else "out.gguf"
    if not (kept / name).exists():
        return ""
    old, new = tensors(kept / name), tensors(place / name)
    shared = [key for key in old if key in new and old[key].shape == new[key].shape and old[key].numel()]
    apart = [float((old[key].double() - new[key].double()).abs().max()) for key in shared]
    others = len({**old, **new}) - len(shared)
    return f", at most by {max(apart, default=0.0):.3g}; {others} tensors are new, gone or of another shape"


def main(words: list[str] | None = None) -> int:
    """Record or compare; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", help="names of cases, separated by commas (default: all)")
    parser.add_argument("--keep", type=Path, help="folder of the recorded outputs")
    parser.add_argument("--model", type=Path, help="a checkpoint folder for the generic cases")
    parser.add_argument("--calibration", type=Path, help="with --model: a text or JSONL file")
    given = parser.parse_args(words)
    if (given.model is None) != (given.calibration is None):
        parser.error("--model and --calibration go together")
    calibration = given.calibration and given.calibration.resolve()
    known = {case.name: case for case in CASES if case.generic or given.model is None}
    recorded: dict[str, Facts] = json.loads(given.file.read_text()) if given.file.exists() else {}
    failed = False
    for name in given.only.split(",") if given.only else known:
        with tempfile.TemporaryDirectory() as scratch:
            place, kept = Path(scratch) / name, (given.keep or Path(scratch) / "kept") / name
            new = run(known[name], place, given.model, calibration)
            if given.what == "compare":
                lines = differences(recorded[name], new, kept, place) if name in recorded else ["not recorded"]
                print(f"{name}: {'differs' if lines else 'same'}", *lines, sep="\n    ", flush=True)
                failed |= bool(lines)
                continue
            print(f"{name}: status {new['status']}", flush=True)
            if given.keep:
                shutil.rmtree(kept, ignore_errors=True)
                kept.mkdir(parents=True)
                for entry in (place / "stdout.json", place / "out", place / "out.gguf"):
                    if entry.exists():
                        shutil.move(entry, kept / entry.name)
            recorded[name] = new
            lines = [f"{json.dumps(key)}: {json.dumps(recorded[key])}" for key in sorted(recorded)]
            given.file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
