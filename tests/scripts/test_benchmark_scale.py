"""What the measurement of growth counts, and that it leaves nothing behind."""

import math
import signal
import sys
from pathlib import Path

import pytest
import torch

from scripts.benchmarks import frame, scale
from scripts.benchmarks.frame import Child, Sizes


def test_the_slope_is_the_exponent() -> None:
    sizes = [1.0, 2.0, 8.0]
    assert scale.slope(sizes, [3 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    noisy = [1.0, 2.5, 7.0]
    expected = torch.linalg.lstsq(
        torch.tensor([[math.log(size), 1.0] for size in sizes]), torch.tensor(noisy).log()[:, None]
    ).solution[0, 0]
    assert scale.slope(sizes, noisy) == pytest.approx(float(expected), rel=1e-5)
    assert math.isnan(scale.slope([4.0], [1.0]))


def test_the_calibration_text_has_the_tokens_and_is_no_repetition() -> None:
    content = scale.random_text(16_384)
    assert content.isascii() and len(content) > 16_384 and len(set(content.split())) > len(content.split()) / 2


@pytest.mark.parametrize("failing", [False, True])
def test_every_size_is_measured_and_removed(
    failing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = list[tuple[str, int]]()

    def run_child(command: list[str]) -> Child:
        if "-c" in command:
            return Child(0, 0.0, 0.0, 0, 0, "", "")
        folder, out = Path(command[4]), Path(command[command.index("-o") + 1])
        assert (folder / "config.json").is_file() and not out.exists()
        assert command[3] == "compress" or folder.name == "kept"
        out.mkdir()
        (out / "config.json").touch()
        size = sum(file.stat().st_size for file in (tmp_path.glob("*/model/*.safetensors")))
        seen.append((command[3], size))
        return Child(int(failing), size / 1e6, size / 1e6, 50_000, 100_000, "", "")

    monkeypatch.setattr(scale, "run_child", run_child)
    monkeypatch.setattr(scale, "SIZES", Sizes(hidden=32, inner=16, experts=4, top_k=2, vocabulary=300))
    given = ["--gigabytes", "0.00002", "0.0002", "--tokens", "600", "--folder", str(tmp_path), "--export"]
    monkeypatch.setattr(sys, "argv", ["scale", *given])
    if failing:
        with pytest.raises(SystemExit, match="ended with status 1"):
            scale.main()
    else:
        scale.main()
        printed = capsys.readouterr().out
        assert [name for name, _ in seen] == ["compress", "compress", "export"] * 2 and seen[0][1] < seen[3][1]
        assert "model-centric 1.0" in printed and "reap 1.0" in printed and printed.count("\n| 0.0 | ") == 6
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
    assert not (Path("/proc") / pid.read_text().strip() / "status").exists()
