"""Several processes that do one run together, against one process."""

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from compressor.distributed import process_group
from compressor.errors import CompressionError
from tests.support import small
from tests.support.audit import Moment
from tests.support.command_line import CHILDREN, Result, Run, ended, names, refused, work
from tests.support.eval_tasks import own_tasks
from tests.support.fake_quantization import decompressed
from tests.support.plans import pruned

pytestmark = pytest.mark.full


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(arguments: Sequence[str], streams: Path, environment: Mapping[str, str], stop: Moment | None) -> None:
    os.environ.update(environment)
    sys.stdout, sys.stderr = (streams.with_suffix(end).open("w") for end in (".out", ".err"))
    work([str(argument) for argument in arguments], stop)


def launched(
    size: int, folder: Path, *arguments: Any, stops: Mapping[int, Moment] | None = None, target: Any = _rank
) -> list[Result]:
    """The command by so many ranks; those in `stops` are killed at a moment."""
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for rank in range(size):
        own = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        stop = (stops or {}).get(rank)
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


def both(run: Run, tmp_path: Path, size: int, *ask: Any, end: str = "") -> tuple[Path, Path]:
    """What so many ranks write, and what one process does."""
    together, alone = tmp_path / f"together{end}", tmp_path / f"alone{end}"
    assert run(*ask, "-o", alone).status == 0
    fine(launched(size, tmp_path, *ask, "-o", together))
    return together, alone


COSTS = ("seconds", "calibration_seconds", "peak_memory", "items_per_second")
FEW = ("--strategy", "count-guided", "--protect", "graph:3", "--samples", 5)  # for one rank is left without a batch

WORST = ("--strategy", "reap", "--balance", "worst", "--calibration", "demo")


@pytest.mark.parametrize(
    ("size", "ask"),
    [(2, ("--strategy", "auto")), (3, ("--strategy", "hub-guided", "--split", "2")), (2, FEW), (2, WORST)],
)
def test_the_plan_is_the_same_for_any_number_of_ranks(
    run: Run, model: Path, text: tuple[str, ...], tmp_path: Path, size: int, ask: tuple[str, ...]
) -> None:
    together, alone = both(run, tmp_path, size, "plan", model, "--experts", 4, *text, *ask, end=".json")
    assert together.read_bytes() == alone.read_bytes()


def test_a_correction_comes_to_the_same_weights(run: Run, model: Path, text: tuple[str, ...], tmp_path: Path) -> None:
    steps = ("--correct", "tune", "--set", "prune.correct.steps=10")
    ask = ("compress", model, "--experts", 4, "--strategy", "reap", *steps, *text, "--samples", 100)
    alike(*both(run, tmp_path, 3, *ask))
    record = pruned(plan_in(tmp_path / "alone"))
    assert {layer["figures"]["correction"]["kept"] for layer in record["layers"]} == {"tune"}


def stock_weights(folder: Path) -> dict[str, torch.Tensor]:
    model = decompressed(AutoModelForCausalLM.from_pretrained(folder))
    return model.state_dict()


def plan_in(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "compression.json").read_text())["plan"]
    return content


def alike(first: Path, second: Path, tolerance: float = 1e-3) -> None:
    """The same groups of experts, the same files, and weights that differ by rounding alone."""
    plans = [pruned(plan_in(folder))["layers"] for folder in (first, second)]
    assert [layer["groups"] for layer in plans[0]] == [layer["groups"] for layer in plans[1]]
    assert names(first) == names(second)
    one, two = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert one.keys() == two.keys()
    for key, value in one.items():
        assert float((value - two[key]).abs().max()) <= tolerance * float(value.abs().max()), key


def near(first: Any, second: Any) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(near(value, second[name]) for name, value in first.items())
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(near, first, second))
    if isinstance(first, float) and isinstance(second, float):
        return first == pytest.approx(second, rel=1e-4, abs=1e-6)
    return bool(first == second)


def without_costs(content: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name not in COSTS}


def told(folder: Path, name: str) -> Any:
    """A report without what it took."""
    return json.loads((folder / name).read_text(), object_hook=without_costs)


def test_an_attribution_is_the_same(run: Run, model: Path, text: tuple[str, ...], tmp_path: Path) -> None:
    folders = both(run, tmp_path, 2, "attribute", model, *text, "--keys", 3)
    one, other = (told(folder, "attribution.json") for folder in folders)
    assert one == other and one["senders"] and one["per_key"] and names(folders[0]) == names(folders[1])
    assert (folders[0] / "attribution.md").read_bytes() == (folders[1] / "attribution.md").read_bytes()


