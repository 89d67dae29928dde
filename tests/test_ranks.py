"""Several processes that do one run together, against one process."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from compressor.ranks.present import here, owners
from compressor.ranks.together import together
from tests import small
from tests.command_line import CHILDREN, Result, Run, ended, names, refused, work


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(arguments: Sequence[str], streams: Path, environment: Mapping[str, str], stop: Sequence[Any]) -> None:
    os.environ.update(environment)
    sys.stdout, sys.stderr = (streams.with_suffix(end).open("w") for end in (".out", ".err"))
    work([str(argument) for argument in arguments], *stop)


def launched(
    size: int, folder: Path, *arguments: Any, stops: Mapping[int, Sequence[Any]] | None = None, target: Any = _rank
) -> list[Result]:
    """The command by so many ranks; those in `stops` are killed at the nth call of a function of a module."""
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for rank in range(size):
        own = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        stop = (stops or {}).get(rank, ("os", "replace", -1))
        started.append(CHILDREN.Process(target=target, args=(arguments, folder / str(rank), own, stop)))
        started[-1].start()
    return [ended(process, folder / str(rank)) for rank, process in enumerate(started)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("ranks") / "model", num_hidden_layers=4)


@pytest.fixture
def text(tmp_path: Path) -> tuple[str, ...]:
    return ("--calibration", str(small.text_file(tmp_path)), "--samples", "28", "--sequence-length", "32")


def fine(results: Sequence[Result]) -> None:
    assert [result.status for result in results] == [0] * len(results), [result.err for result in results]
    assert results[0].out and not any(result.out for result in results[1:])


@pytest.mark.parametrize(
    ("size", "ask"), [(2, ("--strategy", "auto")), (3, ("--strategy", "hub-guided", "--split", "2"))]
)
def test_the_plan_is_the_same_for_any_number_of_ranks(
    run: Run, model: Path, text: tuple[str, ...], tmp_path: Path, size: int, ask: tuple[str, ...]
) -> None:
    assert run("plan", model, "--experts", 4, *ask, *text, "-o", tmp_path / "alone.json").status == 0
    fine(launched(size, tmp_path, "plan", model, "--experts", 4, *ask, *text, "-o", tmp_path / "together.json"))
    assert (tmp_path / "together.json").read_bytes() == (tmp_path / "alone.json").read_bytes()


def test_ranks_without_a_batch_keep_in_step(run: Run, model: Path, text: tuple[str, ...], tmp_path: Path) -> None:
    few = (*text, "--samples", 6)  # a batch to fit on, and one held out
    ask = ("compress", model, "--experts", 4, "--strategy", "ream", "--sequential", "--correct", "ridge", *few)
    assert run(*ask, "-o", tmp_path / "alone").status == 0
    fine(launched(3, tmp_path, *ask, "-o", tmp_path / "together"))
    assert small.tree(tmp_path / "together") == small.tree(tmp_path / "alone")


def test_a_correction_comes_to_the_same_weights(run: Run, model: Path, text: tuple[str, ...], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    ask = ("--experts", 4, "--strategy", "reap", "--correct", "tune", *text)
    assert run("plan", model, *ask, "-o", plan).status == 0
    small.edit_json(plan, lambda content: content["correction"].update(steps=12))
    assert run("apply", plan, "-o", tmp_path / "alone").status == 0
    fine(launched(2, tmp_path, "apply", plan, "-o", tmp_path / "together"))
    alone, both = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "together"))
    for key, value in alone.items():
        torch.testing.assert_close(both[key], value, rtol=1e-2, atol=1e-2 * float(value.abs().max()), msg=key)
    plans = [json.loads((tmp_path / name / "compression.json").read_text())["plan"] for name in ("alone", "together")]
    for one, other in zip(plans[0]["layers"], plans[1]["layers"], strict=True):
        found, expected = other["figures"]["correction"], one["figures"]["correction"]
        assert found["heldout_error_ridge"] == expected["heldout_error_ridge"]  # sums in a fixed order
        assert found["heldout_error"] == pytest.approx(expected["heldout_error"], rel=1e-2)


def test_a_killed_rank_ends_the_others_and_another_number_of_them_goes_on(
    run: Run, model: Path, text: tuple[str, ...], tmp_path: Path
) -> None:
    ask = ("compress", model, "--experts", 4, "--strategy", "hc-smoe", "--correct", "none", *text)
    assert run(*ask, "-o", tmp_path / "alone").status == 0
    begin, stop = time.monotonic(), ("exporters.safetensors", "_write_unit", 2)
    first, second = launched(2, tmp_path, *ask, "-o", tmp_path / "together", stops={1: stop})
    assert time.monotonic() - begin < 60
    assert (first.status, second.status) == (2, -signal.SIGKILL)
    assert "run the same command again, with any number of ranks" in first.err
    journal = tmp_path / ".together.moe-compressor" / "moe-compressor-work.json"
    assert len(json.loads(journal.read_text())["finished"]) == 2  # by each rank one
    fine(launched(3, tmp_path, *ask, "-o", tmp_path / "together"))
    assert small.tree(tmp_path / "together") == small.tree(tmp_path / "alone")
    assert ".together.moe-compressor" not in names(tmp_path)


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (("--experts", 1), "1 experts are fewer"),
        (("--experts", 4, "--recover", "all"), "--recover is done by one process"),
    ],
)
def test_one_rank_tells_of_a_fault(
    model: Path, text: tuple[str, ...], tmp_path: Path, ask: tuple[Any, ...], sentence: str
) -> None:
    results = launched(2, tmp_path, "compress", model, *ask, *text, "-o", tmp_path / "out")
    assert [result.status for result in results] == [2, 2]
    assert sorted(len(result.err.splitlines()) for result in results) == [0, 1]
    assert sentence in results[0].err + results[1].err
    assert not [name for name in names(tmp_path) if "moe-compressor" in name or name == "out"]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("compare", "m", "-o", "x"), "moe-compress compare is done by one process; start it without torchrun"),
        (("gate", "m", "n"), "moe-compress gate is done by one process"),
        (("comoe", "evaluate", "m", "--adapters", "a"), "moe-compress comoe evaluate is done by one process"),
    ],
)
def test_what_does_not_take_part_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], sentence: str
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    refused(run(*command), sentence)


def test_a_launcher_must_have_told_the_rank(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(run("plan", "m", "--experts", 2, "-o", tmp_path / "p.json"), "WORLD_SIZE is set, but not RANK")


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 9))
def test_batches_are_dealt_out_evenly(sizes: list[int], count: int) -> None:
    found = owners(sizes, count)
    for begin in range(0, len(sizes), count):
        turn = found[begin : begin + count]
        assert len(set(turn)) == len(turn) and set(turn) <= set(range(count))
    loads = [sum(size for size, owner in zip(sizes, found, strict=True) if owner == rank) for rank in range(count)]
    assert max(loads) - min(loads) <= max(sizes)


def test_a_process_alone_is_the_first_of_one() -> None:
    with together() as ranks:
        assert ranks is not None and here().is_first and here().is_alone
        assert ranks.told(lambda: {"a": [1]}) == {"a": [1]} and ranks.listed(3) == [3]
        pieces = torch.randn(5, 3, dtype=torch.float64)
        assert torch.equal(ranks.ordered_sum(pieces[0], [0] * 5, lambda n: pieces[n]), pieces.cumsum(0)[-1])
