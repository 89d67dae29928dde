"""Compare what is forecast of a compression with what it takes, on a synthetic checkpoint and on folders named.

    python -m scripts.benchmark_forecast [--model DIR --calibration FILE] [--gigabytes 0.8] [--samples 16]

Prints for each strategy and correction the seconds forecast and measured, by phase, and their ratio.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

RUNS = (("count-guided", "none"), ("reap", "none"), ("model-centric", "none"), ("reap", "ridge"), ("reap", "tune"))


def main() -> None:
    """Make the checkpoint, forecast and run."""
    import compressor
    from compressor.data.batches import BATCH_SIZE
    from compressor.forecasting.cost import Text
    from compressor.forecasting.estimate import Forecast, forecast_attribution
    from compressor.planning.run import open_run
    from scripts.benchmark import save_tokenizer, timed, write_synthetic

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint to measure instead of a synthetic one")
    parser.add_argument("--calibration", type=Path, help="its text")
    parser.add_argument("--gigabytes", type=float, default=0.8)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--only", help="one run alone, as reap+tune or attribute")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        folder, text = arguments.model or scratch / "model", arguments.calibration or scratch / "text.txt"
        if arguments.model is None:
            folder.mkdir()
            write_synthetic(folder, arguments.gigabytes)
            save_tokenizer(folder)
            text.write_text("some words to calibrate with\n\n" * 20_000)
        data = {
            "calibration": str(text), "samples": arguments.samples, "sequence_length": arguments.sequence_length,
        }  # fmt: skip
        for strategy, correction in RUNS:
            if arguments.only not in (None, f"{strategy}+{correction}"):
                continue
            told: list[Forecast] = []
            wanted = {**data, "ratio": 0.5, "strategy": strategy, "correct": correction}
            out = scratch / "out"
            seconds, made = timed(lambda: compressor.compress(str(folder), out, announce=told.append, **wanted))  # noqa: B023
            shutil.rmtree(out)
            phases = ", ".join(f"{name} {value:.1f}" for name, value in made.seconds.items())
            show(f"{strategy}+{correction}", told[0], seconds, phases)
        if arguments.only in (None, "attribute"):
            with open_run(str(folder)) as run:
                read = Text(arguments.samples, arguments.sequence_length, BATCH_SIZE)
                forecast = forecast_attribution(run.model, read)
            show("attribute", forecast, timed(lambda: compressor.attribute(str(folder), **data))[0], "")


def show(name: str, forecast: "compressor.forecasting.estimate.Forecast", seconds: float, phases: str) -> None:  # type: ignore[name-defined]  # noqa: F821
    """One line."""
    parts = ", ".join(f"{part.name} {part.seconds:.1f}" for part in forecast.parts)
    print(
        f"{name}: forecast {forecast.seconds:.1f} s ({parts}), took {seconds:.1f} s ({phases}); "
        f"ratio {forecast.seconds / seconds:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
