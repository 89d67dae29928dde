"""Routing attribution by several processes that do one run together, against one process."""

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import compressor
from compressor.attribution import measure, report
from compressor.attribution.projecting import Projection, Tallies
from compressor.distributed import here, process_group
from compressor.errors import CompressionError
from compressor.recipe.step import TextOptions
from compressor.records import plain_json
from tests import small
from tests.command_line import Run
from tests.plans import pruned
from tests.test_ranks import fine, launched

pytestmark = pytest.mark.full

RARE = "#"  # a character of one document alone
ODD = "batch {} is odd"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("ranks") / "model", num_hidden_layers=2)


@pytest.fixture
def text(tmp_path: Path) -> tuple[str, ...]:
    """28 sequences in four batches, the last of them smaller."""
    return ("--calibration", str(small.text_file(tmp_path)), "--samples", "28", "--sequence-length", "24")


def written(folder: Path) -> dict[str, Any]:
    """What attribute wrote, but for the seconds that it took, and for pictures."""
    content = json.loads((folder / "attribution.json").read_text())
    assert content.pop("seconds") and content["senders"] and content["per_key"]
    files = {name: digest for name, digest in small.tree(folder).items() if not name.endswith(".png")}
    return {**files, "attribution.json": json.dumps(content)}


def test_ranks_attribute_what_one_process_does(
    run: Run, monkeypatch: pytest.MonkeyPatch, model: Path, text: tuple[str, ...], tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "png", lambda *given: b"")
    ask = ("attribute", model, *text, "--keys", 3)
    assert run(*ask, "-o", tmp_path / "alone").status == 0
    fine(launched(2, tmp_path, *ask, "-o", tmp_path / "together"))
    assert written(tmp_path / "together") == written(tmp_path / "alone")


def test_a_rank_without_a_batch_keeps_in_step(run: Run, model: Path, text: tuple[str, ...], tmp_path: Path) -> None:
    ask = ("plan", model, "--experts", 4, "--strategy", "count-guided", "--protect", "graph:3", *text, "--samples", 5)
    assert run(*ask, "-o", tmp_path / "alone.json").status == 0
    fine(launched(2, tmp_path, *ask, "-o", tmp_path / "together.json"))
    assert (tmp_path / "together.json").read_bytes() == (tmp_path / "alone.json").read_bytes()
    assert "protected" in pruned(json.loads((tmp_path / "alone.json").read_text()))


def added() -> list[float]:
    """Sums of seven batches, of two senders that not all ranks have seen."""
    values = torch.randn(7, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tallies = Tallies(2)
    for batch in sorted(here().share([torch.zeros(1)] * 7)):
        tally = tallies.of("all" if batch else "first", "expert", "layer", "module", 0)
        tally.sums += values[batch]
        tally.tokens, tally.max_norm = tally.tokens + 1, max(tally.max_norm, float(values[batch].max()))
    tallies.passed("layer")
    found = [tallies.totals[name] for name in ("first", "all")]
    assert [tally.tokens for tally in found] == [1, 6]
    assert [tally.max_norm for tally in found] == [float(values[0].max()), float(values[1:].max())]
    return [round(value, 12) for tally in found for value in tally.sums.flatten().tolist()]


def odd(projection: Projection, unit: str, batch: int, trace: Any) -> None:
    if batch % 2:
        raise CompressionError(ODD.format(batch))


def outcome(model: Path, text: Path, edges: int = 0, keys: int = 0) -> str:
    """A digest of all figures but for the rounding of sums, or why there are none."""
    data = TextOptions(data=(str(text),), samples=28, sequence_length=24)
    try:
        found = compressor.attribute(str(model), keys=keys, edges_kept=edges, calibration=data)
    except CompressionError as error:
        return f"{type(error).__name__}: {error}"
    assert len(found.score_edges) == edges and bool(found.per_key) == bool(keys)
    content = plain_json(asdict(replace(found, seconds={})), lambda value: f"{value:.9g}")
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def outcomes(model: Path, broken: Path, text: Path) -> list[str]:
    """Sums, two attributions, and what comes of each fault."""
    found = [str(added())]
    found += [outcome(model, text), outcome(model, text, edges=5, keys=2), outcome(broken, text)]
    measure.FLOAT32_TOLERANCE, tolerance = -1.0, measure.FLOAT32_TOLERANCE
    found.append(outcome(model, text))
    measure.FLOAT32_TOLERANCE = tolerance
    real = Projection.visit
    Projection.visit = odd  # type: ignore[method-assign]
    found += [outcome(model, text, edges) for edges in (0, 5)]
    Projection.visit = real  # type: ignore[method-assign]
    return found


def _catching(arguments: Sequence[Path], streams: Path, environment: Mapping[str, str], stop: Sequence[Any]) -> None:
    """A rank that goes on after each refusal; all tell what they have caught."""
    os.environ.update(environment)
    sys.stdout, sys.stderr = (streams.with_suffix(end).open("w") for end in (".out", ".err"))
    torch.set_num_threads(1)
    with process_group() as ranks:
        print(json.dumps(ranks.all_gather(outcomes(*arguments))), flush=True)


@pytest.mark.usefixtures("offline")
def test_all_ranks_find_and_refuse_the_same_and_can_go_on(model: Path, tmp_path: Path) -> None:
    text = small.text_file(tmp_path, small.TEXT[:700].replace("Document 5", f"Document {RARE}"))
    broken = small.save(tmp_path / "broken", num_hidden_layers=2)
    rare = small.tokenizer().convert_tokens_to_ids(RARE)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][rare] = torch.inf

    small.edit_tensors(broken, spoil)
    alone = outcomes(model, broken, text)
    assert "its logits are not finite on the calibration data" in alone[3] and "miss its logits" in alone[4]
    assert alone[5:] == [f"CompressionError: {ODD.format(1)}"] * 2
    for result in launched(3, tmp_path, model, broken, text, target=_catching):
        assert result.status == 0, result.err
        for caught in json.loads(result.out):
            assert caught == alone
