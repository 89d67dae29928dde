"""Pictures that the small vision model is trained on show what their captions say; answers are where they stand."""

import random

import numpy as np
import torch

from scripts.train_shapes_model import (
    COLOURS,
    SIDE,
    SKILLS,
    answers,
    build_model,
    build_processor,
    caption,
    captioned,
    draw,
    line,
)


def test_a_picture_shows_its_caption() -> None:
    rng = random.Random(0)
    for words in (caption(rng) for _ in range(200)):
        _, size, colour, shape, _, _, row, column, _ = words.split()
        pixels = np.asarray(draw(words, rng)).astype(int)
        drawn = (pixels == COLOURS[colour]).all(-1)
        places = drawn.nonzero()
        assert [axis.mean() >= SIDE / 2 - 0.5 for axis in places] == [row == "bottom", column == "right"], words
        half = {"small": 4, "large": 6}[size]
        assert max(axis.max() - axis.min() for axis in places) in (2 * half, 2 * half - 1), words
        full = drawn.sum() / (2 * half + 1) ** 2
        assert {"square": full > 0.85, "circle": 0.6 < full < 0.9}.get(shape, full < 0.7), (words, full)


def test_answers_are_what_the_caption_and_the_lines_end_with() -> None:
    rng, processor = random.Random(1), build_processor()
    words = [caption(rng) for _ in range(4)]
    inputs = captioned(processor, words, rng)
    model = build_model(processor)
    with torch.no_grad():
        logits = model(**inputs).logits
    assert logits.shape[:2] == inputs["input_ids"].shape
    ids = inputs["input_ids"][:, answers("captions", inputs["input_ids"])]
    assert [processor.tokenizer.decode(row) for row in ids] == words
    for skill in SKILLS[1:]:
        text = line(skill, rng)
        ids = processor.tokenizer([text], return_tensors="pt")["input_ids"]
        assert processor.tokenizer.decode(ids[0, answers(skill, ids)]) == text.split(" is ")[1]
