"""Record what command lines write, as a file of digests and figures, and compare a later version of the code with it.

    python -m scripts.golden record FILE [--only drop,ridge] [--keep FOLDER] [--model FOLDER --calibration FILE]
    python -m scripts.golden compare FILE [the same options]

Every case runs in a fresh folder with a cache of its own, on one thread and offline. Recorded are its exit status, a
SHA-256 of all tensors, the members of every layer's groups, the experts that are gone, and the figures of layers and
steps; nothing of it names an option, so that a record outlives their names. `compare` prints what differs and then
exits with 1. `record --keep` leaves the outputs in FOLDER; `compare --keep` finds them there and measures the largest
absolute difference of weights that differ. `record --only` leaves the other cases of FILE as they are.

With --model the cases marked as generic run on that checkpoint and text instead of the embedded demo, keeping half of
its experts. `scripts/golden_files/demo.json` is the record on the demo. The same code on another machine, or with
another torch, may round differently: record there first.
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
from safetensors.torch import load_file
from torch import Tensor

from compressor.data.demo import demo_checkpoint
from tests.support import gguf_models, mtp_checkpoints, quantized, small

ROOT = Path(__file__).resolve().parents[1]
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """Command lines, run one after the other; `make` writes their model, which is the demo or the given one if None.

    Of the words, MODEL, TEXT (a small text file) and DATA (the calibration source) are replaced, KEEP by the
    number of experts to keep, and OUT by `output`.
    """

    name: str
    commands: tuple[str, ...]
    make: Callable[[Path], object] | None = None
    generic: bool = False
    output: str = "out"


def make_quantised(model: Path) -> None:
    quantized.save_fp8(model, sizes={"vocab_size": small.VOCABULARY})
    small.tokenizer().save_pretrained(model)


def make_gguf(model: Path) -> None:
    model.rmdir()
    gguf_models.quantised(model)
    ramp = {name: torch.arange(1.0, 1 + shape[0]).roll(3).numpy() for name, (shape, _, _)
            in gguf_models.contents(model).items() if name.endswith("ffn_down_exps.weight")}  # fmt: skip
    entries = {name: (counts[:, None].repeat(32, 1), counts) for name, counts in ramp.items()}
    gguf_models.imatrix(model.with_name("imatrix.gguf"), entries)


TINY = "compress MODEL -o OUT --experts 4 --calibration TEXT --samples 16 --sequence-length 32"
SIZES = "--samples 16 --sequence-length 64"
TEXTS = f"--calibration DATA {SIZES}"
BASE = f"compress MODEL -o OUT --experts KEEP {TEXTS}"
MERGE = f"{BASE} --strategy hc-smoe"
FINE = "--dtype float32"
DISTILL = "--distill experts --set distill.steps=20 --set distill.sequence_length=256"
ROUTERS = "--routers router --set routers.sequences=24 --set routers.sequence_length=256"
CASES = (
    Case("drop", (f"{BASE} --strategy count-guided --correct none",), generic=True),
    Case("merge", (f"{MERGE} --correct none",), generic=True),
    Case("ridge", (f"{MERGE} --correct ridge",), generic=True),
    Case("tune", (f"{MERGE} --correct tune {FINE}",), generic=True),
    Case("split", (f"compress MODEL -o OUT --experts KEEP --split 2 --strategy auto --correct ridge {FINE} {TEXTS}",),
         generic=True),
    Case("sequential", (f"{MERGE} --correct ridge --sequential {FINE}",), generic=True),
    Case("routers", (f"{MERGE} --correct none {ROUTERS} {FINE}",), generic=True),
    Case("distill", (f"{MERGE} --correct none {DISTILL} {FINE}",), generic=True),
    Case("combined", (f"{MERGE} --correct tune {ROUTERS} {DISTILL} {FINE}",), generic=True),
    Case("protect", (f"{BASE} --strategy count-guided --correct none --protect auto",)),
    Case("constants-even", (f"{BASE} --format mone",)),
    Case("constants-uneven", (f"{BASE} --format mone --budget uneven --correct ridge {FINE}",)),
    Case("mtp", (f"{TINY} --strategy hc-smoe --correct ridge",),
         partial(mtp_checkpoints.make, "deepseek_v3")),
    Case("quantised", (f"{TINY} --strategy count-guided --correct none",), make_quantised),
    Case("onnx", (f"{BASE} --strategy count-guided --correct none --format onnx",)),
    Case("gguf", ("compress MODEL --imatrix imatrix.gguf --experts 5 -o OUT --strategy count-guided",), make_gguf,
         output="out.gguf"),
)  # fmt: skip


def run(case: Case, place: Path, model: Path | None, calibration: Path | None) -> Facts:
    """Carry out a case in `place`, a new folder, and read what it left there."""
    for name in ("home", "tmp"):
        (place / name).mkdir(parents=True)
    own = {"HOME": "home", "TMPDIR": "tmp", "MOE_COMPRESSOR_CACHE": "home/cache"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT),
                   **{name: str(place / folder) for name, folder in own.items()}}  # fmt: skip
    source = place / ("model.gguf" if case.output.endswith(".gguf") else "model")
    with demo_checkpoint() as demo:
        if case.make is None:
            shutil.copytree(model or demo, source)
        else:
            source.mkdir()
            case.make(source)
    config = json.loads((source / "config.json").read_text()) if source.is_dir() else {}
    experts = next(
        (config[name] for name in ("num_local_experts", "num_experts") if name in config), 0
    )
    keep = experts // 2 if model else experts * 3 // 4
    words = {"MODEL": source.name, "TEXT": small.text_file(place).name, "OUT": case.output, "KEEP": str(keep),
             "DATA": str(calibration) if calibration else "demo"}  # fmt: skip
    status = 0
    for command in case.commands:
        given = [words.get(word, word) for word in command.split()]
        with (place / "stdout.json").open("wb") as out, (place / "errors").open("wb") as errors:
            line = [sys.executable, "-m", "compressor", *given, "--json"]
            status = (
                status
                or subprocess.run(
                    line, cwd=place, env=environment, stdout=out, stderr=errors
                ).returncode
            )
        if status:
            print(
                f"{case.name}: {(place / 'errors').read_text().strip().splitlines()[-1:]}",
                file=sys.stderr,
            )
            return {"status": status}
    return {"status": status, **facts(place)}


def facts(place: Path) -> Facts:
    """What a case left: the one function that knows how plans and results are laid out."""
    out, figures = place / "out", dict[str, Any]()
    if out.is_dir():
        record = json.loads((out / "compression.json").read_text())
    else:
        out = place / "out.gguf"
        record = {"plan": json.loads(gguf_models.metadata(out)["moe_compressor.plans"][-1])}
    steps, printed = record["plan"]["steps"], json.loads((place / "stdout.json").read_text())
    of = {step["name"]: step for step in steps}
    decided = (of.get("prune") or of["constants"])["plan"]
    found: dict[str, Any] = {name: record.get(name) for name in ("parameters", "bytes")}
    found |= {layer["module"]: layer["figures"] for layer in decided["layers"]}
    found |= {name: of[name].get("result") for name in ("routers", "distill") if name in of}
    found |= {"constants": decided.get("figures"), "acceptance": printed.get("acceptance")}
    for name, value in found.items():
        figures |= dict(_flat(name, value))
    return {
        "weights": digest(tensors(out)),
        "groups": {
            layer["module"]: [group["members"] for group in layer["groups"]]
            for layer in decided["layers"]
        },
        "dropped": {layer["module"]: layer["dropped"] for layer in decided["layers"]},
        "figures": figures,
    }


def _flat(name: str, value: Any) -> Iterator[tuple[str, float | str]]:
    """Numbers below an entry by their path; of texts, only which of several candidates was chosen."""
    if isinstance(value, int | float) or (
        isinstance(value, str) and name.endswith((".kept", ".chosen"))
    ):
        yield name, value
    elif isinstance(value, list | dict):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(f"{name}.{key}", entry)


def tensors(out: Path) -> dict[str, Tensor]:
    """All weights of an output: a folder of safetensors, an ONNX graph with its kinds of nodes, or a GGUF file."""
    if out.is_file():
        contents = gguf_models.contents(out).items()
        return {f"{name} {kind} {shape}": torch.tensor(list(raw), dtype=torch.uint8)
                for name, (shape, kind, raw) in contents}  # fmt: skip
    found = {
        name: value
        for file in sorted(out.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }
    for file in out.glob("*.onnx"):
        graph = onnx.load(file).graph
        nodes = " ".join(node.op_type for node in graph.node)
        found |= {
            each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy())
            for each in graph.initializer
        }
        found["nodes"] = torch.tensor(list(nodes.encode()), dtype=torch.uint8)
    return found


def digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of name, dtype, shape and bytes of all tensors, in the order of their names."""
    made = sha256()
    for name, value in sorted(weights.items()):
        made.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        made.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    return made.hexdigest()


