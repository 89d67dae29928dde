"""Every reader of files that others wrote, with files that none should take: one sentence, exit status 2, no harm.

A new reader is a function in `READERS` that returns the arguments of a command which reads the file, and an entry of
`CASES`. Nothing is imported, and nothing outside the folder is opened; `outside` has what would show it.
"""

import gzip
import hashlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.checkpoint.digests import HEADING, write_digests
from compressor.errors import CompressionError
from compressor.files import file_digest
from compressor.golden.answers import BANDS, FORMAT
from compressor.pipeline.verify import verify_digests
from compressor.plain_yaml import read_yaml, yaml_text
from compressor.recipe.plan import LayerPlan, Source
from compressor.records import Share, value_as
from tests.compressor.recipe.test_plan import moe_layer
from tests.support import small
from tests.support.audit import paths_of
from tests.support.command_line import Run
from tests.support.plans import Decided, by_hand

pytestmark = pytest.mark.usefixtures("offline")
SECONDS = 30  # that a command may take, on a busy machine
PYTHON = re.compile(
    r"object (has no attribute|is not)|NoneType|indices must be|unhashable|KeyError|TypeError|ValueError|Traceback"
    r"|not subscriptable|could not convert|invalid literal|keywords must|not enough values|out of range|<class|set_int"
)
Content = bytes | Callable[[Path], object]  # of the file, or what writes it


class Hang(BaseException):
    """Raised where a command takes too long."""


@contextmanager
def in_time() -> Iterator[None]:
    def late(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("malformed") / "model", "qwen3_moe")


def results(file: Path, model: Path) -> Sequence[Any]:
    return "gate", "results", file, file


def baseline(file: Path, model: Path) -> Sequence[Any]:
    return "gate", "--baseline", file, "--dry-run", "--inconclusive", "pass"


def golden(file: Path, model: Path) -> Sequence[Any]:
    return "check", model, "--answers", file


def sums(file: Path, model: Path) -> Sequence[Any]:
    return "push", file.parent, "me/model", "--dry-run"


def suite(file: Path, model: Path) -> Sequence[Any]:
    return "gate", "--suite", file, "--dry-run", "--inconclusive", "pass"


def blend(file: Path, model: Path) -> Sequence[Any]:
    return "text", file


def lists(file: Path, model: Path) -> Sequence[Any]:
    number = ("--experts", 4) if file.suffix == ".pt" else ()
    return "plan", model, "-o", file.with_name("made.json"), "--from", file, *number


def plan(file: Path, model: Path) -> Sequence[Any]:
    return "apply", file, "-o", file.with_name("made")


def recipe(file: Path, model: Path) -> Sequence[Any]:
    return "compress", file, "-o", file.with_name("made"), "--dry-run"


def protect(file: Path, model: Path) -> Sequence[Any]:
    chosen = ("--strategy", "aimer", "--experts", 4, "--correct", "none")
    return "plan", model, "-o", file.with_name("made.json"), *chosen, "--protect", file


def prompts(file: Path, model: Path) -> Sequence[Any]:
    return "evaluate", model, model, "--prompts", file, "--strict", "--max-new-tokens", 1


READERS = {
    reader.__name__: reader
    for reader in (results, baseline, golden, sums, suite, blend, lists, plan, recipe, protect, prompts)
}
NAMED = (".jsonl", ".pt", ".gz")  # at the end of a case
SUFFIXES = {"suite": ".yaml", "blend": ".yaml", "recipe": ".yaml", "prompts": ".jsonl"}

