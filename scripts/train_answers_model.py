"""Trains a small MoE that answers questions in five domains and ends its answers, and writes prompts and text.

python -m scripts.train_answers_model --output answers

The output has `checkpoint` (a stock Qwen3-MoE with a chat template), `prompts.jsonl` and `prompts-DOMAIN.jsonl`
(held-out questions), `heldout-DOMAIN.jsonl` (with answers), and three kinds of calibration text: `chats.jsonl`
(questions with answers), `questions.jsonl` (prompts alone) and `plain.jsonl` (answers without chat or end).
"""

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from scripts.answers_texts import DOMAINS, Chat, chat, chats
from scripts.train_demo_model import balance_loss, save, write_lines

END, PAD = "<|end|>", "<|pad|>"
ROLES = ("<|user|>", "<|assistant|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' -}}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}{% endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{{- '\\n' if not loop.first or message.content -}}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' -}}{% endif -%}"""

VOCABULARY, TOKENIZER_CHATS = 1000, 2000
STEPS, ROWS, ROW_LENGTH = 1600, 16, 256
LEARNING_RATE, WARMUP_STEPS = 3e-3, 100
BALANCE = 0.005
QUESTION_WEIGHT = 0.1
PROBE_STEPS, PROBE_CHATS, LONGEST = 250, 40, 256

CALIBRATION_CHATS, HELDOUT_CHATS, PROMPTS = 3000, 500, 1000


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with single digits, learnt from chats, with end, roles and tags."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token in (END, PAD, *ROLES)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS), special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = [text for new in chats(f"tokenizer {seed}", TOKENIZER_CHATS) for text in (new.question, new.answer)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=1024, padding_side="left"
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    """A randomly initialised model of 4 layers with 16 experts each, 4 of them per token."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3MoeForCausalLM(config)


def encoded(tokenizer: PreTrainedTokenizerFast, new: Chat) -> tuple[list[int], list[float]]:
    """Token ids of a chat with its end, and the weight of each token's loss."""
    question = prompt_ids(tokenizer, new)
    answer = tokenizer.encode(new.answer + END, add_special_tokens=False)
    return question + answer, [QUESTION_WEIGHT] * len(question) + [1.0] * len(answer)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, new: Chat) -> list[int]:
    """Token ids of a question up to where its answer begins."""
    text = tokenizer.apply_chat_template(new.messages(answered=False), tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(str(text), add_special_tokens=False))


def token_batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of rows of whole chats: tokens and loss weights, both [S, L], padded with weight 0."""
    tokens = torch.full((ROWS, ROW_LENGTH), int(tokenizer.pad_token_id))
    weights = torch.zeros(ROWS, ROW_LENGTH)
    ids, own = encoded(tokenizer, chat(rng.choice(DOMAINS), rng))
    while True:
        tokens.fill_(int(tokenizer.pad_token_id))
        weights.zero_()
        for row in range(ROWS):
            begin = 0
            while begin + len(ids) <= ROW_LENGTH:
                tokens[row, begin : begin + len(ids)] = torch.tensor(ids)
                weights[row, begin : begin + len(ids)] = torch.tensor(own)
                begin += len(ids)
                ids, own = encoded(tokenizer, chat(rng.choice(DOMAINS), rng))
        yield tokens, weights


def train(output: Path, steps: int, seed: int) -> None:
    """Trains from random weights and saves."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(seed)
    model = build_model(tokenizer)
    model.set_experts_implementation("eager")
    print(f"{model.num_parameters():,} parameters", flush=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    batches = token_batches(tokenizer, random.Random(f"training {seed}"))
    probe = chats(f"probe {seed}", PROBE_CHATS, held_out=True)
    begun = time.monotonic()
    for step in range(1, steps + 1):
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS) * max(cosine, 0.01)
        tokens, weights = next(batches)
        result = model(input_ids=tokens, output_router_logits=True, use_cache=False)
        losses = functional.cross_entropy(
            result.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        loss = (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss + BALANCE * balance_loss(result.router_logits, model.config))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"{step} {time.monotonic() - begun:.0f}s loss {loss:.3f}", flush=True)
        if step % PROBE_STEPS == 0 or step == steps:
            print(f"{step} {probed(model, tokenizer, probe)}", flush=True)
    save(model, tokenizer, output)


def probed(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, probe: Sequence[Chat]) -> str:
    """How many greedy answers to held-out questions end, and how many are the expected ones, by domain."""
    answers = [tokenizer.decode(ids) for ids in generated(model, tokenizer, probe)]
    shown = []
    for domain in DOMAINS:
        own = [(new, answer) for new, answer in zip(probe, answers, strict=True) if new.domain == domain]
        ended = sum(END in answer for _, answer in own)
        right = sum(answer.split(END)[0] == new.answer for new, answer in own)
        shown.append(f"{domain} ends {ended}/{len(own)} same {right}/{len(own)}")
    return ", ".join(shown)


@torch.inference_mode()
def generated(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, asked: Sequence[Chat]) -> list[list[int]]:
    """Greedy answers to questions, with the end token where there is one."""
    prompts: Any = tokenizer.pad({"input_ids": [prompt_ids(tokenizer, new) for new in asked]}, return_tensors="pt")
    whole = model.generate(**prompts, max_new_tokens=LONGEST, do_sample=False)
    return [row.tolist() for row in whole[:, prompts["input_ids"].shape[1] :]]


def write_data(output: Path, seed: int) -> None:
    """Writes prompts and text of each kind; the same bytes for the same seed."""
    output.mkdir(parents=True, exist_ok=True)
    training = chats(f"calibration {seed}", CALIBRATION_CHATS)
    write_lines(output / "chats.jsonl", [{"messages": new.messages(), "domain": new.domain} for new in training])
    write_lines(output / "questions.jsonl", [{"messages": new.messages(answered=False)} for new in training])
    write_lines(output / "plain.jsonl", [{"text": new.answer} for new in training])
    held_out = chats(f"held out {seed}", HELDOUT_CHATS + PROMPTS, held_out=True)
    texts, asked = held_out[:HELDOUT_CHATS], held_out[HELDOUT_CHATS:]
    prompts = [{"messages": new.messages(answered=False), "domain": new.domain} for new in asked]
    write_lines(output / "prompts.jsonl", prompts)
    for domain in DOMAINS:
        write_lines(output / f"prompts-{domain}.jsonl", [row for row in prompts if row["domain"] == domain])
        own = [{"messages": new.messages()} for new in texts if new.domain == domain]
        write_lines(output / f"heldout-{domain}.jsonl", own)


def main() -> None:
    """Trains, and writes the data."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data-only", action="store_true", help="write prompts and text without training")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    write_data(options.output, options.seed)
    if not options.data_only:
        train(options.output / "checkpoint", options.steps, options.seed)


if __name__ == "__main__":
    main()