def test_a_comparison_is_the_same(run: Run, model: Path, text: tuple[str, ...], tmp_path: Path) -> None:
    ask = ("compare", model, "--ratio", 0.5, "--strategies", "hc-smoe,hub-guided", "--random-seeds", 1)
    ask = (*ask, "--correct", "none,ridge", "--evaluation-samples", 12, *text)
    together, alone = both(run, tmp_path, 2, *ask)
    assert near(told(together, "comparison.json"), told(alone, "comparison.json"))
    assert names(together) == names(alone)


def test_a_gate_gives_each_item_the_same_result(run: Run, tmp_path: Path) -> None:
    own = own_tasks(tmp_path)
    sizes = {"one": 32, "two": 24}
    one, two = (
        small.save(tmp_path / name, intermediate_size=size, max_position_embeddings=512) for name, size in sizes.items()
    )
    ask = ("gate", one, two, "--tasks", "both,moe_demo_text", "--include-path", own, "--limit", 12, "--device", "cpu",
           "--max-drop", 0.2)  # fmt: skip
    alone = run(*ask, "--stream", "-o", tmp_path / "alone", "--cache-dir", tmp_path / "first")
    ranks = launched(2, tmp_path, *ask, "-o", tmp_path / "together", "--cache-dir", tmp_path / "second")
    assert alone.status == ranks[0].status in (1, 3) and not ranks[1].status, [result.err for result in ranks]
    assert told(tmp_path / "together", "gate.json") == told(tmp_path / "alone", "gate.json")
    kept = [{file: told(tmp_path / name, file) for file in names(tmp_path / name)} for name in ("first", "second")]
    assert kept[0] == kept[1] != {}
    not_streamed = launched(2, tmp_path, *ask, "--no-stream", "--cache-dir", tmp_path / "third")
    assert [result.status for result in not_streamed] == [2, 2]
    assert "leave out --no-stream" in "".join(result.err for result in not_streamed)


def test_a_search_under_a_gate_finds_the_same(
    run: Run, model: Path, text: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ("compress", model, "--strategy", "reap", "--correct", "none", *text, "--gate", "both", "--include-path")
    ask = (*ask, own_tasks(tmp_path), "--limit", 12, "--stream")
    search = (*ask, "--search", "--max-drop", 0.8)
    fine(launched(2, tmp_path, *search, "-o", tmp_path / "together"))
    with monkeypatch.context() as patch:
        patch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "empty"))  # so that nothing that ranks found is known
        fine([run(*search, "-o", tmp_path / "alone")])
    trees = [small.tree(tmp_path / name) for name in ("alone", "together")]
    for tree in trees:
        del tree["gate.json"], tree["SHA256SUMS"]
    assert trees[0] == trees[1]
    judged = [told(tmp_path / name, "gate.json") for name in ("alone", "together")]
    assert [judged[0][name] == judged[1][name] for name in ("verdict", "tasks", "streamed")] == [True] * 3
    again = launched(2, tmp_path, *search, "-o", tmp_path / "together")
    assert [result.status for result in again] == [0, 0] and "is in place already" in again[0].err
    strict = launched(2, tmp_path, *ask, "--experts", 4, "--max-drop", 0.16, "-o", tmp_path / "strict")
    assert strict[0].status in (1, 3) and not strict[1].status, strict
    assert not (tmp_path / "strict").exists() and (tmp_path / "strict.gate" / "gate.json").is_file()


def test_routers_are_moved_alike(run: Run, model: Path, text: tuple[str, ...], tmp_path: Path) -> None:
    ask = ("compress", model, "--experts", 4, "--strategy", "reap", "--correct", "none", "--routers", "router", *text)
    sizes = {"rounds": 2, "sequences": 24, "sequence_length": 32}
    ask = (*ask, *(word for name, value in sizes.items() for word in ("--set", f"routers.{name}={value}")))
    written = [both(run, tmp_path, 2, *ask)]
    data = ("--base", model, *text[:2], "--rounds", 1, "--sequences", 9, "--sequence-length", 24)
    written.append(both(run, tmp_path, 3, "calibrate-router", tmp_path / "alone", *data, end="-again"))
    for together, alone in written:
        alike(together, alone)
        last = plan_in(alone)["steps"][-1]
        assert last["name"] == "routers" and any(step["step"] for step in last["result"]["steps"])