ITEMS = {
    "id": ["0", "1"], "score": [1.0, 0.0], "weight": [1.0, 1.0], "content": ["", ""], "prompt": ["", ""]
}  # fmt: skip
FORM = {
    "chat_template": None, "chat_template_sha256": None, "num_fewshot": [0], "fewshot_as_multiturn": False,
    "system_instruction": None, "enable_thinking": None, "think_end_token": None, "gen_kwargs": None, "seed": None,
    "repeats": 1,
}  # fmt: skip
TASK = "moe_demo_facts"
SCORES = {"task": TASK, "metric": "acc", "version": "1", "kind": "score", "items": ITEMS}
BASELINE = {
    "format": "moe-compressor-baseline/1", "base": "b", "identity": {}, "settings": {"tasks": [TASK]},
    "facts": {}, "versions": {}, "tasks": [SCORES], "asked": {TASK: FORM},
}  # fmt: skip
TOP = {"tokens": [3, 4, 5], "logs": [-0.5, -1.5, -2.0]}
GOLDEN = {
    "format": FORMAT, "vocabulary": small.VOCABULARY, "parameters": 1, "dtype": "float32", "rounds_inputs": False,
    "prompts": [{"ids": [1, 2], "positions": [1], "top": [TOP]}],
    "bands": {name: [0.0] for name in BANDS}, "texts": {}, "is_chat": False, "config": {},
    "fingerprints": {},
}  # fmt: skip
LISTS = {"0": [0, 1, 2, 3], "1": [0, 1, 2, 3]}
NAN = float("nan")
HUGE = 10**400
GENERIC: dict[str, Content] = {
    "nothing": b"",
    "no UTF-8": b"\xff\xfe\x00{",
    "null": b"null",
    "a number": b"3",
    "text": b'"text"',
    "nested deeply": b"[" * 100_000,
    "fields nested deeply": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "endless digits": b"[" + b"9" * 5_000 + b"]",
    "a folder": lambda path: path.mkdir(),
    "no file": lambda path: None,
}
JSON: dict[str, Content] = {"cut off": b'{"a": 1', "a list of lists": b"[[]]", "a list of null": b"[null]"}
YAML: dict[str, Content] = {
    "a tag of Python": b"!!python/object/apply:os.system ['touch outside/imported']",
    "a tag": b"tasks: !function outside.run",
    "a key twice": b"{tasks: [a], tasks: [b]}",
    "itself": b"&a [*a]",
    "a bomb": b"a0: &a0 [1, 1]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 40)),
    "a NUL": b"tasks: \x00",
    "two documents": b"a: 1\n---\na: 2",
    "a list as a key": b"? [a]\n: b",
    "cut off": b"{tasks: [a",
    "many values": b"[" + b"1," * 200_000 + b"]",
}


def set_at(content: Any, *path: Any) -> bytes:
    """The JSON of some content with the last of the arguments at the place that the others name."""
    *steps, last, value = path
    content = deepcopy(content)
    owner = content
    for step in steps:
        owner = owner[step]
    owner[last] = value
    return json.dumps(content).encode()


def at(content: Any, places: Mapping[str, Sequence[Any]]) -> dict[str, Content]:
    return {name: set_at(content, *path) for name, path in places.items()}


def misfits(content: Any, *places: str) -> dict[str, Content]:
    """What is neither text, an object, a list nor a finite number, at each of the places."""
    cases = dict[str, Content]()
    for place in places:
        path = [int(name) if name.isdecimal() else name for name in place.split("/")]
        for value in (None, True, "NaN", NAN, HUGE):
            cases[f"{place} is {str(value)[:5]}"] = set_at(content, *path, value)
    return cases


class Call:
    """Runs a command where a pickle of it is loaded without care."""

    def __reduce__(self) -> Any:
        return os.system, ("touch outside/imported",)


def pickled(content: Any) -> Content:
    return lambda path: torch.save(content, path)


def listing(lines: Callable[[Path], str]) -> Content:
    """A list of digests with a heading that fits, of a folder with a model."""

    def write(path: Path) -> None:
        body = lines(path.parent)
        digest = hashlib.sha256(body.encode()).hexdigest()
        path.write_text(f"{HEADING}{digest}\n{body}", encoding="utf-8")

    return write


