"""What the measurement of growth counts, and that it leaves nothing behind and begins nothing that does not fit."""

import math
import shutil
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from compressor.errors import CompressionError
from scripts.benchmarks import frame, scale
from scripts.benchmarks.frame import Child, Sizes
from scripts.benchmarks.scale import Measured


class Usage(NamedTuple):
    """What `shutil.disk_usage` tells."""

    total: int
    used: int
    free: int


def child(seconds: float = 0.0, cpu: float = 0.0, anonymous: int = 0, mapped: int = 0) -> Child:
    """What a process took that ended well."""
    return Child(0, seconds, cpu, anonymous, mapped, "", "")


def test_the_slope_is_the_exponent() -> None:
    sizes = [1.0, 2.0, 8.0]
    assert scale.slope(sizes, [3 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    noisy = [1.0, 2.5, 7.0]
    expected = torch.linalg.lstsq(
        torch.tensor([[math.log(size), 1.0] for size in sizes]), torch.tensor(noisy).log()[:, None]
    ).solution[0, 0]
    assert scale.slope(sizes, noisy) == pytest.approx(float(expected), rel=1e-5)
    assert math.isnan(scale.slope([4.0], [1.0]))


def test_a_disk_without_room_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, int(20e9)))
    scale.check_room(tmp_path, [4, 10], export=False)
    for sizes, export in (([4, 12], False), ([10], True)):
        with pytest.raises(CompressionError, match=r"GB are free; make room, or give smaller --gigabytes"):
            scale.check_room(tmp_path, sizes, export)
    monkeypatch.setattr(sys, "argv", ["scale", "--gigabytes", "30", "--folder", str(tmp_path)])
    with pytest.raises(CompressionError, match="30 GB need"):
        scale.main()
    assert not any(tmp_path.iterdir())


def test_the_calibration_text_has_the_tokens_and_is_no_repetition(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    scale.write_text(file, 16_384)
    content = file.read_text()
    assert content.isascii() and len(content) > 16_384 and len(set(content.split())) > len(content.split()) / 2


@pytest.mark.parametrize("failing", [False, True])
def test_every_size_is_measured_and_removed(
    failing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = list[tuple[str, int]]()

    def watched(command: list[str], bare: Child | None = None) -> Child:
        if "-c" in command:
            return child()
        folder, out = Path(command[4]), Path(command[command.index("-o") + 1])
        assert (folder / "config.json").is_file() and not out.exists()
        assert command[3] == "compress" or folder.name == "kept"
        out.mkdir()
        (out / "config.json").touch()
        if failing:
            raise CompressionError("it failed")
        size = sum(file.stat().st_size for file in (tmp_path.glob("*/model/*.safetensors")))
        seen.append((command[3], size))
        return child(size / 1e6, size / 1e6, 50_000, 100_000)

    monkeypatch.setattr(scale, "watched", watched)
    monkeypatch.setattr(scale, "SPARE", 0)
    monkeypatch.setattr(scale, "SIZES", Sizes(hidden=32, inner=16, experts=4, top_k=2, vocabulary=300))
    given = ["--gigabytes", "0.00002", "0.0002", "--tokens", "600", "--folder", str(tmp_path), "--export"]
    monkeypatch.setattr(sys, "argv", ["scale", *given])
    if failing:
        with pytest.raises(CompressionError, match="it failed"):
            scale.main()
    else:
        scale.main()
        told = capsys.readouterr().out
        assert [name for name, _ in seen] == ["compress", "compress", "export"] * 2 and seen[0][1] < seen[3][1]
        assert "model-centric 1.0" in told and "reap 1.0" in told and told.count("\n| 0.0 | ") == 6
    assert not any(tmp_path.iterdir())


def test_a_command_that_is_watched_ends_with_the_watcher(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def stop(*_: object) -> None:
        if pid.is_file() and pid.read_text():
            raise SystemExit

    known = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(SystemExit):
            frame.run_child(["sh", "-c", f"echo $$ > {pid}; exec sleep 100"])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, known)
    status = Path("/proc") / pid.read_text().strip() / "status"
    assert not status.exists()


def test_a_row_has_every_column() -> None:
    found = Measured(bytes=2_000_000_000, largest=200, copy=2.0, steps={"reap": child(6.0, 3.0, 300, 100)})
    cells = scale.cells("reap", found)
    assert cells == ("2.0", "reap", 3.0, 1.5, 1.5, 1.5e-7, 0.5)
    assert len(cells) == len(scale.COLUMNS)
