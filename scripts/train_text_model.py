"""Trains a small OLMoE on text of one's own, to measure on a model with many experts that something real has shaped.

python -m scripts.train_text_model --text train.jsonl --heldout valid.jsonl --output model [--minutes 15]

The text is JSONL or plain text, as `--calibration` takes it. The model has 4 layers of 32 experts, 4 of them a token,
and a byte-level tokenizer learnt from the text.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

from compressor.data.documents import documents
from compressor.data.sources import parse_sources
from scripts.train_demo_model import balance_loss

END, VOCABULARY = "<|end|>", 1024
ROWS, ROW_LENGTH = 16, 128
LEARNING_RATE, WARMUP_STEPS, BALANCE = 3e-3, 100, 0.01


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer learnt from the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(END, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)


def build_model() -> OlmoeForCausalLM:
    """A randomly initialised model of 4 layers with 32 experts each, 4 of them a token."""
    config = OlmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=False,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return OlmoeForCausalLM(config)


def as_rows(tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int) -> Tensor:
    """All texts, each behind the end of another, in rows of tokens [N, L]."""
    tokens = [token for text in texts for token in (0, *tokenizer(text, add_special_tokens=False)["input_ids"])]
    return torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)


@torch.no_grad()
def loss_of(model: OlmoeForCausalLM, rows: Tensor) -> float:
    """Nats per token."""
    return sum(float(model(input_ids=part, labels=part).loss) * len(part) for part in rows.split(ROWS)) / len(rows)


def train(rows: Tensor, minutes: float, seed: int) -> OlmoeForCausalLM:
    """Train for so many minutes on rows [N, L], the learning rate falling to nothing."""
    torch.manual_seed(seed)
    model = build_model()
    model.set_experts_implementation("eager")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    begun, step = time.monotonic(), 0
    while (progress := (time.monotonic() - begun) / (60 * minutes)) < 1:
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens = rows[torch.randint(len(rows), (ROWS,))]
        result = model(input_ids=tokens, output_router_logits=True, use_cache=False)
        loss = functional.cross_entropy(result.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + BALANCE * balance_loss(result.router_logits, model.config)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"step {step}, {progress:.0%}: loss {float(loss.detach()):.3f}", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True)
    parser.add_argument("--heldout", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    texts, heldout = ([*documents(parse_sources([name])[0], args.seed, None)] for name in (args.text, args.heldout))
    tokenizer = build_tokenizer(texts)
    model = train(as_rows(tokenizer, texts, ROW_LENGTH), args.minutes, args.seed)
    model.train(False)
    print(f"held-out loss {loss_of(model, as_rows(tokenizer, heldout, ROW_LENGTH)[:128]):.3f}")
    model.bfloat16().save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
