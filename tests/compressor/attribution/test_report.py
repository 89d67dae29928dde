import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compressor.attribution.figures import COMPONENTS, Attribution, KeyInfluence, Receiver, sender_labels
from compressor.attribution.report import NAMES, Findings, brief_blocks, brief_content, findings, write_attribution
from compressor.cli.terminal import print_report
from compressor.files import check_folder
from tests.support.attribution_results import attribution, module, sender, with_massive

MADE = with_massive(attribution(hubs={(1, 3): 400.0, (2, 6): 90.0}), 1, 3, 50.0)
FOUND = findings(MADE)
HUBS, SUPERS = FOUND.hubs, FOUND.supers
assert [(hub.layer, hub.expert) for hub in HUBS] == [(1, 3), (2, 6)] and len(SUPERS) == 1


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def tables(text: str) -> dict[str, list[list[str]]]:
    """The rows of the Markdown tables below their headings; a cell may hold an escaped bar."""
    found: dict[str, list[list[str]]] = {}
    for part in text.split("\n## ")[1:]:
        lines = [line for line in part.splitlines() if line.startswith("|")]
        split = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
        assert len({len(cells) for cells in split}) <= 1
        found[part.splitlines()[0]] = split[2:]
    return found


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attributed")
    written = write_attribution(FOUND, folder / "out", False)
    assert sorted(written) == sorted((folder / "out").iterdir()) and list(folder.iterdir()) == [folder / "out"]
    check_folder(folder / "out", NAMES, overwrite=True)
    return folder / "out"


def test_the_json_holds_every_number(reports: Path) -> None:
    content = strict((reports / "attribution.json").read_text())
    assert content["hubs"] == strict((reports / "hubs.json").read_text())
    assert content["threshold"] == 3.5 and content["tokens"] == MADE.tokens and content["seconds"] == MADE.seconds
    assert content["calibration"] == {"source": "wiki.txt", "tokens": 4096}  # no folders
    assert content["versions"] == MADE.versions
    assert [each["layer"] for each in content["receivers"]] == [1, 2, 3]
    assert len(content["senders"]) == len(MADE.senders) and len(content["outputs"]) == len(MADE.outputs)
    for each, wanted in zip(content["senders"], MADE.senders, strict=True):
        for name in ("name", "kind", "layer", "module", "number", "share"):
            assert each[name] == getattr(wanted, name)
        for name in ("influence", "positive", "negative", "rank_change"):
            assert each[name] == [
                value if value is None else pytest.approx(value, rel=5e-6) for value in getattr(wanted, name)
            ]
        assert each["total_influence"] == pytest.approx(wanted.total_influence, rel=5e-6)
        assert (each["total_rank_change"] is None) == (wanted.kind == "head")
    assert content["overlap"]["both"] == [{"module": module(1), "layer": 1, "expert": 3}]
    assert content["overlap"]["only_super_experts"] == [] and content["overlap"]["jaccard"] == 0.5
    assert [each["max_entry"] for each in content["super_experts"]] == [50.0]
    for each, hub in zip(content["hubs"], HUBS, strict=True):  # the strongest first
        assert (each["module"], each["layer"], each["expert"]) == (hub.module, hub.layer, hub.expert)
        for name in ("influence", "aarv", "influence_score", "aarv_score", "share"):
            assert each[name] == pytest.approx(getattr(hub, name), rel=5e-6)


