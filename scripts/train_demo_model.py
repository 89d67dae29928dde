"""Trains the embedded demo checkpoint, writes its data files and reports on a finished checkpoint.

python -m scripts.train_demo_model train --output compressor/demo
python -m scripts.train_demo_model data --output compressor/demo
python -m scripts.train_demo_model report --checkpoint compressor/demo/checkpoint
"""

import argparse
import copy
import itertools
import json
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from compressor.cli.demonstration import score
from compressor.data.demo import DemoItem, load_documents, load_items
from scripts.demo_skills import SKILLS, document, item, problems

END = "<|end|>"
STEPS = 2300
SEQUENCES = 32
SEQUENCE_LENGTH = 128
PACKED_LINES = 8
SKILL_WEIGHTS = {"arithmetic": 2, "sorting": 1, "reversal": 1, "recall": 3, "facts": 2}
LEARNING_RATE = 3e-3
WARMUP_STEPS = 100
BALANCE_FIRST, BALANCE_LAST = 0.02, 0.002
PLAIN_WEIGHT, ANSWER_WEIGHT = 0.1, 4.0
PROBE_STEPS, PROBE_ITEMS = 100, 40

CALIBRATION_BYTES, HELDOUT_BYTES, ITEMS_PER_SKILL = 200_000, 60_000, 200


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: 256 bytes and the token that begins and ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=512,
    )