def digest_lines(folder: Path, *left_out: str) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.name not in ("SHA256SUMS", *left_out))
    return "".join(f"{file_digest(folder / name)}  {name}\n" for name in names)


KEPT = LayerPlan.keep(moe_layer(0), [0, 1, 2, 3])
DECIDED = Decided(Source("m", None, "f" * 64), 4, "aimer", {}, {"source": "t", "sha256": "a"}, (KEPT,))
PLAN = json.loads(by_hand(DECIDED).to_json())
LAYER = ("steps", 0, "plan", "layers", 0)
OUTSIDE = "../outside/secret.txt"
CASES: dict[str, dict[str, Content]] = {
    "baseline": {
        **GENERIC,
        **JSON,
        **misfits(BASELINE, "settings", "tasks", "tasks/0/items", "tasks/0/items/score", "tasks/0/items/score/0"),
        **misfits(BASELINE, "format", f"asked/{TASK}"),
        **at(
            BASELINE,
            {
                "another format": ("format", "moe-compressor-gate/2"),
                "code to run": ("settings", {"tasks": ["evil"], "include_path": "outside"}),
                "code that is confirmed": ("settings", "confirm_run_unsafe_code", True),
                "a margin": ("settings", "max_drop", 0.9),
                "a margin of tasks": ("settings", "max_task_drop", 1.0),
                "an undecided gate passes": ("settings", "inconclusive", "pass"),
                "another confidence": ("settings", "confidence", 0.51),
                "a suite": ("settings", "suite", "outside/suite.yaml"),
                "a baseline": ("settings", "baseline", OUTSIDE),
                "prompts": ("settings", "prompts", [OUTSIDE]),
                "a server": ("settings", "server", "http://localhost:1"),
                "settings that load code": ("settings", "gen_kwargs", {"custom_generate": "me/code"}),
                "trust": ("settings", "gen_kwargs", {"trust_remote_code": True}),
                "an odd temperature": ("settings", "gen_kwargs", {"temperature": NAN}),
                "a limit of text": ("settings", "limit", "many"),
                "a huge limit": ("settings", "limit", HUGE),
                "a weight of nothing": ("tasks", 0, "items", "weight", [0.0, 1.0]),
                "an item twice": ("tasks", 0, "items", "id", ["0", "0"]),
                "a short column": ("tasks", 0, "items", "id", ["0"]),
                "a task twice": ("tasks", [SCORES, SCORES]),
                "a task that was not asked": ("asked", {}),
                "few-shot examples of text": ("asked", TASK, "num_fewshot", ["many"]),
                "chance of more than 1": ("tasks", 0, "chance", 2.0),
                "half a character as a task": ("settings", "tasks", ["\ud800"]),
                "another field": ("max_drop", 0.9),
            },
        ),
        "a bomb.json.gz": gzip.compress(b" " * 2**28),
        "cut off.json.gz": gzip.compress(json.dumps(BASELINE).encode())[:-20],
        "not packed.json.gz": json.dumps(BASELINE).encode(),
    },
    "golden": {
        **GENERIC,
        **JSON,
        **misfits(GOLDEN, "format", "prompts", "prompts/0/ids", "prompts/0/ids/0", "prompts/0/top/0/logs/0"),
        **misfits(GOLDEN, "vocabulary", "texts", "config", "bands/8-bit/0"),
        **at(
            GOLDEN,
            {
                "a probability above 1": ("prompts", 0, "top", 0, "logs", [5.0, -1.0, -2.0]),
                "fewer logs": ("prompts", 0, "top", 0, "logs", [-1.0]),
                "no tokens": ("prompts", 0, "top", 0, {"tokens": [], "logs": []}),
                "a token twice": ("prompts", 0, "top", 0, "tokens", [3, 3, 4]),
                "an id below 0": ("prompts", 0, "ids", [1, -2]),
                "an id beyond the vocabulary": ("prompts", 0, "ids", [1, 10**6]),
                "an id that is a float": ("prompts", 0, "ids", [1, 2.5]),
                "200,000 ids": ("prompts", 0, {"ids": [1] * 200_000, "positions": [199_999], "top": [TOP]}),
                "an answer after no token": ("prompts", 0, "positions", [2]),
                "more of its own than there are": ("prompts", 0, "continued", 9),
                "a band below 0": ("bands", "8-bit", [-1.0]),
                "a band less": ("bands", {"8-bit": [0.0]}),
                "texts of no number": ("texts", {"a": "b"}),
                "a vocabulary of none": ("vocabulary", 0),
            },
        ),
        "20 MB": b'{"format": 2, "a": "' + b"x" * 20_000_000 + b'"}',
        "a byte order mark and null": b"\xef\xbb\xbfnull",
    },
    "sums": {
        "nothing": b"",
        "no heading": b"0" * 64 + b"  config.json\n",
        "an empty list": listing(lambda folder: ""),
        "one file of all": listing(lambda folder: digest_lines(folder, "model.safetensors")),
        "weights alone": listing(lambda folder: f"{file_digest(folder / 'model.safetensors')}  model.safetensors\n"),
        "a name twice": listing(lambda folder: digest_lines(folder) + digest_lines(folder)),
        "a name outside": listing(
            lambda folder: digest_lines(folder) + f"{'0' * 64}  {OUTSIDE}\n"
        ),
        "a name from the root": listing(lambda folder: digest_lines(folder) + f"{'0' * 64}  /etc/passwd\n"),
        "a file that is missing": listing(lambda folder: digest_lines(folder) + f"{'0' * 64}  more.json\n"),
        "another digest": listing(lambda folder: f"{'0' * 64}  config.json\n" + digest_lines(folder, "config.json")),
        "a line of nothing": listing(lambda folder: "\n" + digest_lines(folder)),
        "a line of text": listing(lambda folder: digest_lines(folder) + "and so on\n"),
        "a short digest": listing(lambda folder: digest_lines(folder) + "00  more.json\n"),
        "300,000 names": listing(lambda folder: "".join(f"{'0' * 64}  {n}.json\n" for n in range(300_000))),
    },
    "lists": {
        **GENERIC,
        **JSON,
        "an empty list": b"{}",
        "more layers than there are": set_at(LISTS, "2", [0, 1, 2, 3]),
        "text as a list": set_at(LISTS, "0", "0123"),
        "floats": set_at(LISTS, "0", [0.9, 1.0, 2.0, 3.0]),
        "a number in text": set_at(LISTS, "0", ["0", 1, 2, 3]),
        "true": set_at(LISTS, "0", [True, 2, 3, 4]),
        "an expert twice": set_at(LISTS, "0", [0, 0, 1, 2]),
        "an expert below 0": set_at(LISTS, "0", [-1, 1, 2, 3]),
        "an expert that there is not": set_at(LISTS, "0", [8, 1, 2, 3]),
        "an expert of 400 digits": set_at(LISTS, "0", [HUGE, 1, 2, 3]),
        "a layer twice": set_at(LISTS, "main_0", [4, 5, 6, 7]),
        "a layer twice by zeros": set_at(LISTS, "00", [4, 5, 6, 7]),
        "a layer of 400 digits": set_at(LISTS, "9" * 400, [0, 1, 2, 3]),
        "null": set_at(LISTS, "0", None),
        "a list in a list": set_at(LISTS, "0", [[0], 1, 2, 3]),
        "no keep": set_at(LISTS, "0", {"kept": [0, 1]}),
        "keep that is null": set_at(LISTS, "0", {"keep": None}),
        "no experts": set_at(LISTS, "0", []),
        "lists of unlike length": set_at(LISTS, "0", [0, 1, 2]),
        "half a line.jsonl": b'{"0": [0, 1, 2, 3]}\n{"1": [0',
        "a line of a list.jsonl": b'{"0": [0, 1, 2, 3]}\n[1]',
        "a layer in two lines.jsonl": b'{"0": [0, 1, 2, 3]}\n{"0": [0, 1, 2, 4]}',
        "noise.pt": b"noise",
        "code.pt": pickled(Call()),
        "a list.pt": pickled([1]),
        "saliencies of NaN.pt": pickled({0: {"reap": torch.tensor([1.0, NAN, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])}}),
        "an infinite saliency.pt": pickled({0: {"reap": torch.tensor([1.0, float("inf")])}}),
        "saliencies of text.pt": pickled({0: {"reap": "12345678"}}),
        "saliencies of null.pt": pickled({0: None}),
        "a layer that is no number.pt": pickled({"x": {"reap": torch.ones(8)}}),
        "a layer in two forms.pt": pickled({0: {"reap": torch.ones(8)}, "0": {"reap": torch.ones(8)}}),
        "a table of saliencies.pt": pickled({0: {"reap": torch.ones(2, 4)}}),
        "more layers than there are.pt": pickled({layer: {"reap": torch.ones(8)} for layer in range(3)}),
    },
    "results": {
        "nothing": b"",
        "no UTF-8": b"\xff\xfe\x00{",
        "null": b"null",
        "a number": b"3",
        "a list": b"[]",
        "nested deeply": b"[" * 100_000,
        "a folder": lambda path: path.mkdir(),
        "no file": lambda path: None,
        "samples that are null": b'{"samples": null}',
        "problems that are null": b'{"eval": null}',
        "problems that are a list": b'{"eval": [1]}',
    },
    "suite": {
        **GENERIC,
        **YAML,
        "no tasks": b"tasks: []",
        "tasks of text": b"tasks: gsm8k",
        "a task that is a number": b"tasks: [3]",
        "a task twice": f"tasks: [{TASK}, {TASK}]".encode(),
        "code to run": b"tasks: [evil]\ninclude_path: outside",
        "code that is confirmed": b"tasks: [evil]\nconfirm_run_unsafe_code: true",
        "a margin": f"tasks: [{TASK}]\nmax_drop: 0.9".encode(),
        "an undecided gate passes": f"tasks: [{TASK}]\ninconclusive: pass".encode(),
        "a folder of another's": b"tasks: [outside/evil.yaml]",
        "settings that load code": f"tasks: [{TASK}]\ngen_kwargs: {{custom_generate: me/code}}".encode(),
        "a limit of 400 digits": f"tasks: [{TASK}]\nlimit: {HUGE}".encode(),
        "an odd tolerance": f"model_name: a\nrtol: .nan\ntasks: [{{name: {TASK}}}]".encode(),
        "a tolerance of text": f"model_name: a\nrtol: much\ntasks: [{{name: {TASK}}}]".encode(),
        "a score of NaN": f"tasks: [{{name: {TASK}, metrics: [{{name: acc, value: .nan}}]}}]".encode(),
        "metrics that are null": f"tasks: [{{name: {TASK}, metrics: null}}]".encode(),
        "a suite in a suite": f"tasks: [{TASK}]\nsuite: chat".encode(),
        "settings": f"tasks: [{TASK}]\nsettings: {{a: 1}}".encode(),
    },
    "blend": {
        **GENERIC,
        **YAML,
        "a source alone": b"[a.txt]",
        "a weight of NaN": b"[{source: a.txt, weight: .nan}]",
        "an infinite weight": b"[{source: a.txt, weight: .inf}]",
        "a weight of text": b"[{source: a.txt, weight: much}]",
        "a weight of nothing": b"[{source: a.txt, weight: 0}]",
        "a weight of 400 digits": f"[{{source: a.txt, weight: {HUGE}}}]".encode(),
        "a weight that is true": b"[{source: a.txt, weight: true}]",
        "an option of text": b"[{source: a.txt, weight: 1, strict: false}]",
        "a source without a name": b"[{source: ' ', weight: 1}]",
        "a source that is null": b"[{source: null, weight: 1}]",
        "a key of a number": b"[{1: a.txt, weight: 1}]",
        "a source twice": b"[{source: a.txt, weight: 1}, {source: a.txt, weight: 1}]",
    },
    "recipe": {
        **GENERIC,
        **YAML,
        "a list": b"[prune]",
        "another field": b"model: m\ntrust_remote_code: true",
        "a step that is a number": b"model: m\nsteps: [3]",
        "a ratio of NaN": b"model: m\nsteps: [prune: {ratio: .nan}]",
        "a seed of 400 digits": f"model: m\nseed: {HUGE}".encode(),
        "a seed that is true": b"model: m\nseed: true",
        "a key of a number": b"model: m\n3: 4",
        "options that are a list": b"model: m\nsteps: [prune: [1]]",
    },
    "protect": {
        **GENERIC,
        **JSON,
        "an object": b"{}",
        "an expert of text": b'[{"layer": 0, "expert": "1"}]',
        "an expert that there is not": b'[{"layer": 0, "expert": 99}]',
        "an expert of 400 digits": f'[{{"layer": 0, "expert": {HUGE}}}]'.encode(),
        "a layer that there is not": b'[{"layer": 9, "expert": 1}]',
        "a layer that is true": b'[{"layer": true, "expert": 1}]',
        "a module that is a list": b'[{"layer": 0, "expert": 1, "module": []}]',
    },
    "plan": {
        **GENERIC,
        **JSON,
        **misfits(PLAN, "format", "steps", "steps/0", "steps/0/options", "steps/0/stage", "seed", "source"),
        **misfits(PLAN, *(f"steps/0/plan/{place}" for place in ("layers", "layers/0", "layers/0/groups"))),
        **misfits(PLAN, *(f"steps/0/plan/layers/0/groups/0{place}" for place in ("", "/members", "/members/0"))),
        **misfits(PLAN, "steps/0/plan/layers/0/groups/0/coefficients/0", "steps/0/plan/experts"),
        **at(
            PLAN,
            {
                "another format": ("format", "moe-compressor-plan/1"),
                "a decision that is a number": ("steps", 0, "plan", 3),
                "a member twice": (*LAYER, "groups", 0, "members", [0, 0]),
                "a coefficient of 1e308": (*LAYER, "groups", 0, "coefficients", [1e308]),
                "a scale of infinity": (*LAYER, "groups", 0, "scale", float("inf")),
                "a scale of 1e308": (*LAYER, "groups", 0, "scale", 1e308),
                "dropped that is a number": (*LAYER, "dropped", 5),
                "dropped that names a list": (*LAYER, "dropped", [[1]]),
                "a layer of more experts than any": (*LAYER, "experts", 10**9),
                "another field": ("trust_remote_code", True),
                "a stage": ("steps", 0, "stage", 0),
                "calibration of nothing": ("calibration", {}),
                "a step that is not there": ("steps", 0, "name", "os.system"),
            },
        ),
    },
    "prompts": {
        "no UTF-8": b"\xff\xfe\x00{",
        "nested deeply": b'{"prompt": "a"}\n{"messages": ' + b"[" * 50_000,
        "tools nested deeply": b'{"prompt": "a", "tools": [' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"]}",
        "messages nested deeply": (
            b'{"messages": [{"role": "user", "content": "a", "b": ' + b"[" * 950 + b"]" * 950 + b"}]}"
        ),
        "endless digits": b'{"prompt": ' + b"9" * 5_000 + b"}",
        "a number": b'{"prompt": 3}',
        "messages of numbers": b'{"messages": [3]}',
        "messages of null": b'{"messages": null}',
        "half a character": b'{"prompt": "\\ud800"}',
        "a list": b"[1]\n[2]",
        "no file": lambda path: None,
    },
}  # fmt: skip


