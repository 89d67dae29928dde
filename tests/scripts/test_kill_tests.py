"""What the script that kills runs compares, and how it tells what it has found."""

import json
from pathlib import Path

from scripts.kill_tests import CASES, Tally, table
from scripts.left_behind import NOT_COMPARED, Content, differences, run_records


def test_a_folder_is_compared_byte_for_byte_with_what_is_hidden(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "sub" / "empty").mkdir(parents=True)
        (tmp_path / name / "sub" / "weights").write_bytes(b"123")
    one, two = (tmp_path / name for name in ("one", "two"))
    assert differences(Content.of(one), Content.of(two)) == ([], [])
    (two / "sub" / "weights").write_bytes(b"124")
    (two / ".out.moe-compressor").mkdir()
    (two / "sub" / "plan.new").touch()
    (two / "sub" / "empty").rmdir()
    changed, beside = differences(Content.of(one), Content.of(two))
    assert changed == ["sub/weights", "sub/empty"] and beside == [".out.moe-compressor", "sub/plan.new"]
    (two / "sub" / "weights").unlink()
    (two / "sub" / "weights").symlink_to(one / "sub" / "weights")
    assert "sub/weights" in differences(Content.of(one), Content.of(two))[0]


def test_only_times_and_memory_of_a_record_are_left_out(tmp_path: Path) -> None:
    for name, seconds, source in (("one", 1.0, "a"), ("two", 2.0, "a"), ("three", 1.0, "b")):
        folder = tmp_path / name / "home" / "cache" / "runs"
        folder.mkdir(parents=True)
        content = {**dict.fromkeys(NOT_COMPARED, seconds), "source": source, "text": str(tmp_path / name / "place")}
        (folder / "digest.json").write_text(json.dumps(content))
    one, two, three = (run_records(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two == {"digest": {"source": "a", "text": "/place"}} and one != three


def test_only_times_of_a_gate_are_left_out(tmp_path: Path) -> None:
    for name, seconds, verdict in (("one", 1.0, "pass"), ("two", 2.0, "pass"), ("three", 1.0, "fail")):
        (tmp_path / name).mkdir()
        identity = {"weights": [["model.safetensors", 10, int(seconds)]], "files": {}}
        gate = {"verdict": verdict, "seconds": {"base": seconds}, "reused_base": seconds > 1}
        gate |= {"base_identity": identity, "compressed_identity": identity}
        (tmp_path / name / "gate.json").write_text(json.dumps(gate))
    one, two, three = (Content.of(tmp_path / name) for name in ("one", "two", "three"))
    assert differences(one, two) == ([], []) and differences(one, three) == (["gate.json"], [])


def test_the_table_names_every_fault() -> None:
    tallies = {case.name: Tally(2, 3, 2, 0, 1) for case in CASES}
    assert table(tallies).endswith("Nothing differed.")
    tallies["apply"].faults["out/config.json differs"] += 2
    lines = table(tallies).splitlines()
    assert len(lines) == len(CASES) + 4 and lines[-1] == "- apply: out/config.json differs (2)"
    assert "| apply | 3 | 2/2 | 0/2 | 1/2 |" in lines
