"""CoMoE on the demo's five skills: single-task and multi-task, with and without the contrastive loss, and plain LoRA.

python -m scripts.benchmarks.comoe                     # five seeds, some minutes on one core
python -m scripts.benchmarks.comoe--output FOLDER      # with reports and pictures of the multi-task runs
python -m scripts.benchmarks.comoe--together --contrastive 0.1

A tiny dense Llama that half knows the skills is tuned on fresh questions of each, and asked the demo's held-out items.
"""

import copy
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t
from transformers import LlamaConfig, LlamaForCausalLM

from compressor.answers.items import Item
from compressor.comoe.evaluating import ComoeEvaluation, TaskResult, ask
from compressor.comoe.layer import comoe_layers
from compressor.comoe.options import ComoeConfig, TuningOptions
from compressor.comoe.report import write_evaluation
from compressor.comoe.training import train
from compressor.data.demo import load_items
from scripts.benchmarks.frame import head, options, row
from scripts.demo_skills import SKILLS, problems
from scripts.train_demo_model import END, build_tokenizer, token_batches

EXPERTS = ComoeConfig(rank=16, experts=4, top_k=2)
ARMS = {  # what is put in, and the share of --contrastive that counts
    "LoRA": (ComoeConfig(rank=64, experts=1, top_k=1), 0.0),
    "without": (EXPERTS, 0.0),
    "with": (EXPERTS, 1.0),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One tuned model."""

    arm: str
    seed: int
    trained_on: str  # a skill, or "all"
    results: tuple[TaskResult, ...]
    contrastive: float  # at the end of training
    gap: float


def build_base(steps: int, seed: int = 0) -> tuple[Any, Any]:
    """A dense Llama of two layers, trained on the skills' text for so few steps that much is left to learn."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=257, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=256,
        eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05)
    batches = token_batches(tokenizer, random.Random(seed))
    for step in range(steps):
        tokens, weights = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 50) * (1 - step / steps)
        logits = model(tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        scale = weights[:, 1:].flatten()
        ((loss * scale).sum() / scale.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


def training_items(skill: str, count: int, seed: int) -> list[Item]:
    """Fresh questions of a skill, none of which is held out."""
    return [
        Item(f"{END}{each.question}", each.answer, task=skill)
        for each in problems(skill, random.Random(f"{skill} {seed}"), count)
    ]


def heldout_items(count: int) -> list[Item]:
    """The first of the demo's items of each skill."""
    found = load_items()
    return [
        Item(f"{END}{each.question}", each.choices[each.answer], tuple(each.choices), skill)
        for skill in SKILLS
        for each in [one for one in found if one.skill == skill][:count]
    ]


def tune(base: Any, tokenizer: Any, arm: str, skills: Sequence[str], asked: Sequence[Item], arguments: Any,
         seed: int) -> tuple[Run, Any]:  # fmt: skip
    """Tune a copy of the base on some skills, and ask it the items of these."""
    config, weight = ARMS[arm]
    weight *= arguments.contrastive
    items = [item for skill in skills for item in training_items(skill, arguments.items, seed)]
    tuning = TuningOptions(
        replace(config, seed=seed), contrastive=weight, epochs=1, batch_size=16, seed=seed, log_every=20,
        learning_rate=arguments.learning_rate, contrastive_tokens=0, save_every=1_000_000,
    )  # fmt: skip
    model = copy.deepcopy(base)
    with tempfile.TemporaryDirectory() as folder:
        made = train(model, tokenizer, items, tuning, Path(folder) / "out")
    results = ask(model, tokenizer, [item for item in asked if item.task in skills], batch_size=50)
    last = made.log[-1]
    name = skills[0] if len(skills) == 1 else "all"
    return Run(
        arm, seed, name, results, last.get("contrastive", math.nan), last.get("information_gap", math.nan)
    ), model


def interval(values: Sequence[float]) -> str:
    """Mean and half of its 95% interval by Student's t."""
    if len(values) < 2:
        return f"{values[0]:.1f}"
    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.1f} ± {half:.1f}"


def accuracies(runs: Sequence[Run], arm: str, multi: bool, skill: str) -> list[float]:
    """Percent right by seed; of "mean" the mean of all skills."""
    found: dict[int, list[float]] = {}
    for run in runs:
        if run.arm == arm and (run.trained_on == "all") == multi:
            for each in run.results:
                if skill in (each.task, "mean"):
                    found.setdefault(run.seed, []).append(100 * each.accuracy)
    return [statistics.fmean(found[seed]) for seed in sorted(found)]


def imbalance(results: Sequence[TaskResult]) -> float:
    """Largest share that an expert has of a task's activations in a layer, as a mean over layers and tasks."""
    return statistics.fmean(max(row) for each in results for row in each.workload)


def between_tasks(results: Sequence[TaskResult]) -> float:
    """Mean total variation distance of two tasks' workloads in a layer: 0 if all tasks use experts alike."""
    found = [
        0.5 * sum(abs(a - b) for a, b in zip(row, other_row, strict=True))
        for place, one in enumerate(results)
        for other in results[:place]
        for row, other_row in zip(one.workload, other.workload, strict=True)
    ]
    return statistics.fmean(found)


def report(runs: Sequence[Run], before: Sequence[TaskResult]) -> None:
    """The tables, as Markdown."""
    base = {each.task: 100 * each.accuracy for each in before} | {
        "mean": statistics.fmean(100 * each.accuracy for each in before)
    }
    for multi in sorted({run.trained_on == "all" for run in runs}):
        print(f"\n{'multi-task' if multi else 'single-task'}\n")
        head("skill", "base", "LoRA r = 64", "experts, without", "experts, with", "with - without")
        for skill in (*SKILLS, "mean"):
            arms = {arm: accuracies(runs, arm, multi, skill) for arm in ARMS}
            gain = [a - b for a, b in zip(arms["with"], arms["without"], strict=True)]
            row(skill, f"{base[skill]:.1f}", *map(interval, arms.values()), interval(gain))
    print()
    head("multi-task", "mean cosine of experts", "contrastive loss", "log N - L", "largest share", "between tasks")
    for arm in ("without", "with"):
        own = [run for run in runs if run.arm == arm and run.trained_on == "all"]
        cosines = [statistics.fmean(each.mean_cosine for each in run.results) for run in own]
        figures = (cosines, [run.contrastive for run in own], [run.gap for run in own],
                   [imbalance(run.results) for run in own], [between_tasks(run.results) for run in own])  # fmt: skip
        row(arm, *(f"{statistics.fmean(each):.3f}" for each in figures))


def main() -> None:
    """Tune, ask and print."""
    tuning = {"seeds": 5, "base_steps": 300, "items": 800, "asked": 100, "learning_rate": 2e-3, "contrastive": 0.01}
    parser = options(__doc__, **tuning, together=False)
    parser.add_argument("--output", type=Path, help="write the multi-task reports of seed 0 here")
    arguments = parser.parse_args()
    start = time.monotonic()
    base, tokenizer = build_base(arguments.base_steps)
    asked = heldout_items(arguments.asked)
    before = ask(base, tokenizer, asked, batch_size=50)
    known = json.dumps({each.task: each.accuracy for each in before})
    print(f"base: {known}, {time.monotonic() - start:.0f} s", flush=True)
    runs = list[Run]()
    for seed in range(arguments.seeds):
        for arm in ARMS:
            for skills in (*([] if arguments.together else [(skill,) for skill in SKILLS]), tuple(SKILLS)):
                run, model = tune(base, tokenizer, arm, skills, asked, arguments, seed)
                runs.append(run)
                if arguments.output and run.trained_on == "all" and seed == 0 and arm != "LoRA":
                    made = ComoeEvaluation("tiny-llama", f"experts, {arm} the contrastive loss", EXPERTS.experts,
                                           EXPERTS.top_k, tuple(comoe_layers(model)), run.results, before)  # fmt: skip
                    arguments.output.mkdir(exist_ok=True)
                    write_evaluation(made, arguments.output / arm)
        print(f"seed {seed}: {time.monotonic() - start:.0f} s", flush=True)
    report(runs, before)


if __name__ == "__main__":
    main()