def test_what_is_no_number_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = replace(
        MADE,
        senders=(*MADE.senders, sender("other", 1, (math.inf, math.nan, None), number=None)),
        receivers=(*MADE.receivers[:2], replace(MADE.receivers[2], unexplained=math.nan)),
        per_key=(
            KeyInfluence("model.layers.1.self_attn", 1, 3, 0, (7, 9), ("a|", "b"), (0.1, 2.0), math.nan, 0.5, 0.25),
        ),
    )
    infinite = [replace(HUBS[0], influence_score=math.inf)]
    found = Findings(odd, infinite, SUPERS, 3.5, 5)
    write_attribution(found, tmp_path / "out", False)
    print_report(True, brief_content(found), ())
    assert strict(capsys.readouterr().out)["hubs"][0]["influence_score"] is None
    content = strict((tmp_path / "out" / "attribution.json").read_text())
    assert content["senders"][-1]["influence"] == [None, None, None]
    assert content["receivers"][2]["unexplained"] is None
    assert content["per_key"][0]["first"] is None and content["per_key"][0]["influence"] == [0.1, 2.0]
    text = (tmp_path / "out" / "attribution.md").read_text()
    assert '| L1 head 3 | 0 | - | 50.0% | 25.0% | "b" at 1, "a\\|" at 0 |' in text
    assert strict((tmp_path / "out" / "hubs.json").read_text())[0]["influence_score"] is None


def test_the_text_has_hubs_kinds_senders_and_super_experts(reports: Path) -> None:
    text = (reports / "attribution.md").read_text()
    found = tables(text)
    assert [cells[0] for cells in found["Hubs"]] == ["L1 E3", "L2 E6"]
    assert float(found["Hubs"][0][1]) == pytest.approx(HUBS[0].influence, rel=6e-3)
    totals = {kind: math.fsum(each.total_influence for each in MADE.of_kind(kind)) for kind in COMPONENTS}
    kinds = {cells[0]: float(cells[3].rstrip("%")) for cells in found["What shapes routing"]}
    assert list(kinds) == ["token", "attention", "mlp", "moe"]
    for kind, percent in kinds.items():
        assert percent == pytest.approx(100 * totals[kind] / sum(totals.values()), abs=0.051)
    strong = sorted(MADE.senders, key=lambda each: -each.total_influence)[:10]
    assert [cells[1] for cells in found["Strongest senders"]] == [each.kind for each in strong]
    assert [float(cells[2]) for cells in found["Strongest senders"]] == [
        pytest.approx(each.total_influence, rel=6e-3) for each in strong
    ]
    assert found["Super experts"] == [["L1 E3", "50", "100", "1"]]
    assert "Both hub and super expert: L1 E3; hubs alone: 1, super experts alone: 0 (Jaccard index 0.50)." in text
    assert "`moe-compress compress ... --protect hubs.json`" in text
    assert "within 4e-07 of the largest logit (layer 3), on 4,096 tokens of wiki.txt" in text


@pytest.mark.parametrize(
    "made",
    [
        attribution(layers=2, experts=2, heads=0, shared=False),  # one receiver, experts without any
        attribution(scale=0.0),
        replace(attribution(), receivers=(Receiver(module(0), 0, 1.0, 0.0),), senders=(), outputs=()),
    ],
)
def test_any_attribution_has_reports(made: Attribution, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(made, top=5)
    written = write_attribution(found, tmp_path / "out", False)
    assert sorted(path.name for path in written) == sorted(NAMES)
    content = strict(written[0].read_text())
    assert len(content["senders"]) == len(made.senders)
    tables(written[1].read_text())
    print_report(False, None, brief_blocks(found))
    shown = capsys.readouterr().out
    assert f"{made.tokens:,} tokens" in shown and ("No expert is a hub" in shown) == (not found.hubs)


def test_labels_are_short_and_tell_senders_apart() -> None:
    shown = [
        sender("token", None, (1.0,)), sender("expert", 1, (1.0,), number=9), sender("head", 3, (1.0,), number=5),
        sender("attention", 3, (1.0,)), sender("shared", 0, (1.0,)),
    ]  # fmt: skip
    assert [each.label for each in shown] == ["token", "L1 E9", "L3 head 5", "L3 attention", "L0 shared"]
    twice = [*shown, replace(shown[3], name="model.layers.3.mamba")]
    assert sender_labels(twice) == [
        "token", "L1 E9", "L3 head 5", "model.layers.3.self_attn", "L0 shared", "model.layers.3.mamba",
    ]  # fmt: skip
