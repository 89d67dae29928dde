"""The experiment `real` of scripts.benchmarks.results: what one command of a user makes of a language model, row by row.

    python -m scripts.benchmarks.results measure real/smollm2-moe --name smollm2-moe --title SmolLM2-MoE --only real \\
        --text real/text/calibration.jsonl --heldout real/text/heldout.jsonl --questions real/text/questions.jsonl \\
        --samples 64 --length 512 [--rows NAME ...] [--chats 200] [--llama PYTHON --llama-cpp CHECKOUT]

Every row is a `moe-compress compress` in a process of its own, then `evaluate` on held-out text and questions; of some
rows `report --speed`, `export` and `generate` measure decoding, and llama.cpp where a Python with llama-cpp-python and a
checkout with its converter are named. Figures are kept in `work` one by one, so a killed run goes on where it was.
"""

import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from compressor.files import work_folder, write_whole
from scripts.benchmarks import frame

NAME = "real"
QUESTIONS = (
    "What is the capital of France?",
    "Explain photosynthesis in one sentence.",
    "Write a short poem about the sea.",
)
SEQUENCES, LENGTH = 32, 256  # of the held-out text
NEW_TOKENS = 128  # of an answer
TOGETHER = 104  # answers: a step of decoding takes hardly longer for more rows
LETTERS = 160  # of an answer in a table
CLIENT = str(Path(__file__).parents[1] / "run_client.py")
WANTED = 0.9  # of the greedy tokens that int4 keeps


@dataclass(frozen=True, slots=True)
class Row:
    """A smaller model, and the words of its command after the model; braces stand for what the run was given."""

    title: str
    options: str
    share: float = 1.0
    method: str = "default"
    scheme: str = "none"
    source: str = ""  # the row that it is made of, if not the base
    chats: bool = False  # it answers all questions
    decodes: bool = False


READING = "--calibration {text} --samples {samples} --sequence-length {length}"
METHODS = {
    "default": READING,
    "--fast": f"--fast {READING}",
    "--best": "--best --calibration {text} --sequence-length {length}",
    "reap": f"--strategy reap --correct none --no-evaluate {READING}",
    "count-guided": f"--strategy count-guided --correct none --no-evaluate {READING}",
}
SHARES = {"75": (0.75, "3/4"), "50": (0.5, "1/2")}
ROWS = {
    "int4": Row("all experts, int4", "--quantize int4", scheme="int4", chats=True),
    "default-75": Row("3/4, default", f"--ratio 0.25 {READING}", 0.75, chats=True, decodes=True),
    "default-75-int4": Row("3/4, default, then int4", "--quantize int4", 0.75, scheme="int4", source="default-75"),
    "default-50": Row("1/2, default", f"--ratio 0.5 {READING}", 0.5, chats=True, decodes=True),
    "int3": Row("all experts, int3", "--quantize int3", scheme="int3"),
    "default-75-again": Row("3/4, default, another seed", f"--ratio 0.25 --seed 1 {READING}", 0.75),
}
for percent, (share, shown) in SHARES.items():
    for method, flags in METHODS.items():
        key = f"{method.strip('-')}-{percent}"
        row = Row(f"{shown}, {method}", f"--ratio {1 - share} {flags}", share, method, chats=key == "reap-50")
        ROWS.setdefault(key, row)
    ROWS[f"random-{percent}"] = Row(f"{shown}, random", "--no-evaluate", share, "random")
ROWS["budget"] = Row("best pair in {budget}", f"--bytes {{budget}} {READING}", 0, "budget")
PLOTTED = "smollm2-moe"  # which has rows of all shares
USUAL = "usual"
SLOW = ("best-75", "best-50", "budget", "default-75-again")  # that are measured only when they are named
SUMMARY = ("int4", "default-75", "fast-75", "default-50", "reap-50")
ANSWERED = ("default-75", "default-50", "reap-75")
COLUMNS = ("model", "MB", "loss", "KL", "same token", "loops", "missed ends", "stock passes", "seconds", "peak GB")


