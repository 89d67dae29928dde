"""Trains a small MoE model that captions pictures of shapes and answers lines of text, and scores a folder on both.

python -m scripts.train_shapes_model train --output shapes
python -m scripts.train_shapes_model score shapes/model SMALLER ...

`train` writes the model with its processor, and the calibration text `text.jsonl` and `pictures.jsonl`. About ten
minutes on one core.
"""

import argparse
import base64
import json
import math
import random
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from scipy.stats import binomtest
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import (
    AutoProcessor,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

SIDE, PATCH = 24, 4  # pixels
COLOURS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (230, 220, 50),
    "purple": (160, 50, 190), "white": (240, 240, 240),
}  # fmt: skip
SHAPES, SIZES = ("circle", "square", "triangle", "cross"), {"small": 4, "large": 6}  # half the side, in pixels
ROWS, COLUMNS = ("top", "bottom"), ("left", "right")
LETTERS, LISTED = "abcdefghij", 5
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ ' ' + part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
STEPS, PICTURES, TEXTS = 1500, 32, 64
LEARNING_RATE, WARMUP, BALANCE = 3e-3, 100, 0.01
CALIBRATION, SCORED = 400, 500
SKILLS = ("captions", "sorting", "reversal")


def caption(rng: random.Random) -> str:
    """What is on a picture."""
    size, colour, shape = rng.choice(list(SIZES)), rng.choice(list(COLOURS)), rng.choice(SHAPES)
    return f"a {size} {colour} {shape} at the {rng.choice(ROWS)} {rng.choice(COLUMNS)} ."


def draw(words: str, rng: random.Random) -> Image.Image:
    """A picture with that caption, on noise."""
    _, size, colour, shape, _, _, row, column, _ = words.split()
    noise = np.random.default_rng(rng.getrandbits(32)).integers(0, 60, (SIDE, SIDE, 3), dtype=np.uint8)
    picture, half = Image.fromarray(noise), SIZES[size]
    x, y = (
        rng.randint(half, SIDE // 2 - half + 1) + (SIDE // 2 - 1) * far for far in (column == "right", row == "bottom")
    )
    pen, fill = ImageDraw.Draw(picture), COLOURS[colour]
    if shape == "circle":
        pen.ellipse((x - half, y - half, x + half, y + half), fill)
    elif shape == "square":
        pen.rectangle((x - half, y - half, x + half, y + half), fill)
    elif shape == "triangle":
        pen.polygon(((x, y - half), (x - half, y + half), (x + half, y + half)), fill)
    else:
        pen.rectangle((x - half, y - 1, x + half, y + 1), fill)
        pen.rectangle((x - 1, y - half, x + 1, y + half), fill)
    return picture


def line(skill: str, rng: random.Random) -> str:
    """A line of text that ends with the answer."""
    letters = rng.sample(LETTERS, LISTED)
    answer = sorted(letters) if skill == "sorting" else letters[::-1]
    return " ".join(["sort" if skill == "sorting" else "reverse", *letters, "is", *answer, "."])


def build_processor() -> LlavaProcessor:
    """A tokenizer of words, and CLIP's own image processor for pictures of this size."""
    words = ["<pad>", "<eos>", "<image>", "<unk>", ".", "a", "at", "the", "is", "sort", "reverse", *COLOURS, *SHAPES]
    words += [*SIZES, *ROWS, *COLUMNS, *LETTERS[1:]]
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    options: dict[str, Any] = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, tokenizer, patch_size=PATCH, chat_template=TEMPLATE, **options)


def build_model(processor: LlavaProcessor) -> LlavaForConditionalGeneration:
    """LLaVA of a vision tower of 2 blocks and a Qwen3-MoE of 3 layers with 16 experts each, 2 of them per token."""
    text = Qwen3MoeConfig(
        vocab_size=len(processor.tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        moe_intermediate_size=48,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
    )
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_index=2, vision_feature_layer=-1)
    )


def captioned(processor: Any, captions: list[str], rng: random.Random) -> dict[str, torch.Tensor]:
    """What the processor makes of pictures, one with each caption."""
    pictures = [draw(words, rng) for words in captions]
    return dict(processor(text=[f"<image> {words}" for words in captions], images=pictures, return_tensors="pt"))


