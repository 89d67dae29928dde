import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.answers.answering import Answer
from compressor.answers.prompts import Prompt
from compressor.quality_gate.endings import (
    ALL,
    LEAST,
    PERIOD,
    TIMES,
    Ending,
    Markers,
    broken,
    ending_of,
    loop_start,
    pair_lengths,
    rates,
    repeated_share,
)
from compressor.quality_gate.statistics import measure_change, upper_bound
from compressor.quality_gate.verdict import TaskGate

HERMES = "{% if tools %}<tool_call>{}</tool_call>{% endif %}{{ m['reasoning_content'] }}<think>\n</think>"
PROMPT = Prompt.of("a question")
TOKENIZER = SimpleNamespace(decode=lambda tokens, **_: "x" * len(tokens))


def brute(tokens: list[int]) -> bool:
    """Whether some last `length` tokens are a sequence of at most PERIOD tokens, repeated, the last time cut or not."""
    for period in range(1, PERIOD + 1):
        length = max(TIMES * period, LEAST)
        tail = tokens[-length:]
        if len(tokens) >= length and all(tail[place] == tail[place % period] for place in range(length)):
            return True
    return False


@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.integers(0, 9),
    st.integers(0, 8),
)
def test_loops_are_those_of_brute_force(before: list[int], phrase: list[int], times: int, cut: int) -> None:
    tokens = before + phrase * times + phrase[:cut]
    start = loop_start(tokens)
    assert (start is not None) == brute(tokens)
    if start is not None:
        tail = tokens[start:]
        assert any(tail[period:] == tail[:-period] for period in range(1, PERIOD + 1) if period < len(tail))


def test_the_longest_period_and_what_is_no_loop() -> None:
    phrase = random.Random(0).sample(range(1000), PERIOD + 1)
    assert loop_start([5, 6, *phrase[:PERIOD] * TIMES]) == 2
    assert loop_start(phrase[:PERIOD] * TIMES + [7]) is None  # it goes on
    assert loop_start(phrase * TIMES) is None  # one token too long
    assert loop_start(phrase[:PERIOD] * (TIMES - 1)) is None
    assert loop_start([1] * (LEAST - 1)) is None and loop_start([1] * LEAST) == 0


def test_repeated_grams_are_counted_as_welleck_counts_them() -> None:
    assert repeated_share([1, 2, 3]) == 0
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 - 4 / 5)
    assert repeated_share([1] * 13) == pytest.approx(1 - 1 / 10)


def answer(tokens: list[int], text: str = "", ended: Any = "length") -> Answer:
    return Answer(PROMPT.id, 0, tuple(tokens), text, ended)


def test_loops_that_count_are_found_by_their_grams() -> None:
    varied = [token for number in range(12) for token in (*range(20), 100 + number)]
    ending = ending_of(answer(varied), PROMPT, Markers(), TOKENIZER)
    assert ending.looped and ending.loop_start is None
    plain = ending_of(answer(list(range(200))), PROMPT, Markers(), TOKENIZER)
    assert not plain.looped and plain.repeated == 0 and not plain.ended


def test_the_end_token_is_no_part_of_an_answer() -> None:
    ending = ending_of(answer([*[1, 2] * 8, 0], ended="end"), PROMPT, Markers(), TOKENIZER)
    assert (ending.ended, ending.looped, ending.tokens) == (True, True, 16)


@pytest.mark.parametrize(
    ("template", "added", "thinking", "calls"),
    [
        (HERMES, [], [("<think>", "</think>")], [("<tool_call>", "</tool_call>")]),
        ("plain", ["[THINK]", "[/THINK]", "[TOOL_CALLS]"], [("[THINK]", "[/THINK]")], []),
        ("x", ["◁think▷", "◁/think▷"], [("◁think▷", "◁/think▷")], []),
        ("<|tool_call_begin|>a<|tool_call_end|>", [], [], [("<|tool_call_begin|>", "<|tool_call_end|>")]),
        ("<|channel|>analysis", [], [("<|channel|>analysis", "<|channel|>final")], []),
        ("{{ messages[thinking] }}", [], [], []),
    ],
)
def test_markers_come_from_template_and_tokens(template: str, added: list[str], thinking: Any, calls: Any) -> None:
    tokenizer = SimpleNamespace(chat_template=template, get_added_vocab=lambda: dict.fromkeys(added, 1))
    found = Markers.of(tokenizer)
    assert (list(found.thinking), list(found.calls)) == (thinking, calls)


def test_open_thinking_counts_what_the_prompt_has_opened() -> None:
    markers = Markers.of(SimpleNamespace(chat_template=HERMES))

    def thinks(text: str, before: str = "") -> bool | None:
        return ending_of(answer([1], text), PROMPT, markers, TOKENIZER, before).open_thinking

    assert thinks("well", "<think>\n") and not thinks("well</think> yes", "<think>\n")
    assert thinks("<think> well") and not thinks("yes")
    assert ending_of(answer([1], "<think>"), PROMPT, Markers(), TOKENIZER).open_thinking is None