def build_model(end: int) -> Qwen3MoeForCausalLM:
    """A randomly initialised model of 4 layers with 16 experts each, 2 of them per token."""
    config = Qwen3MoeConfig(
        vocab_size=257,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=112,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    return Qwen3MoeForCausalLM(config)


def token_batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless windows of packed documents: tokens and loss weights, both [S, L]."""
    tokens: list[int] = []
    weights: list[float] = []
    size = SEQUENCES * SEQUENCE_LENGTH
    while True:
        while len(tokens) < size:
            (skill,) = rng.choices(SKILLS, [SKILL_WEIGHTS[skill] for skill in SKILLS])
            tokens.append(tokenizer.bos_token_id)
            weights.append(PLAIN_WEIGHT)
            for problem in problems(skill, rng, PACKED_LINES):
                line = tokenizer.encode(problem.line, add_special_tokens=False)
                answer = problem.answer.strip()
                asked = problem.line.rindex(answer)
                tokens.extend(line)
                weights.extend([PLAIN_WEIGHT] * asked)
                weights.extend([ANSWER_WEIGHT / len(answer)] * len(answer))
                weights.append(PLAIN_WEIGHT)
        shape = (SEQUENCES, SEQUENCE_LENGTH)
        yield torch.tensor(tokens[:size]).view(shape), torch.tensor(weights[:size]).view(shape)
        tokens, weights = tokens[size:], weights[size:]


def balance_loss(router_logits: tuple[torch.Tensor, ...], config: Qwen3MoeConfig) -> torch.Tensor:
    """Load-balancing loss averaged over layers, so that no layer may leave an expert unused."""
    total = torch.zeros(())
    for logits in router_logits:
        total = total + load_balancing_loss_func(
            (logits,), config.num_experts, config.num_experts_per_tok
        )
    return total / len(router_logits)


def train(output: Path, steps: int, minutes: float, seed: int) -> None:
    """Trains from random weights for `steps` steps, or for `minutes` if they end first, and saves."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer.bos_token_id)
    model.set_experts_implementation("eager")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    batches = token_batches(tokenizer, random.Random(seed))
    probe_rng = random.Random(seed + 1)
    probe = [item(skill, probe_rng) for skill in SKILLS for _ in range(PROBE_ITEMS)]
    begun = time.monotonic()
    step = 0
    while True:
        progress = max(step / steps, (time.monotonic() - begun) / (60 * minutes))
        if progress >= 1:
            break
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * max(cosine, 0.01)
        tokens, weights = next(batches)
        result = model(input_ids=tokens, output_router_logits=True, use_cache=False)
        losses = functional.cross_entropy(
            result.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        loss = (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        balance = balance_loss(result.router_logits, model.config)
        weight = BALANCE_LAST + (BALANCE_FIRST - BALANCE_LAST) * cosine
        optimizer.zero_grad()
        torch.autograd.backward(loss + weight * balance)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % PROBE_STEPS == 0:
            accuracy, _ = score(model, tokenizer, probe, ())
            shown = " ".join(f"{skill} {share:.2f}" for skill, share in accuracy.items())
            seconds = time.monotonic() - begun
            print(
                f"{step} {seconds:.0f}s loss {loss:.3f} balance {balance:.3f} {shown}", flush=True
            )
    save(model, tokenizer, output)
    print(f"{step} steps, {(time.monotonic() - begun) / 60:.1f} minutes", flush=True)


def save(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Writes config, generation config, bf16 weights in one file, and tokenizer."""
    model.bfloat16().save_pretrained(output)
    tokenizer.save_pretrained(output)


def write_data(output: Path, seed: int) -> None:
    """Writes calibration and held-out documents and items; the same bytes for the same seed."""
    output.mkdir(parents=True, exist_ok=True)
    write_documents(
        output / "calibration.jsonl", random.Random(f"calibration {seed}"), CALIBRATION_BYTES, False
    )
    write_documents(output / "heldout.jsonl", random.Random(f"heldout {seed}"), HELDOUT_BYTES, True)
    rng = random.Random(f"items {seed}")
    rows = []
    for skill in SKILLS:
        chosen: dict[tuple[str, tuple[str, ...]], DemoItem] = {}
        while len(chosen) < ITEMS_PER_SKILL:
            drawn = item(skill, rng)
            chosen[drawn.question, tuple(sorted(drawn.choices))] = drawn
        rows += [asdict(kept) for kept in chosen.values()]
    write_lines(output / "items.jsonl", rows)


def write_documents(file: Path, rng: random.Random, size: int, held_out: bool) -> None:
    """Writes documents of each skill in turn until the file has about `size` bytes."""
    rows: list[dict[str, str]] = []
    written = 0
    for skill in itertools.cycle(SKILLS):
        if written >= size and len(rows) % len(SKILLS) == 0:
            break
        rows.append({"text": document(skill, rng, held_out=held_out), "skill": skill})
        written += len(json.dumps(rows[-1])) + 1
    write_lines(file, rows)


def write_lines(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Writes one JSON object per line."""
    file.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode())


def expert_shares(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, items: Sequence[DemoItem]
) -> torch.Tensor:
    """Share of routed tokens per expert over the right lines of each skill: [skills, layers, E]."""
    config = model.config
    visits = torch.zeros(len(SKILLS), config.num_hidden_layers, config.num_experts)
    for asked in items:
        line = f"{asked.question}{asked.choices[asked.answer]}\n"
        tokens = torch.tensor(
            [[tokenizer.bos_token_id, *tokenizer.encode(line, add_special_tokens=False)]]
        )
        with torch.inference_mode():
            routed = model(tokens, output_router_logits=True, use_cache=False).router_logits
        for layer, logits in enumerate(routed):
            chosen = logits.topk(config.num_experts_per_tok, dim=-1).indices.flatten()
            visits[SKILLS.index(asked.skill), layer] += torch.bincount(
                chosen, minlength=config.num_experts
            )
    return visits / visits.sum(dim=-1, keepdim=True)


def drop_random_experts(model: Qwen3MoeForCausalLM, count: int, seed: int) -> Qwen3MoeForCausalLM:
    """A copy of the model that has lost `count` random experts of each layer, weights and router rows."""
    rng = random.Random(seed)
    smaller = copy.deepcopy(model)
    for layer in smaller.model.layers:
        experts, router = layer.mlp.experts, layer.mlp.gate
        kept = torch.tensor(
            sorted(rng.sample(range(experts.num_experts), experts.num_experts - count))
        )
        for owner, name in ((experts, "gate_up_proj"), (experts, "down_proj"), (router, "weight")):
            setattr(owner, name, torch.nn.Parameter(getattr(owner, name).detach()[kept]))
        experts.num_experts = router.num_experts = len(kept)
    return smaller


def report(checkpoint: Path, drop: int, drop_seeds: int) -> None:
    """Prints size, accuracy, held-out loss, the effect of a random drop and the expert visits per skill."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    model = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    items, held_out = load_items(), load_documents("heldout")
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    print(f"parameters {model.num_parameters():,}, checkpoint folder {size:,} bytes\n")
    models = [("whole", model)]
    models += [
        (f"drop {drop}, seed {seed}", drop_random_experts(model, drop, seed))
        for seed in range(drop_seeds)
    ]
    print("| model | " + " | ".join(SKILLS) + " | mean | held-out nats/token |")
    print("|---" * (len(SKILLS) + 3) + "|")
    for name, scored in models:
        accuracy, loss = score(scored, tokenizer, items, [text for text, _ in held_out])
        shown = [accuracy[skill] for skill in SKILLS] + [sum(accuracy.values()) / len(accuracy)]
        print(f"| {name} | " + " | ".join(f"{share:.1%}" for share in shown) + f" | {loss:.3f} |")
    shares = expert_shares(model, tokenizer, items)
    print("\nShare of routed tokens per expert, in per cent\n\n```")
    for layer in range(shares.shape[1]):
        for skill, row in zip(SKILLS, shares[:, layer], strict=True):
            print(
                f"layer {layer} {skill:10} "
                + " ".join(f"{100 * share:3.0f}" for share in row.tolist())
            )
    print("```\n\nTotal-variation distance between the skills' histograms (mean over pairs)")
    pairs = list(itertools.combinations(range(len(SKILLS)), 2))
    for layer in range(shares.shape[1]):
        apart = [(shares[a, layer] - shares[b, layer]).abs().sum().item() / 2 for a, b in pairs]
        print(
            f"layer {layer}: {sum(apart) / len(apart):.2f}, from {min(apart):.2f} to {max(apart):.2f}"
        )


def main() -> None:
    """Runs the subcommand given on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser(
        "train", help="train, then write OUTPUT/checkpoint and OUTPUT/data"
    )
    training.add_argument("--output", type=Path, required=True)
    training.add_argument("--steps", type=int, default=STEPS)
    training.add_argument("--minutes", type=float, default=math.inf, help="end the schedule sooner")
    training.add_argument("--seed", type=int, default=0)
    data = commands.add_parser("data", help="write OUTPUT/data only")
    data.add_argument("--output", type=Path, required=True)
    data.add_argument("--seed", type=int, default=0)
    reporting = commands.add_parser("report", help="print the figures of a finished checkpoint")
    reporting.add_argument("--checkpoint", type=Path, required=True)
    reporting.add_argument(
        "--drop", type=int, default=8, help="experts dropped from each layer at random"
    )
    reporting.add_argument("--drop-seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.command == "train":
        train(options.output / "checkpoint", options.steps, options.minutes, options.seed)
    if options.command in ("train", "data"):
        write_data(options.output / "data", options.seed)
    if options.command == "report":
        report(options.checkpoint, options.drop, options.drop_seeds)


if __name__ == "__main__":
    main()
