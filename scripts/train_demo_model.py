"""Train the embedded demo checkpoint and write its data files, or the files alone.

python -m scripts.train_demo_model train --output compressor/demo [--steps N] [--minutes N] [--seed 0]
python -m scripts.train_demo_model data --output compressor/demo [--seed 0]
"""

import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from compressor.cli.demonstration import score
from compressor.data.demo import DemoItem
from scripts.benchmarks import frame
from scripts.demo_skills import SKILLS, document, item, problems

END = "<|end|>"
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
    """Return a byte-level tokenizer without merges: 256 bytes and the token that begins and ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokens = {"bos_token": END, "eos_token": END, "pad_token": END}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens, model_max_length=512)


def build_model(end: int) -> Qwen3MoeForCausalLM:
    """Return a randomly initialised model of 4 layers with 16 experts each, 2 of them per token."""
    config = Qwen3MoeConfig(
        vocab_size=257, hidden_size=128, num_hidden_layers=4, intermediate_size=256, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, num_experts=16, num_experts_per_tok=2,
        moe_intermediate_size=112, norm_topk_prob=True, tie_word_embeddings=True, bos_token_id=end, eos_token_id=end,
        pad_token_id=end,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def token_batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield endless windows of packed documents: tokens and loss weights, both [S, L]."""
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


def train(output: Path, steps: int, minutes: float, seed: int) -> None:
    """Train from random weights for `steps` steps, or for `minutes` if they end first, and save."""
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
        # Averaged over layers, so that no layer may leave an expert unused.
        counts = model.config.num_experts, model.config.num_experts_per_tok
        balance = torch.zeros(())
        for logits in result.router_logits:
            balance = balance + load_balancing_loss_func((logits,), *counts)
        balance = balance / len(result.router_logits)
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
            print(f"{step} {seconds:.0f}s loss {loss:.3f} balance {balance:.3f} {shown}", flush=True)
    model.bfloat16().save_pretrained(output)
    tokenizer.save_pretrained(output)
    print(f"{step} steps, {(time.monotonic() - begun) / 60:.1f} minutes", flush=True)


def write_data(output: Path, seed: int) -> None:
    """Write calibration and held-out documents and items; the same bytes for the same seed."""
    output.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[str]] = {"calibration": [], "heldout": [], "items": []}
    for name, size in (("calibration", CALIBRATION_BYTES), ("heldout", HELDOUT_BYTES)):
        rng = random.Random(f"{name} {seed}")
        written = 0
        for skill in itertools.cycle(SKILLS):
            if written >= size and len(files[name]) % len(SKILLS) == 0:
                break
            text = document(skill, rng, held_out=name == "heldout")
            files[name].append(json.dumps({"text": text, "skill": skill}) + "\n")
            written += len(files[name][-1])
    rng = random.Random(f"items {seed}")
    for skill in SKILLS:
        chosen: dict[tuple[str, tuple[str, ...]], DemoItem] = {}
        while len(chosen) < ITEMS_PER_SKILL:
            drawn = item(skill, rng)
            chosen[drawn.question, tuple(sorted(drawn.choices))] = drawn
        files["items"] += [json.dumps(asdict(kept)) + "\n" for kept in chosen.values()]
    for name, lines in files.items():
        (output / f"{name}.jsonl").write_bytes("".join(lines).encode())


def main() -> None:
    """Run the command that is named."""
    parser = frame.options(__doc__, steps=2300, minutes=math.inf, seed=0)
    parser.add_argument("command", choices=("train", "data"))
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.command == "train":
        train(given.output / "checkpoint", given.steps, given.minutes, given.seed)
    write_data(given.output / "data", given.seed)


if __name__ == "__main__":
    main()