@pytest.mark.parametrize(
    ("text", "is_broken"),
    [
        ('<tool_call>{"name": "f"}</tool_call>', False),
        ('<tool_call>{"name": "f"</tool_call>', True),
        ('<tool_call>{"name": "f"}', True),
        ("<tool_call><function=f></function></tool_call>", False),
        ("```json\n[1, 2]\n```", False),
        ("```json\n[1, 2\n```", True),
        ("```json\n[1, 2]", True),
        ("plain", False),
    ],
)
def test_tool_calls_and_json_that_no_program_reads(text: str, is_broken: bool) -> None:
    markers = Markers.of(SimpleNamespace(chat_template=HERMES))
    assert broken(text, markers) is is_broken
    assert broken('{"name": ', Markers(has_tools=True), tools=[{}]) and not broken('{"name": ', Markers())


def test_rates_are_paired_as_the_gate_pairs_items() -> None:
    base = [Ending(True, number < 2, None, 10, 0.0) for number in range(40)]
    smaller = [Ending(number % 2 == 0, 1 <= number < 7, None, 14, 0.0) for number in range(40)]
    pairs = list(zip(base, smaller, strict=True))
    found = {(rate.measure, rate.domain): rate for rate in rates(["a"] * 20 + ["b"] * 20, pairs, 0.9)}
    loops = found["loops", ALL]
    assert (loops.base, loops.smaller, loops.more, loops.fewer) == pytest.approx((2 / 40, 6 / 40, 5, 1))
    assert (loops.lower, loops.upper) == pytest.approx((-upper_bound(1, 5, 40, 0.1), upper_bound(5, 1, 40, 0.1)))
    assert found["loops", "b"].rise == 0 and found["missed ends", "a"].smaller == 0.5
    assert (found["repeated 4-grams", ALL].base, found["repeated 4-grams", ALL].mcnemar) == (0, None)
    assert found["tokens", ALL].rise == 4 and ("open thinking", ALL) not in found


def change_of(base: Any, smaller: Any, limit: float) -> TaskGate:
    endings = [[Ending(True, False, None, int(tokens), 0.0) for tokens in side] for side in (base, smaller)]
    return measure_change(pair_lengths(list(zip(*endings, strict=True))), limit, 0.05)


def test_a_change_of_length_is_the_ratio_of_means_with_the_bounds_of_fieller() -> None:
    draw = np.random.default_rng(1)
    base = draw.integers(1, 400, 3000)
    smaller = np.maximum(base + draw.integers(-90, 120, 3000), 1)
    longer = change_of(base, smaller, 0.05)
    assert longer.drop == pytest.approx(smaller.mean() / base.mean() - 1)
    for bound, sign in ((longer.upper, -1), (longer.lower, 1)):  # at which t of the differences is the quantile
        differences = smaller - (1 + bound) * base
        error = differences.std(ddof=1) / len(base) ** 0.5
        assert sign * differences.mean() / error == pytest.approx(1.645, abs=0.05)
    assert (longer.verdict, change_of(base, smaller, 0.15).verdict) == ("fail", "pass")
    shorter = change_of(smaller, base, 0.05)
    assert shorter.verdict == "fail" and shorter.upper < -0.05
    assert change_of(base, base, 0.1).verdict == "pass" and change_of([0] * 20, [0] * 20, 0.1).verdict == "inconclusive"


@pytest.mark.parametrize(("change", "count"), [(0.25, 100), (-0.2, 400)])
def test_a_change_at_the_limit_is_judged_wrongly_in_five_percent_of_samples(change: float, count: int) -> None:
    """Lengths are geometric up to a cap, as of a model that ends at each token alike, and half of them stay."""
    draw = np.random.default_rng(2)

    def lengths(size: int) -> tuple[Any, Any]:
        base = draw.geometric(1 / 100, size).clip(max=300)
        other = draw.geometric(1 / (100 * (1 + 2 * change)), size).clip(max=300)
        return base, np.where(draw.random(size) < 0.5, base, other)

    base, smaller = lengths(10**6)
    limit = abs(smaller.mean() / base.mean() - 1)
    runs = 300
    verdicts = [change_of(*lengths(count), limit).verdict for _ in range(runs)]
    most = 0.05 * runs + 3 * (0.05 * 0.95 * runs) ** 0.5
    assert verdicts.count("pass") <= most and verdicts.count("fail") <= most
    clear = [change_of(*lengths(8 * count), limit / 5).verdict for _ in range(20)]
    assert clear.count("fail") >= 18