def once(file: Path, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a file holds, which is measured first where an earlier run didn't come so far."""
    if not file.exists():
        write_whole(file, json.dumps(measured(), indent=1))
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True, slots=True)
class Bench:
    """What the script was given, and the folder of its work."""

    given: Any
    folder: Path

    def run(self, *words: str) -> frame.Child:
        """Run a command of moe-compress, whose cache is in the folder."""
        return frame.run_child([*frame.COMMAND, *words], {"MOE_COMPRESSOR_CACHE": str(self.folder / "cache")})

    def shown(self, words: Sequence[str]) -> str:
        """Return a command without the parents of its files."""
        names = [Path(word).name if "/" in word else word for word in words]
        return " ".join(["moe-compress", *names])

    def forward(self) -> dict[str, Any]:
        """Time a stock forward pass of the calibration text in another process."""
        sizes = str(self.given.samples), str(self.given.length)
        command = [sys.executable, "-m", "scripts.benchmarks.real", self.given.model, self.given.text, *sizes]
        measured: dict[str, Any] = json.loads(frame.run_child(command).output.splitlines()[-1])
        return measured

    def compress(self, name: str) -> dict[str, Any]:
        """Make a row's model anew."""
        row, output = ROWS[name], self.folder / name
        source = self.folder / row.source if row.source else self.given.model
        if row.method == "random":
            source = self.random_recipe(name, row.share)
        for begun in (output, work_folder(output)):
            shutil.rmtree(begun, ignore_errors=True)
        words = ["compress", str(source), "-o", str(output), *row.options.format(**vars(self.given)).split()]
        child = self.run(*words)
        files = sum(file.stat().st_size for file in output.glob("*.safetensors"))
        took = {"seconds": round(child.seconds, 1), "cpu": round(child.cpu, 1), "memory": child.anonymous}
        return {"command": self.shown(words), "bytes": files, **took}

    def random_recipe(self, name: str, share: float) -> Path:
        """Write a recipe that keeps experts drawn at random."""
        import yaml

        from compressor.checkpoint.source import locate
        from compressor.model.opened import open_model

        model = open_model(locate(self.given.model), "auto", "cpu")
        draw, order = random.Random(0), dict[str, str]()
        for layer in model.architecture.layers:
            kept = draw.sample(range(layer.experts), round(layer.experts * share))
            order[str(layer.index)] = " ".join(map(str, kept))
        prune = {"strategy": "listed", "split": 1, "experts": len(kept), "options": {"order": order}}
        recipe = self.folder / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump({"model": self.given.model, "steps": [{"prune": prune}]}))
        return recipe

    def behaviour(self, name: str) -> dict[str, Any]:
        """Compare a row's model with the base on held-out text, three questions and, of some rows, many."""
        row, output = ROWS[name], self.folder / f"{name}-behaviour"
        shutil.rmtree(output, ignore_errors=True)
        few = self.folder / "three.jsonl"
        lines = [json.dumps({"messages": [{"role": "user", "content": question}]}) for question in QUESTIONS]
        few.write_text("\n".join(lines), encoding="utf-8")
        chats = ["--prompts", f"{self.given.questions}=chats"] if row.chats else []
        text = ["--text", self.given.heldout, "--text-samples", str(SEQUENCES), "--text-length", str(LENGTH)]
        words = ["evaluate", self.given.model, str(self.folder / name), *text, "--prompts", f"{few}=three", *chats]
        words += ["--limit", str(self.given.chats), "--max-new-tokens", str(NEW_TOKENS)]
        words += ["--batch-size", str(TOGETHER), "-o", str(output)]
        child = self.run(*words)
        content = json.loads((output / "behaviour.json").read_text(encoding="utf-8"))
        (text_figures,) = content["text"]["domains"]
        figures: dict[str, Any] = {"evaluation": self.shown(words), "evaluation_seconds": round(child.seconds, 1)}
        for measure in ("loss", "kl", "flips"):
            figures[measure] = [text_figures[measure]["change"], text_figures[measure]["standard_error"]]
        figures["base"] = {"loss": text_figures["loss"]["base"]}
        for rate in content["written"]["rates"]:
            if rate["domain"] == "chats" and rate["measure"] in ("loops", "missed ends"):
                figures["chats"] = rate["answers"]
                figures[rate["measure"]] = rate["smaller"]
                figures["base"][rate["measure"]] = rate["base"]
        answers = {"base": dict[str, str](), "smaller": dict[str, str]()}
        for line in (output / "answers.jsonl").read_text(encoding="utf-8").splitlines():
            pair = json.loads(line)
            for side, texts in answers.items():
                texts[pair["prompt"]["messages"][-1]["content"]] = pair[side]["text"]
        figures["answers"] = [answers["smaller"][question] for question in QUESTIONS]
        figures["base"]["answers"] = [answers["base"][question] for question in QUESTIONS]
        return figures

    def decoding(self, name: str) -> dict[str, Any]:
        """Return tokens per second: of a row by stock transformers beside the base, and by what reads exports."""
        model, rates = self.given.model, dict[str, Any]()
        if name != "base":
            page, output = str(self.folder / f"{name}.html"), str(self.folder / name)
            measured = ["--model", model, "--calibration", self.given.text, "--samples", "1", "--json", "--overwrite"]
            content = json.loads(self.run("report", output, "-o", page, "--speed", *measured).output)
            rates["transformers, base"], rates["transformers"] = (1 / each for each in content["speed"]["decode"])
            model = output
        graph = self.folder / f"{name}-onnx"
        self.run("export", model, "-o", str(graph), "--format", "onnx", "--overwrite")
        answer = self.run("generate", str(graph), QUESTIONS[-1], "--chat", "--max-new-tokens", "64", "--json")
        rates["ONNX Runtime"] = json.loads(answer.output)["tokens_per_second"]
        shutil.rmtree(graph)
        if self.given.llama:
            file = self.folder / f"{name}.gguf"
            client = [self.given.llama, CLIENT]
            frame.run_child([*client, "convert", self.given.llama_cpp, model, str(file)])
            rates["llama.cpp"] = float(frame.run_child([*client, "speed", str(file)]).output.splitlines()[-1])
            file.unlink()
        return rates


