"""Measure what moe-compress takes over the least that its work asks for: stock passes, loads and copies.

    python -m scripts.benchmarks.ratios [--repeats 3] [--only reap ridge] [--before CHECKOUT] [--megabytes 1024]

Prints medians of ratios with their range, of processor seconds of whole processes and of wall seconds: of this build and,
with `--before`, of another checkout's, whose runs take turns with this one's. A small OLMoE of random weights is pruned
on 64 sequences of 256 tokens by one thread; a larger checkpoint is rounded; the gate compares the small one with its copy,
and lm-eval measures it once.
"""

import json
import random
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from scripts.benchmarks import frame

OLMOE = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 8, "num_experts": 16,
    "num_experts_per_tok": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
WIDE = {
    "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512, "num_experts": 16,
    "num_experts_per_tok": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
WIDE_LAYER = 54  # megabytes
STOCK = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    for _ in range(int(sys.argv[2])):
        for batch in torch.arange(64 * 256).remainder(256).view(8, 8, 256):
            model(batch)
"""
COPY = """
import os, shutil, sys
for number, file in enumerate(sys.argv[2:]):
    with open(file, "rb") as source, open(f"{sys.argv[1]}-{number}", "wb") as sink:
        shutil.copyfileobj(source, sink, 2**24)
        sink.flush()
        os.fsync(sink.fileno())
"""
TASK = {
    "dataset_path": "json", "test_split": "test", "fewshot_split": "test", "doc_to_text": "{{question}}",
    "metadata": {"version": 1.0},
}  # fmt: skip
TASKS: Mapping[str, Mapping[str, Any]] = {
    "scored": {
        "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "written": {
        "output_type": "generate_until", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 64, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}  # fmt: skip
ITEMS = 100
ASKED = {
    "scored": "--tasks scored",
    "chats": "--tasks scored --num_fewshot 3 --apply_chat_template",
    "written": "--tasks written",
}  # in lm-eval's words
LM_EVAL = "--model hf --model_args pretrained=OLMOE --include_path TASKS --device cpu --batch_size 8"
GATE = "gate OLMOE COPY --include-path TASKS --batch-size 8 --max-drop 0.1 --device cpu"
TEXT = "--calibration TEXT --samples 64 --sequence-length 256"
DROP = f"compress OLMOE -o OUT --experts 12 {TEXT} --strategy reap"
DEMO_DROP = "compress DEMO -o OUT --experts 12 --calibration demo --strategy reap --correct none --no-evaluate"
PLAIN = "--no-evaluate --output.golden-answers false"
COMMANDS = {
    "demo drop": f"{DEMO_DROP} --output.golden-answers false",
    "demo drop, golden": DEMO_DROP,
    "drop": f"{DROP} --correct none {PLAIN}",
    "drop, evaluated": f"{DROP} --correct none --output.golden-answers false",
    "ridge": f"{DROP} --correct ridge {PLAIN}",
    "tune": f"{DROP} --correct tune {PLAIN}",
    "int4": f"compress WIDE -o OUT --quantize int4 {PLAIN}",
    "int4, a layer": f"compress NARROW -o OUT --quantize int4 {PLAIN}",
    "int4 small": f"compress OLMOE -o OUT --quantize int4 {PLAIN}",
    "GPTQ": f"compress OLMOE -o OUT --quantize int4 --quantize.method gptq {TEXT} {PLAIN}",
    "weights alone": f"compress OLMOE -o OUT --experts 12 --strategy aimer --correct none {PLAIN}",
    "wrong": "compress OLMOE -o OUT --experts 12 --strategy raep",
    **{f"gate, {kind}": f"{GATE} {words.replace('_', '-')}" for kind, words in ASKED.items()},
}


@dataclass(frozen=True)
class Ratio:
    """What commands take beyond others, over what others take beyond others; "" takes nothing."""

    title: str
    goal: float
    more: str
    less: str
    over: str = ""  # over seconds
    under: str = ""

    def of(self, took: Mapping[str, float]) -> float:
        """Return the ratio by the seconds of one repetition."""
        taken = {"": 0.0, **took}
        return (taken[self.more] - taken[self.less]) / (taken[self.over] - taken[self.under] if self.over else 1)


FORWARD = "forward", "load"
RATIOS = {
    "golden": Ratio(
        "golden answers, over a plain drop of the demo", 0.1, "demo drop, golden", "demo drop", "demo drop"
    ),
    "reap": Ratio("drop by reap, evaluated, over load and forward", 1.35, "drop, evaluated", "", "forward"),
    "ridge": Ratio("ridge: forward passes beyond the drop", 8, "ridge", "drop", *FORWARD),
    "tune": Ratio("tune, the default: forward passes beyond the drop", 25, "tune", "drop", *FORWARD),
    "round": Ratio(
        "int4: copies, of all layers but one (wall counts)", 1.5, "int4", "int4, a layer", "copy", "copy, a layer"
    ),
    "gptq": Ratio("GPTQ: forward passes beyond rounding", 3, "GPTQ", "int4 small", *FORWARD),
    "startup": Ratio("a wrong strategy, seconds", 0.6, "wrong", ""),
    **{
        f"gate-{kind}": Ratio(
            f"gate on {kind}, two models, over lm-eval on one", 2, f"gate, {kind}", "", f"lm-eval, {kind}"
        )
        for kind in ASKED
    },
    "small": Ratio("a drop by weights alone, over a stock load", 1.25, "weights alone", "", "load"),
}


def make_models(folder: Path, megabytes: int) -> dict[str, str]:
    """Write the models and the text, and return what stands for them in commands."""
    import torch
    from transformers import OlmoeConfig, OlmoeForCausalLM

    from tests.support import small

    torch.manual_seed(0)
    OlmoeForCausalLM(OlmoeConfig(**OLMOE)).to(torch.bfloat16).save_pretrained(folder / "olmoe")
    small.tokenizer(small.CHAT).save_pretrained(folder / "olmoe")
    shutil.copytree(folder / "olmoe", folder / "copy")
    write_tasks(folder / "tasks")
    for name, layers in (("narrow", 1), ("wide", max(2, round(megabytes / WIDE_LAYER)))):
        (folder / name).mkdir()
        frame.write_layers(folder / name, layers, **WIDE)
    (folder / "text.txt").write_text(frame.random_text(100_000))
    demo = Path(__file__).parents[2] / "compressor" / "demo" / "checkpoint"
    names = {name.upper(): folder / name for name in ("olmoe", "copy", "tasks", "wide", "narrow", "out")}
    return {name: str(path) for name, path in (names | {"TEXT": folder / "text.txt", "DEMO": demo}).items()}


def write_tasks(folder: Path) -> None:
    """Write tasks of lm-eval and their items of random words."""
    folder.mkdir()
    draw, words, items = random.Random(0), frame.random_text(10_000).split(), list[dict[str, Any]]()
    for _ in range(ITEMS):
        choices = [" ".join(draw.choices(words, k=3)) for _ in range(4)]
        question = " ".join(draw.choices(words, k=draw.randint(5, 30)))
        items.append({"question": question, "choices": choices, "answer": draw.randrange(4)})
    (folder / "items.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
    for name, task in TASKS.items():
        content = {
            "task": name,
            **TASK,
            **task,
            "dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}},
        }
        (folder / f"{name}.yaml").write_text(json.dumps(content))


def run(name: str, places: Mapping[str, str], checkout: str) -> frame.Child:
    """Run a command once; of moe-compress, in a checkout."""
    out = Path(places["OUT"])
    shutil.rmtree(out, ignore_errors=True)
    stock = {"load": (places["OLMOE"], "0"), "forward": (places["OLMOE"], "1")}
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": checkout, "MOE_COMPRESSOR_CACHE": str(out.parent / "cache")}
    python = frame.COMMAND[0]
    if name in stock:
        return frame.run_child([python, "-c", STOCK, *stock[name]], environment)
    if name.startswith("copy"):
        source = Path(places["WIDE" if name == "copy" else "NARROW"])
        files = sorted(map(str, source.glob("*.safetensors")))
        return frame.run_child([python, "-c", COPY, str(out.parent / "copied"), *files], environment)
    if name.startswith("lm-eval"):
        words = f"run {LM_EVAL} {ASKED[name.partition(', ')[2]]}".replace("OLMOE", places["OLMOE"]).split()
        command = [python, "-m", "lm_eval", *(places.get(word, word) for word in words)]
        return frame.run_child(command, {**environment, "HF_HUB_OFFLINE": "1", "HF_HOME": str(out.parent / "hub")})
    words = [places.get(word, word) for word in COMMANDS[name].split()]
    statuses = (2,) if name == "wrong" else (0, 3)  # a gate on random weights that guess is inconclusive
    return frame.run_child([*frame.COMMAND, *words], environment, statuses)


def main() -> None:
    """Measure, and print the table."""
    parser = frame.options(__doc__, repeats=3, only=[*RATIOS], before=None, megabytes=1024)
    given = parser.parse_args()
    here = str(Path(__file__).parents[2])
    builds = {"this build": here, **({"before": given.before} if given.before else {})}
    took: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        places = make_models(Path(folder), given.megabytes)
        asked = [RATIOS[name] for name in given.only]
        names = sorted({name for each in asked for name in (each.more, each.less, each.over, each.under)} - {""})
        for _ in range(given.repeats):
            for build, checkout in builds.items():
                runs = {name: run(name, places, checkout) for name in names}
                took.setdefault((build, "processor"), []).append({name: child.cpu for name, child in runs.items()})
                took.setdefault((build, "wall"), []).append({name: child.seconds for name, child in runs.items()})
    columns = ["ratio", "goal", *(f"{build}, {kind}" for build, kind in took)]
    rows = []
    for each in asked:
        cells = list[Any]()
        for repetitions in took.values():
            values = sorted(map(each.of, repetitions))
            cells.append(f"{median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})")
        rows.append([each.title, f"{each.goal:g}", *cells])
    print(frame.table(columns, rows))


if __name__ == "__main__":
    frame.run(main)
