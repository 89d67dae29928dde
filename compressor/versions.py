"""Versions of installed packages, for the record of what made a result."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("moe-compressor", "torch", "transformers", "safetensors")  # which decide the bytes of an output


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The version of each package, or that it is not installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