def measure(given: Any, folder: Path) -> dict[str, Any]:
    """Measure the rows that were asked for, and return all that are in the folder by now."""
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(given, folder)
    forward = once(folder / "forward.json", bench.forward)
    print(f"a stock forward pass: {forward}", flush=True)
    rows = list[dict[str, Any]]()
    asked = [name for name in ROWS if name not in SLOW] if given.rows == [USUAL] else given.rows
    for name, row in ROWS.items():
        files = [folder / f"{name}.{part}.json" for part in ("made", "behaviour", "decoding")]
        if name not in asked and not files[1].exists():
            continue
        content = once(files[0], lambda name=name: {**bench.compress(name), "forward": forward["cpu"]})
        content |= once(files[1], lambda name=name: bench.behaviour(name))
        if row.decodes:
            content["decoding"] = once(files[2], lambda name=name: bench.decoding(name))
        place = {"share": row.share, "method": row.method, "scheme": row.scheme}
        rows.append({"name": name, "title": row.title.format(**vars(given)), **place, **content})
        print(frame.row(*cells(rows[-1])), flush=True)
    base = dict[str, Any]()
    for content in rows:
        base |= content.pop("base")
    base["bytes"] = sum(file.stat().st_size for file in Path(given.model).glob("*.safetensors"))
    if any(content.get("decoding") for content in rows):
        base["decoding"] = once(folder / "base.decoding.json", lambda: bench.decoding("base"))
    experiment = {"date": date.today().isoformat(), "forward": forward, "base": base, "rows": rows}
    print(rows_table(experiment, [*ROWS]), verdict(experiment), sep="\n\n")
    return experiment


def stock_forward(model: str, text: str, samples: int, length: int) -> dict[str, float]:
    """Time stock transformers on the tokens that `compress` reads, after a batch that warms it up."""
    import torch
    from transformers import AutoModelForCausalLM

    from compressor.data.batches import calibrate
    from compressor.data.sources import parse_sources
    from compressor.model.tokenizer import load_tokenizer

    stock = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    sizes = {"samples": samples, "length": length, "seed": 0, "vocab": stock.config.vocab_size}
    batches = calibrate(parse_sources([text]), load_tokenizer(Path(model)), **sizes).batches
    with torch.inference_mode():
        stock(batches[0], use_cache=False)
        seconds, cpu = time.perf_counter(), time.process_time()
        for batch in batches:
            stock(batch, use_cache=False)
        seconds, cpu = time.perf_counter() - seconds, time.process_time() - cpu
    tokens = sum(batch.numel() for batch in batches)
    return {"tokens": tokens, "seconds": seconds, "cpu": cpu}


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row's figures in the order of `COLUMNS`, with intervals of 95%."""
    loss, kl, flips = ((mean, 1.96 * error) for mean, error in (row["loss"], row["kl"], row["flips"]))
    shares = [f"{row[name]:.1%}" if name in row else "" for name in ("loops", "missed ends")]
    same = f"{1 - flips[0]:.1%} ± {flips[1]:.1%}"
    read = [f"{loss[0]:+.3f} ± {loss[1]:.3f}", f"{kl[0]:.3f} ± {kl[1]:.3f}", same]
    took = [f"{row['cpu'] / row['forward']:.1f}", f"{row['seconds']:.0f}", f"{row['memory'] / 1e9:.2f}"]
    return [row["title"], f"{row['bytes'] / 1e6:.1f}", *read, *shares, *took]


def rows_table(experiment: Mapping[str, Any], names: Sequence[str], left_out: Sequence[str] = ()) -> str:
    """Return a row for the base and for each of these models that was measured, the largest first."""
    base = experiment["base"]
    shares = [f"{base[name]:.1%}" if name in base else "" for name in ("loops", "missed ends")]
    lines = [["base", f"{base['bytes'] / 1e6:.1f}", f"{base['loss']:.3f}", "", "", *shares, "", "", ""]]
    rows = [row for row in experiment["rows"] if row["name"] in names]
    for row in sorted(rows, key=lambda row: -row["bytes"]):
        lines.append(cells(row))
    columns = [column for column in COLUMNS if column not in left_out]
    places = [COLUMNS.index(column) for column in columns]
    return frame.table(columns, [[line[place] for place in places] for line in lines])


