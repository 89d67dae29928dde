"""Patterns of quantization configs: those in use pass, those that backtrack for ever do not."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from compressor.errors import CompressionError
from compressor.model.patterns import body_of, refuse_slow_patterns

NAMES = ("model.layers.10.mlp.experts.100.gate_up_proj.weight_scale_inv", "model.layers.10.self_attn.q_proj", "a" * 60)
LAYERS = "|".join(map(str, range(61)))
USUAL = [
    "lm_head", "model.layers.0.mlp.gate", "re:.*lm_head", "re:.*mlp.gate$", r"re:.*\.experts\..*\.down_proj$", "Linear",
    r"re:.*layers\.\d+\.mlp\.experts\.\d+\..*_proj", "re:.*layers.*mlp.*(gate|up|down)_proj.*", "model.layers.*.gate",
    rf"re:(?:.*\.)?layers\.({LAYERS})\..*(q|k|v|o)_proj", r"-:.*\.(q|k|v)_proj", r"re:^(?!.*(experts|router)).*$",
    r"+:model\.layers\.(1[0-9]|2[0-3])\..*", "re:(", "per-channel (symmetric)",
]  # fmt: skip
ENDLESS = [
    "(a+)+$", "re:([a-z.]+)+!", "(a|a)*!", "(a|aa)+!", "((?:ab?)*)*!", "+:(.*)*!", ".?" * 40 + "!", "(.|.)" * 40 + "!",
    "(?=(a+)+!)", "(?>(a+)+!)", "(?i:(a|A|aa))" * 40 + "!", "[a-z.]+)+(?:!", ".*" * 9 + "!", "(?:(?:){65535}){65535}",
]  # fmt: skip


@pytest.mark.parametrize("text", USUAL)
def test_patterns_in_use_pass_and_are_quick(text: str) -> None:
    refuse_slow_patterns({"ignore": [text], "config_groups": {text: {"targets": ["Linear", text]}}})


@pytest.mark.parametrize("text", ENDLESS)
def test_a_pattern_that_may_take_for_ever_is_refused_wherever_it_stands(text: str) -> None:
    places: list[Any] = [[text], {"ignore": ["lm_head", text]}, {text: {"bits": 4}}, {"a": {"b": [{"c": text}]}}]
    for place in places:
        with pytest.raises(CompressionError, match=re.escape(repr(text))):
            refuse_slow_patterns(place)


def test_many_patterns_count_together() -> None:
    one = ".*a.*b.*c.*d"
    refuse_slow_patterns([one])
    with pytest.raises(CompressionError, match="take for ever"):
        refuse_slow_patterns([one] * 50)
    refuse_slow_patterns(["model.layers.0.mlp.gate"] * 100_000)


def test_a_text_too_long_for_a_name_is_refused() -> None:
    with pytest.raises(CompressionError, match="take for ever"):
        refuse_slow_patterns(["a." * 10_000])


def test_what_passes_matches_soon() -> None:
    """Under a time limit of its own: every usual pattern, as transformers wraps it, on names that it does not fit."""
    patterns = [f"(?:{body_of(text)})!" for text in USUAL if text != "re:("]
    code = "import json, re, sys\nfor p, n in json.load(sys.stdin): re.match(p, n)"
    given = json.dumps([(pattern, name) for pattern in patterns for name in NAMES])
    subprocess.run([sys.executable, "-c", code], input=given, text=True, timeout=60, check=True)