def differences(old: Facts, new: Facts, kept: Path, place: Path) -> list[str]:
    """What differs between two records of a case, whose outputs are in `kept`, maybe, and `place`."""
    lines = (
        [] if old["status"] == new["status"] else [f"status: {old['status']} -> {new['status']}"]
    )
    if old.get("weights") != new.get("weights"):
        lines.append("weights differ" + _distance(kept, place))
    for part in ("groups", "dropped", "figures"):
        before, after = old.get(part, {}), new.get(part, {})
        for name in [*before, *(name for name in after if name not in before)]:
            one, two = before.get(name), after.get(name)
            if one != two:
                numbers = isinstance(one, int | float) and isinstance(two, int | float) and one
                relative = f" ({(two - one) / abs(one):+.2e})" if numbers else ""
                lines.append(f"{part} {name}: {one} -> {two}{relative}")
    return lines


def _distance(kept: Path, place: Path) -> str:
    """How far the weights of two outputs are apart, in words, where both are there."""
    pairs = [(kept / name, place / name) for name in ("out", "out.gguf")]
    old, new = next(
        ((tensors(a), tensors(b)) for a, b in pairs if a.exists() and b.exists()), ({}, {})
    )
    if not old:
        return ""
    odd = [
        name
        for name in {**old, **new}
        if name not in old or name not in new or old[name].shape != new[name].shape
    ]
    apart = {name: float((old[name].double() - new[name].double()).abs().max()) for name in old
             if name not in odd and old[name].numel() and old[name].dtype == new[name].dtype}  # fmt: skip
    most = max(apart, key=lambda name: apart[name], default="")
    far = (
        f", at most by {apart[most]:.3g} ({most}), in {sum(map(bool, apart.values()))} tensors"
        if most
        else ""
    )
    return far + (
        f"; {len(odd)} tensors are new, gone or of another shape, such as {min(odd)}" if odd else ""
    )


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
    names = given.only.split(",") if given.only else list(known)
    if unknown := sorted({*names} - {*known}):
        parser.error(f"there is no case {unknown[0]}; known are {', '.join(known)}")
    recorded: dict[str, Facts] = json.loads(given.file.read_text()) if given.file.exists() else {}
    failed = False
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            place, kept = Path(scratch) / name, (given.keep or Path(scratch) / "kept") / name
            new = run(known[name], place, given.model, calibration)
            if given.what == "compare":
                lines = (
                    differences(recorded[name], new, kept, place)
                    if name in recorded
                    else ["not recorded"]
                )
                print(
                    f"{name}: differs" if lines else f"{name}: same",
                    *lines,
                    sep="\n    ",
                    flush=True,
                )
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
            given.file.parent.mkdir(parents=True, exist_ok=True)
            lines = [
                f"{json.dumps(name)}: {json.dumps(recorded[name])}" for name in sorted(recorded)
            ]
            given.file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