def test_the_table_has_every_reader_and_enough_files() -> None:
    assert sum(map(len, CASES.values())) >= 120
    assert {*CASES} == {*READERS}


# Reading such a file takes seconds.
PAIRS = [
    pytest.param(reader, name, marks=(pytest.mark.full,) if name == "many values" else ())
    for reader, cases in CASES.items()
    for name in cases
]


@pytest.mark.parametrize(("reader", "name"), PAIRS)
def test_malformed_files_are_refused_in_one_sentence(
    reader: str, name: str, run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    for file in ("evil.yaml", "evil.py", "suite.yaml"):
        (outside / file).write_text("raise SystemExit(9)\n")
    (outside / "secret.txt").write_text("secret")
    folder = tmp_path / "folder"
    folder.mkdir()
    suffix = "".join(Path(name).suffixes) if name.endswith(NAMED) else SUFFIXES.get(reader, ".json")
    path = folder / f"file{suffix}"
    if reader == "sums":
        small.save(folder, "qwen3_moe")
        path = folder / "SHA256SUMS"
    content = CASES[reader][name]
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    before = sorted(folder.rglob("*"))
    with in_time(), paths_of("open", "/outside/") as opened:
        result = run(*READERS[reader](path, model))
    *_, last = result.err.splitlines() or [""]
    assert (result.status, result.out) == (2, ""), result
    assert last.startswith("Error: ") and result.err.count("Error: ") == 1, result.err
    assert not PYTHON.search(result.err), result.err
    assert len(last) < 1_500, len(last)
    assert sorted(folder.rglob("*")) == before
    assert not opened and not (outside / "imported").exists()


@pytest.mark.parametrize("name", [b"a\xff.jinja", b"a\nb.jinja", "a\u2028b.jinja".encode()])
def test_odd_names_of_a_base_are_refused_at_the_start(name: bytes, run: Run, tmp_path: Path) -> None:
    folder = small.save(tmp_path / "model", "qwen3_moe")
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    (Path(os.fsdecode(os.fsencode(templates) + b"/" + name))).write_text("{{ messages }}")
    asked = ("--experts", 4, "--strategy", "aimer", "--correct", "none", "--no-evaluate")
    result = run("compress", folder, "-o", tmp_path / "out", *asked)
    assert result.status == 2 and "line break or is no UTF-8; rename" in result.err, result
    assert not (tmp_path / "out").exists()


def test_yaml_says_numbers_as_people_write_them_and_text_comes_back(tmp_path: Path) -> None:
    content = {"a": "5e-2", "b": 5e-2, "c": "12e45", "d": "2026-01-01", "e": [1e-30, "1_000", "yes", None]}
    (tmp_path / "a.yaml").write_text(yaml_text(content))
    assert read_yaml(tmp_path / "a.yaml", "a.yaml") == content
    (tmp_path / "b.yaml").write_bytes(b"\xef\xbb\xbfa: 5e-2\nb: 1.5E3\nc: -2e+1\n")
    assert read_yaml(tmp_path / "b.yaml", "b.yaml") == {"a": 0.05, "b": 1500.0, "c": -20.0}


@given(st.one_of(st.integers(), st.floats(), st.booleans(), st.text()))
def test_a_share_is_a_finite_number_from_0_to_1(value: Any) -> None:
    if type(value) in (int, float) and 0 <= value <= 1:
        assert value_as(value, Share, "a") == value
    else:
        with pytest.raises(CompressionError, match=r"^a should be (a number|less|greater)"):
            value_as(value, Share, "a")


def test_files_without_a_digest_are_named_and_those_that_loaders_read_are_faults(tmp_path: Path) -> None:
    folder = small.save(tmp_path / "model", "qwen3_moe")
    write_digests(folder)
    (folder / "notes.txt").write_text("seen")
    result = verify_digests(folder)
    assert result.passed and result.unlisted == ("notes.txt",)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert verify_digests(folder).faults == ("chat_template.jinja is not listed in SHA256SUMS",)
