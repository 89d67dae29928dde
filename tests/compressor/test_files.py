"""Files and folders that appear whole or not at all."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from compressor.errors import CompressionError
from compressor.files import check_folder, replacing, whole_folder, write_whole


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


def test_a_whole_file_is_its_owners_and_has_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_whole(path, "żółć")
    assert path.read_text(encoding="utf-8") == "żółć" and stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "żółć" and list(tmp_path.iterdir()) == [path]


def _replace(folder: Path, error: Exception) -> None:
    with replacing(folder / "plan.json", folder / "plan.new") as fresh:
        fresh.write_text("half")
        raise error


def _fill(folder: Path, error: Exception) -> None:
    with whole_folder(folder / "out", ("gate.json",)) as made:
        (made / "gate.json").write_text("half")
        raise error


@pytest.mark.parametrize("write", [_replace, _fill])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_names_folder_and_remedy(
    write: Callable[[Path, Exception], None],
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    by_rust = SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")
    for error in (OSError(number, ""), by_rust):
        with pytest.raises(
            CompressionError, match=f"the disk of {tmp_path} is full; free some space and run the command again"
        ):
            write(Path(), error)
    with pytest.raises(OSError, match="Permission"):
        write(tmp_path, OSError(errno.EACCES, "Permission denied"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["gate.json", "sizes.png"])
def test_reports_are_known_by_what_they_hold(name: str, tmp_path: Path) -> None:
    folder, png = tmp_path / "out", b"\x89PNG\r\n\x1a\n"
    folder.mkdir()
    for foreign in (b"", b"{}", b"[]", b"{", b"my diary", b'{"format": "diary"}'):
        (folder / name).write_bytes(foreign)
        with pytest.raises(CompressionError, match=f"holds no {name}, so --overwrite will not replace it"):
            check_folder(folder, (name, "more"), overwrite=True)
    (folder / name).write_bytes(png if name.endswith("png") else b'{"format": "moe-compressor-gate/1"}')
    check_folder(folder, (name, "more"), overwrite=True)
    (folder / "more").mkdir()
    with pytest.raises(CompressionError, match="holds more beside"):
        check_folder(folder, (name, "more"), overwrite=True)


def test_reports_fill_an_empty_folder(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    before = folder.stat().st_ino
    with pytest.raises(OSError, match="stop"):
        _fill(tmp_path, OSError("stop"))
    assert list(folder.iterdir()) == []
    with whole_folder(folder, ("gate.json", "gate.md")) as made:
        for name in ("gate.json", "gate.md"):
            (made / name).write_text(name)
        assert list(tmp_path.iterdir()) == [folder]
    assert sorted(path.name for path in folder.iterdir()) == ["gate.json", "gate.md"] and folder.stat().st_ino == before
    with pytest.raises(CompressionError, match="exists already"), whole_folder(folder, ("gate.json", "gate.md")):
        pass
