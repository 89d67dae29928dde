"""`python -m compressor` is the command `moe-compress`."""

from compressor.cli.main import main

if __name__ == "__main__":
    main()
