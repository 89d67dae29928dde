"""Files and folders that appear whole or not at all."""

import stat
from pathlib import Path

import pytest

from compressor.files import replace_folder, replacing, write_whole


def test_a_file_is_replaced_only_by_a_complete_one(tmp_path: Path) -> None:
    path, fresh = tmp_path / "plan.json", tmp_path / "plan.new"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), replacing(path, fresh) as place:
        place.write_text("half \ud800")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with replacing(path, fresh) as place:
        place.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_whole_file_has_its_mode_and_nothing_beside_it(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "page.html"
    write_whole(path, "żółć", mode)
    assert path.read_text(encoding="utf-8") == "żółć" and stat.S_IMODE(path.stat().st_mode) == mode
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "żółć" and list(tmp_path.iterdir()) == [path]


def test_a_folder_takes_the_place_of_another_or_leaves_it(tmp_path: Path) -> None:
    made, target, old = (tmp_path / name for name in ("made", "target", "old"))
    for folder in (made, target):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "absent", target, old)
    assert (target / "name").read_text() == "target" and not old.exists()
    replace_folder(made, target, old)
    assert (target / "name").read_text() == "made" and (old / "name").read_text() == "target"
