"""Where nobody says how often to split, `auto` splits experts whose parts suit servers, and nothing else does."""

import json
from pathlib import Path
from typing import Any

import pytest

import compressor
from compressor.checkpoint.source import locate
from compressor.model.opened import open_model
from compressor.planning.finer import with_parts
from compressor.planning.request import Request
from tests import small
from tests.small import tree

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("home") / "model", intermediate_size=512)


def parts(model: Path, **asked: Any) -> tuple[int | None, int | None]:
    found = with_parts(open_model(locate(str(model))), Request(**asked))
    return found.split, found.experts


def test_auto_keeps_as_many_experts_as_whole_ones_would_weigh(model: Path, tmp_path: Path) -> None:
    asked = {"calibration": str(small.text_file(tmp_path)), "samples": 8, "sequence_length": 32, "correct": "none"}
    done = compressor.compress(str(model), tmp_path / "out", experts=4, **asked)
    assert (done.experts_before, done.experts_after) == (16, 8)
    compressor.compress(str(model), tmp_path / "said", experts=8, split=2, **asked)
    assert tree(tmp_path / "out") == tree(tmp_path / "said")
    whole = compressor.compress(str(model), tmp_path / "whole", experts=4, split=1, **asked)
    assert (whole.experts_before, whole.experts_after) == (8, 4)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert (config["num_local_experts"], config["intermediate_size"]) == (4, 512)
    sizes = [sum(path.stat().st_size for path in (tmp_path / made).glob("*.safetensors")) for made in ("out", "whole")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def test_it_is_left_to_what_suits(model: Path, tmp_path: Path) -> None:
    assert parts(model, experts=4) == (2, 8)
    assert parts(model, ratio=0.5) == (2, None)
    assert parts(model) == (2, None)  # a search for the number
    assert parts(model, experts=4, split=1) == (1, 4)
    assert parts(model, experts=4, strategy="gated-mass") == (1, 4)
    assert parts(model, experts=4, top_k=1) == (1, 4)
    assert parts(model, experts=4, constants=True) == (1, 4)
    assert parts(model, experts=99) == (1, 99)  # which is refused afterwards
    narrow = small.save(tmp_path / "narrow", intermediate_size=256)  # parts of 128 are larger as K-quants
    assert parts(narrow, experts=4) == (1, 4)
    grouped = small.save(tmp_path / "grouped", "deepseek_v3", moe_intermediate_size=512)
    assert parts(grouped, experts=8)[0] == 1
