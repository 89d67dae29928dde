"""One thread for each test process: the models are tiny and the processes many."""

import atexit
import os
import random
import shutil
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # threads that read tiny tensors cost more than reading them
os.environ.pop("GITHUB_ACTIONS", None)  # by which a gate prints more
if "MOE_COMPRESSOR_CACHE" not in os.environ:  # records of runs and results go into no user's home
    os.environ["MOE_COMPRESSOR_CACHE"] = tempfile.mkdtemp(prefix="moe-compressor-tests-")
    atexit.register(shutil.rmtree, os.environ["MOE_COMPRESSOR_CACHE"], ignore_errors=True)

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers.utils import logging

from tests.support.command_line import Run, runner

torch.set_num_threads(1)
lenient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
settings.register_profile("fast", lenient, derandomize=True, database=None, max_examples=20)
settings.register_profile("full", lenient, derandomize=False, print_blob=True, max_examples=100)
settings.load_profile("fast")
logging.set_verbosity_error()
logging.disable_progress_bar()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Draw the same numbers in a test whatever ran before it; skip what is about a CUDA device where there is none."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No hub, and one thread whatever a command sets."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    torch.set_num_threads(threads)


def _keep_golden_answers(default: bool) -> None:
    from compressor.recipe.recipe import OutputOptions, Recipe

    OutputOptions.model_fields["golden_answers"].default = default
    OutputOptions.model_rebuild(force=True)
    Recipe.model_fields["output"].default = OutputOptions()
    Recipe.model_rebuild(force=True)


@pytest.fixture(autouse=True, scope="session")
def no_golden_answers() -> None:
    """Outputs without golden answers in this process, which take half of a tiny run; `golden` has them."""
    _keep_golden_answers(False)


@pytest.fixture
def golden() -> Iterator[None]:
    """Golden answers with each output, as users get them."""
    _keep_golden_answers(True)
    yield
    _keep_golden_answers(False)


@pytest.fixture
def hasty() -> Iterator[None]:
    """Two steps of tuning a layer by default, where tuning is not what is tested."""
    from compressor.steps.constants.options import Constants
    from compressor.steps.correct.options import Correct
    from compressor.steps.prune.options import Prune

    steps = Correct.model_fields["steps"]
    usual = steps.default
    for default in (2, usual):
        steps.default = default
        for options in (Correct, Prune, Constants):
            options.model_rebuild(force=True)
        if default == 2:
            yield


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process."""
    return runner(monkeypatch, capfd)