def verdict(experiment: Mapping[str, Any]) -> str:
    """Say if the default at 3/4 keeps enough of the greedy tokens that int4 keeps, and else what to do."""
    rows = {row["name"]: row for row in experiment["rows"]}
    if not {"default-75", "int4"} <= rows.keys():
        return ""
    kept, quantised = (1 - rows[name]["flips"][0] for name in ("default-75", "int4"))
    enough = kept >= WANTED * quantised
    text = (
        f"With 3/4 of the experts the default keeps the base's greedy token at {kept:.1%} of positions, int4 with all"
        f" experts at {quantised:.1%}: {kept / quantised:.1%} of it, {'at least' if enough else 'less than'} the"
        f" {WANTED:.0%} we ask for."
    )
    if not enough:
        text += " So quantise this model first, and prune it only where int4 is still too large."
    return text


def brief(answer: str) -> str:
    """Return an answer in one line of a table."""
    line = " ".join(answer.split()).replace("|", "\\|").replace("<", "&lt;")
    return line if len(line) <= LETTERS else f"{line[:LETTERS].rsplit(' ', 1)[0]} …"


def answers_table(experiment: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the base's answers to three questions beside those of these models."""
    rows = {row["name"]: row for row in experiment["rows"]}
    shown = [rows[name] for name in names if name in rows]
    lines = []
    for number, question in enumerate(QUESTIONS):
        answers = [model["answers"][number] for model in (experiment["base"], *shown)]
        lines.append([question, *map(brief, answers)])
    return frame.table(["question", "base", *(row["title"] for row in shown)], lines)


def decoding_table(experiment: Mapping[str, Any]) -> str:
    """Return tokens per second of the base and of the rows that were timed."""
    timed = [row for row in experiment["rows"] if "decoding" in row]
    base = dict(experiment["base"].get("decoding", {}))
    for row in timed:
        base["transformers"] = row["decoding"]["transformers, base"]
    clients = list(base)
    lines = []
    for title, rates in [("base", base), *((row["title"], row["decoding"]) for row in timed)]:
        lines.append([title, *(f"{rates[client]:.1f}" if rates.get(client) else "" for client in clients)])
    return frame.table(["tokens per second", *clients], lines)


def sections(name: str, experiment: Mapping[str, Any]) -> dict[str, str]:
    """Return the parts of the pages by the words in their markers."""
    forward, rows = experiment["forward"], experiment["rows"]
    commands = [frame.wrapped(row["command"]) for row in rows]
    block = "\n".join([*commands, frame.wrapped(rows[0]["evaluation"])])
    chats = max(row.get("chats", 0) for row in rows)
    passes = sorted({round(row["forward"]) for row in rows})
    measured = (
        f"Measured on {experiment['date']}. A stock pass is one of {forward['tokens']:,} tokens of the calibration"
        f" text, {' to '.join(map(str, sorted({passes[0], passes[-1]})))} seconds of the processor."
    )
    if any(row["method"] == "random" for row in rows):
        measured += " The recipes random-75 and random-50 list experts drawn at random."
    if chats:
        measured += f" Loops and missed ends are of {chats} chats."
    summary = rows_table(experiment, SUMMARY, ("KL", "seconds", "peak GB"))
    whole = rows_table(experiment, [row["name"] for row in rows])
    return {
        f"{name}, summary": f"{summary}\n\n{answers_table(experiment, ['default-75'])}",
        f"{name}, rows": f"{whole}\n\n{verdict(experiment)}\n\n```bash\n{block}\n```\n\n{measured}",
        f"{name}, answers": answers_table(experiment, ANSWERED),
        f"{name}, decoding": decoding_table(experiment),
    }


def curves(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows as those of `sizes` and `strategies` are, for the plot."""
    rows = [{**row, "increase": row["loss"][0]} for row in experiment["rows"]]
    ours = [row for row in rows if row["method"] == "default"]
    ours.append({"share": 1, "scheme": "none", "bytes": experiment["base"]["bytes"], "increase": 0.0})
    others = [{**row, "name": row["method"]} for row in rows if row["method"] != "default"]
    return {"sizes": {"rows": ours}, "strategies": {"rows": others}}


if __name__ == "__main__":
    path, words, samples_given, length_given = sys.argv[1:]
    print(json.dumps(stock_forward(path, words, int(samples_given), int(length_given))))