def answers(skill: str, ids: torch.Tensor) -> slice:
    """Where in a skill's rows [B, L] the answer stands, its full stop included."""
    return slice(ids.shape[1] - (9 if skill == "captions" else LISTED + 1), ids.shape[1])


def training_batches(processor: Any, rng: random.Random) -> Iterator[list[tuple[str, dict[str, torch.Tensor]]]]:
    """A batch of pictures, and one of lines for each skill of text."""
    while True:
        pictured = captioned(processor, [caption(rng) for _ in range(PICTURES)], rng)
        batches = [("captions", pictured)]
        for skill in SKILLS[1:]:
            lines = [line(skill, rng) for _ in range(TEXTS // 2)]
            batches.append((skill, dict(processor.tokenizer(lines, return_tensors="pt"))))
        yield batches


def train(output: Path, seed: int) -> None:
    """Train, and write the model with its processor and the calibration text."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    processor = build_processor()
    model, begin = build_model(processor), time.monotonic()
    gates = list[torch.Tensor]()
    for layer in model.model.language_model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, args, output: gates.append(output[0]))
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    text = model.config.text_config
    for step, batches in zip(range(STEPS), training_batches(processor, rng), strict=False):
        rate = min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * step / STEPS)))
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * rate
        losses, seen = list[torch.Tensor](), list[list[torch.Tensor]]()
        for skill, inputs in batches:
            gates.clear()
            logits, place = model(**inputs, use_cache=False).logits, answers(skill, inputs["input_ids"])
            before = slice(place.start - 1, place.stop - 1)
            losses.append(
                functional.cross_entropy(logits[:, before].flatten(0, 1), inputs["input_ids"][:, place].flatten())
            )
            seen.append([gate.view(-1, text.num_experts) for gate in gates])
        together = tuple(torch.cat(own) for own in zip(*seen, strict=True))
        balance = load_balancing_loss_func(together, text.num_experts, text.num_experts_per_tok)
        optimiser.zero_grad()
        (sum(losses) + BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 99:
            shown = ", ".join(f"{skill} {loss.item():.3f}" for (skill, _), loss in zip(batches, losses, strict=True))
            print(f"step {step + 1}: {shown}; {time.monotonic() - begin:.0f} s", flush=True)
    model.save_pretrained(output / "model")
    processor.save_pretrained(output / "model")
    write_calibration(output, random.Random(seed + 1))


def write_calibration(output: Path, rng: random.Random) -> None:
    """Lines of text, and pictures with their captions."""
    texts = [{"text": line(rng.choice(SKILLS[1:]), rng)} for _ in range(20 * CALIBRATION)]
    pictures = []
    for words in [caption(rng) for _ in range(CALIBRATION)]:
        draw(words, rng).save(stream := BytesIO(), "PNG")
        pictures.append(
            {"image": "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode(), "text": words}
        )
    for name, rows in (("text", texts), ("pictures", pictures)):
        (output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@torch.no_grad()
def score(folder: Path, seed: int = 7) -> dict[str, tuple[int, int]]:
    """Answers that are right from first to last token, of so many new pictures and lines, by skill."""
    rng, processor = random.Random(seed), AutoProcessor.from_pretrained(folder)
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    scores = dict[str, tuple[int, int]]()
    for skill in SKILLS:
        if skill == "captions":
            inputs = captioned(processor, [caption(rng) for _ in range(SCORED)], rng)
        else:
            inputs = dict(processor.tokenizer([line(skill, rng) for _ in range(SCORED)], return_tensors="pt"))
        place, ids = answers(skill, inputs["input_ids"]), inputs["input_ids"]
        greedy = model(**inputs, use_cache=False).logits[:, place.start - 1 : place.stop - 1].argmax(-1)
        scores[skill] = int((greedy == ids[:, place]).all(1).sum()), SCORED  # what greedy decoding would write
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("--output", type=Path, required=True)
    training.add_argument("--seed", type=int, default=0)
    scoring = commands.add_parser("score")
    scoring.add_argument("folders", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "train":
        train(arguments.output, arguments.seed)
        return
    print(f"| model | {' | '.join(SKILLS)} |\n|---|{'---|' * len(SKILLS)}")
    for folder in arguments.folders:
        cells = []
        for right, total in score(folder).values():
            low, high = binomtest(right, total).proportion_ci(0.95, "wilson")
            cells.append(f"{right / total:.1%} ({low:.1%} to {high:.1%})")
        print(f"| {folder} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
