"""The built-in prompts of golden answers: short, and as different as 16 prompts can be."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from compressor.answers.prompts import Prompt, tokens_of
from compressor.errors import CompressionError
from compressor.golden.answers import GoldenAnswers, GoldenPrompt
from compressor.model.tokenizer import has_chat_template, load_tokenizer
from compressor.prompt_date import dated

LONGEST = 96  # tokens of a prompt
POSITIONS = 8  # of each prompt that are recorded, evenly spread
DRAWN = 32  # tokens of a prompt that is drawn
PROMPTS = 16
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TEXTS = (
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    "
    "return",
    "SELECT name, COUNT(*) FROM orders JOIN customers ON orders.customer = customers.id GROUP BY",
    "Prove that the square root of 2 is irrational. Suppose that it equals p/q in lowest terms; "
    "then",
    "17 * 23 = 391, 391 + 609 = 1000, and 1000 / 8 =",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the "
    "age of",
    "The mitochondrion makes most of the cell's supply of adenosine triphosphate, which is used as",
    "Der schnelle braune Fuchs springt über den faulen Hund, und die Katze schläft auf dem",
    "La Révolution française commence en 1789 par la convocation des états généraux, puis la "
    "prise de la",
    "人工智能正在改变我们的生活方式,从医疗到教育,越来越多的领域开始",
    "Съешь же ещё этих мягких французских булок, да выпей",
    '{"name": "weather", "arguments": {"city": "Paris", "unit": "celsius", "days": [1, 2,',
    "الذكاء الاصطناعي هو قدرة الآلات على",
    "What is the weather in Tokyo tomorrow?",
)


def golden_prompts(tokenizer: Any, vocabulary: int, longest: int) -> tuple[GoldenPrompt, ...]:
    """Return a model's prompts without answers, in its own chat template; drawn ids where the
    tokenizer is None."""
    prompts = list[GoldenPrompt]()
    known: Sequence[int] = range(vocabulary)
    if tokenizer is not None:
        special = {
            *getattr(tokenizer, "all_special_ids", ()),
            *getattr(tokenizer, "added_tokens_decoder", {}),
        }
        known = [token for token in range(min(vocabulary, len(tokenizer))) if token not in special]
        for text in TEXTS:
            tools = (WEATHER,) if text == TEXTS[-1] and has_chat_template(tokenizer) else ()
            ids = rendered(tokenizer, text, tools)
            if ids and max(ids) < vocabulary:
                plain = tokenizer(text, add_special_tokens=False)["input_ids"]
                prompts.append(_prompt(ids[:longest], text, len(plain), len(ids), tools))
    prompts.sort(key=lambda prompt: len(prompt.ids))  # neighbours share a batch
    generator = torch.Generator().manual_seed(0)
    while len(prompts) < PROMPTS:
        chosen = torch.randint(len(known), (min(DRAWN, longest),), generator=generator).tolist()
        prompts.append(_prompt([known[number] for number in chosen]))
    return tuple(prompts)


def tokenizer_of(folder: Path) -> Any:
    """Return a folder's tokenizer; None if it has none that can be used."""
    try:
        return load_tokenizer(folder)
    except CompressionError:
        return None


def rendered(tokenizer: Any, text: str, tools: Sequence[Any] = ()) -> tuple[int, ...]:
    """Return the ids of a text as a user's message, or without a chat template of the text alone.

    No ids where the tokenizer or its template does not take it.
    """
    question = [{"role": "user", "content": text}] if has_chat_template(tokenizer) else text
    try:
        return tokens_of(Prompt.of(question, tools=list(tools) or None), tokenizer)
    except CompressionError:
        return ()


def other_tokens(folder: Path, golden: GoldenAnswers) -> list[int]:
    """Return the numbers of the prompts of which the tokenizer or chat template in a folder makes
    other tokens.

    None of them where there is no tokenizer.
    """
    tokenizer = tokenizer_of(folder)
    numbers = list[int]()
    with dated(golden.date):
        for number, prompt in enumerate(golden.prompts if tokenizer is not None else ()):
            if prompt.text is not None:
                ids = rendered(tokenizer, prompt.text, prompt.tools)
                if ids[: len(prompt.given)] != prompt.given:
                    numbers.append(number)
    return numbers


def _prompt(ids: Sequence[int], text: str | None = None, *facts: Any) -> GoldenPrompt:
    count = min(POSITIONS, len(ids))
    positions = tuple(len(ids) * (number + 1) // count - 1 for number in range(count))
    return GoldenPrompt(tuple(ids), positions, (), text, *facts)
