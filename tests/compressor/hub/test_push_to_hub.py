import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM

from compressor.data.demo import demo_checkpoint
from tests.support import small
from tests.support.command_line import Run, names, refused, succeeded
from tests.support.hub import Fault, Hub
from tests.support.hub_pushes import CANARY, REPOSITORY, content, logged_in, writes

pytestmark = pytest.mark.usefixtures("own_cache")

TASK = "moe_demo_sorting"  # which survives nearly everything
CALIBRATION = ("--calibration", "demo", "--samples", 32, "--sequence-length", 128, "--strategy", "count-guided")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with logged_in() as running:
        yield running


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    (tmp_path / "work").mkdir()
    return small.save(tmp_path / "model")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with demo_checkpoint() as folder:
        return Path(shutil.copytree(folder, tmp_path_factory.mktemp("base") / "original"))


def ask(model: Path, out: Path, *more: object) -> tuple[object, ...]:
    return ("compress", model, "-o", out, "--experts", 4, "--strategy", "model-centric", *more)


def test_a_licence_that_the_hub_lacks_is_told_before_the_run(run: Run, model: Path, hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "work" / "smaller"
    (model / "README.md").write_text("---\nlicense: house-terms\n---\n")
    told = succeeded(run(*ask(model, out, "--push-to-hub", REPOSITORY))).err
    assert "lacks 'house-terms'" in told.partition("plan")[0].partition("write")[0]
    card = hub.repositories[REPOSITORY].files()["README.md"].decode()
    assert "license: other\nlicense_name: house-terms\n" in card


def test_the_card_can_be_read_before_it_is_sent(run: Run, model: Path, hub: Hub, tmp_path: Path) -> None:
    out, card = tmp_path / "work" / "smaller", tmp_path / "card.md"
    succeeded(run(*ask(model, out)))
    shown = succeeded(run("push", out, REPOSITORY, "--dry-run", "--card", card))
    assert f"Written: {card}" in shown.out.replace("\n", " ") and REPOSITORY not in hub.repositories
    refused(run("push", out, REPOSITORY, "--dry-run", "--card", card), "exists; .*--card")
    succeeded(run("push", out, REPOSITORY))
    assert hub.repositories[REPOSITORY].files()["README.md"] == card.read_bytes()


def test_one_command_makes_and_publishes_what_comes_back(run: Run, model: Path, hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "work" / "smaller"
    result = run(*ask(model, out, "--push-to-hub", REPOSITORY, "--private", "--json"))
    assert (result.status, result.err) == (0, ""), result
    found = json.loads(result.out)
    there = hub.repositories[REPOSITORY]
    assert there.private and found["push"]["commit"] == there.branches["main"]
    assert content(out).items() <= there.files().items()
    card = there.files()["README.md"].decode()
    assert "moe-compress compress model -o smaller --experts 4" in card and str(tmp_path) not in card
    again = run("push", out, REPOSITORY)
    assert again.status == 0 and "Nothing has changed" in again.out
    back = Path(huggingface_hub.snapshot_download(REPOSITORY, local_dir=tmp_path / "back"))
    for path in out.iterdir():
        assert (back / path.name).read_bytes() == path.read_bytes()
    tokens = torch.arange(12)[None]
    one, two = (AutoModelForCausalLM.from_pretrained(place)(tokens).logits for place in (out, back))
    assert torch.equal(one, two)


def test_a_report_holds_no_token(run: Run, model: Path, hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "work" / "smaller"
    (tmp_path / "text.txt").write_text("\n\n".join(f"Document {number} of a text." for number in range(400)))
    data = ("--calibration", tmp_path / "text.txt", "--samples", 8, "--sequence-length", 32)
    assert run(*ask(model, out, *data)).status == 0
    page = tmp_path / "work" / "report.html"
    succeeded(run("report", out, "-o", page, "--calibration", tmp_path / "text.txt", "--sequence-length", 32))
    assert CANARY not in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("tokens", "more", "message"),
    [
        (False, ("--push-to-hub", "smaller"), "is no repository on the Hub"),
        (True, ("--push-to-hub", REPOSITORY, "--private"), "is public"),
        (True, ("--private",), "--private goes with --push-to-hub"),
    ],
)
def test_what_could_not_be_pushed_is_refused_before_any_work(
    run: Run, model: Path, tmp_path: Path, tokens: bool, more: tuple[object, ...], message: str
) -> None:
    with logged_in(tokens) as hub:
        hub.create(REPOSITORY)
        refused(run(*ask(model, tmp_path / "work" / "smaller", *more)), message)
        assert names(tmp_path / "work") == [] and writes(hub) == []


def test_a_login_comes_first(run: Run, model: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ask(model, tmp_path / "work" / "smaller", "--push-to-hub", REPOSITORY)
    monkeypatch.setenv("HF_TOKEN", CANARY[:-1] + "X")  # which the Hub does not accept
    refused(run(*line), "hf auth login")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://huggingface.co")
    refused(run(*line), "nobody is logged in")
    assert names(tmp_path / "work") == [] and hub.repositories == {}


def test_a_hub_may_want_no_login(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with logged_in(tokens=False) as hub:
        monkeypatch.delenv("HF_TOKEN")
        assert run(*ask(model, tmp_path / "work" / "smaller", "--push-to-hub", REPOSITORY)).status == 0
        assert "config.json" in hub.repositories[REPOSITORY].files()


def test_a_push_that_fails_leaves_the_output(run: Run, model: Path, hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "work" / "smaller"
    hub.fail(Fault(method="POST", path=".*/commit/.*", status=500, times=9, body=f"echo {CANARY}".encode()))
    result = run(*ask(model, out, "--push-to-hub", REPOSITORY))
    assert result.status == 2 and CANARY not in result.err + result.out
    assert f"then run moe-compress push {out} {REPOSITORY}, which goes on where it stopped" in result.err
    hub.faults.clear()
    sent = len(hub.uploaded)
    assert sent and "config.json" in names(out)
    assert run("push", out, REPOSITORY).status == 0
    assert len(hub.uploaded) == sent  # the weights were there already


@pytest.mark.full
def test_only_what_passes_the_gate_is_published(run: Run, base: Path, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    gate = ("--gate", TASK, "--limit", 60, "--push-to-hub", REPOSITORY, "--json")
    failed = run("compress", base, "-o", tmp_path / "work" / "bad", "--experts", 2, *CALIBRATION, *gate,
                 "--max-drop", 0.05, "--keep-failed")  # fmt: skip
    assert failed.status in (1, 3), failed
    assert REPOSITORY not in hub.repositories
    out = tmp_path / "work" / "good"
    passed = succeeded(run("compress", base, "-o", out, "--experts", 14, *CALIBRATION, *gate, "--max-drop", 0.2))
    files = hub.repositories[REPOSITORY].files()
    assert json.loads(passed.out)["push"]["commit"] == hub.repositories[REPOSITORY].branches["main"]
    assert json.loads(files["gate.json"])["verdict"] == "pass"
    assert TASK in files["README.md"].decode() and "model-index" in files["README.md"].decode()
