"""What the record of outputs notices."""

import json
from pathlib import Path

import pytest

from scripts import golden
from tests.support import small


@pytest.mark.full
def test_a_drop_is_recorded_alike_twice_and_a_changed_tensor_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    options = ["--only", "drop", "--model", str(model), "--calibration", str(text), "--keep", str(tmp_path / "kept")]
    record = tmp_path / "record.json"
    assert golden.main(["record", str(record), *options]) == 0
    assert golden.main(["compare", str(record), *options]) == 0
    assert capsys.readouterr().out.splitlines() == ["drop: status 0", "drop: same"]
    old = json.loads(record.read_text())["drop"]
    assert old == {"status": 0, **golden.facts(tmp_path / "kept" / "drop")}
    assert {len(groups) for groups in old["groups"].values()} == {4} and old["figures"]["parameters.after"] > 0

    changed = tmp_path / "changed"
    (tmp_path / "kept" / "drop").rename(changed)
    small.edit_tensors(changed / "out", lambda tensors: tensors["model.norm.weight"].add_(0.5))
    new = {"status": 0, **golden.facts(changed)}
    assert golden.differences(old, new, tmp_path / "gone", changed) == ["weights differ"]
    new["figures"]["parameters.after"] = 2 * old["figures"]["parameters.after"]
    assert golden.differences(old, new, tmp_path / "gone", changed)[1].endswith("(+1.00e+00)")