def test_a_distillation_comes_to_the_same_weights(run: Run, model: Path, text: tuple[str, ...], tmp_path: Path) -> None:
    small_model = tmp_path / "small"
    assert run("compress", model, "--experts", 4, "--strategy", "model-centric", "-o", small_model).status == 0
    sizes = ("--steps", 4, "--tokens-per-step", 128, "--sequence-length", 32, "--learning-rate", 1e-2)
    ask = ("distill", small_model, "--base", model, "--train", "experts", *text[:2], *sizes)
    outputs = both(run, tmp_path, 2, *ask)
    alike(*outputs)
    figures = [plan_in(output)["steps"][-1]["result"] for output in outputs]
    assert figures[0]["changed"] and near(*figures)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_weights_are_quantised_alike(run: Run, model: Path, text: tuple[str, ...], tmp_path: Path, method: str) -> None:
    ask = ("compress", model, "--experts", 4, "--strategy", "count-guided", "--correct", "none", "--quantize", "int4")
    ask = (*ask, "--set", "quantize.targets=all", "--set", f"quantize.method={method}", *text)
    together, alone = both(run, tmp_path, 3, *ask)
    if method == "rtn":
        assert small.tree(together) == small.tree(alone)
        return
    assert names(together) == names(alone)
    one, two = (stock_weights(folder) for folder in (together, alone))
    assert one.keys() == two.keys()
    for key, value in one.items():  # a sum in another order flips few roundings, and what follows from them
        assert float((value != two[key]).float().mean()) < 0.05, key
        assert float((value - two[key]).abs().mean()) <= 0.02 * float(value.abs().mean()), key


def test_a_killed_rank_ends_the_others_and_another_number_of_them_goes_on(
    run: Run, model: Path, text: tuple[str, ...], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    chosen = ("--experts", 4, "--strategy", "hc-smoe", "--correct", "none")
    assert run("plan", model, *chosen, *text, "-o", plan).status == 0
    ask = ("apply", plan)  # whose layers are written by all ranks
    assert run(*ask, "-o", tmp_path / "alone").status == 0
    stop = Moment(pattern=r"step-0/model\.layers\.2\.safetensors$")
    first, second = launched(2, tmp_path, *ask, "-o", tmp_path / "together", stops={1: stop})
    assert (first.status, second.status) == (2, -signal.SIGKILL)
    assert "run the same command again, with any number of ranks" in first.err
    made = {path.name for path in (tmp_path / ".together.moe-compressor" / "step-0").glob("*.safetensors")}
    assert "rest.safetensors" in made and "model.layers.2.safetensors" not in made
    fine(launched(3, tmp_path, *ask, "-o", tmp_path / "together"))
    assert small.tree(tmp_path / "together") == small.tree(tmp_path / "alone")
    assert ".together.moe-compressor" not in names(tmp_path)


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (("--experts", 1), "1 experts are fewer"),
        (("--experts", 4, "--routers", "auto"), "method auto is done by one process"),
        (("--experts", 4, "--format", "mone"), "the step constants is done by one process"),
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
        (("export", "m", "-o", "x"), "moe-compress export is done by one process; start it without torchrun"),
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


def _failing(arguments: Sequence[Any], streams: Path, environment: Mapping[str, str], stop: Moment | None) -> None:
    os.environ.update(environment)
    sys.stdout, sys.stderr = (streams.with_suffix(end).open("w") for end in (".out", ".err"))
    try:
        with process_group() as ranks:
            if ranks.rank in arguments[0]:
                raise CompressionError(f"a fault of rank {ranks.rank}")
            ranks.barrier()
    except CompressionError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error


@pytest.mark.parametrize(("failing", "speaks"), [((0, 1, 2), 0), ((1,), 1), ((0,), 0), ((0, 2), 0)])
def test_all_ranks_end_and_one_says_why(tmp_path: Path, failing: tuple[int, ...], speaks: int) -> None:
    results = launched(3, tmp_path, failing, target=_failing)
    assert [result.status for result in results] == [2, 2, 2]
    expected = [f"a fault of rank {speaks}\n" if rank == speaks else "" for rank in range(3)]
    assert [result.err for result in results] == expected
