"""lm-eval without its noise: nothing on stdout, no bars of its own, its useful warnings once each."""

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from unittest.mock import patch

from compressor.distributed.ranks import unseen_launcher
from compressor.errors import CompressionError
from compressor.progress import quiet_transformers

logger = logging.getLogger(__name__)


def require_lm_eval() -> None:
    """Refuse to go on without lm-eval, saying how to get it."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise CompressionError(
            f'lm-eval cannot be imported ({error}); install it with `pip install "lm-eval[hf]"`'
        ) from error


class _Relay(logging.Handler):
    """Hands on, once each, what lm-eval says of the models it runs; the rest is logged as debugging."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Tell of a record unless one that differs in numbers alone has been told."""
        message = " ".join(record.getMessage().split())
        of_models = record.levelno >= logging.WARNING and record.name.startswith("lm_eval.models")
        shape = re.sub(r"\d+", "#", message)
        if (of_models or record.levelno >= logging.ERROR) and shape not in self._told:
            self._told.add(shape)
            logger.warning("lm-eval: %s", message)
        else:
            logger.debug("lm-eval: %s", message)


@contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Silence lm-eval while it works; the facts on the machine that it collects through other programs are left out.

    It sees no launcher, for it would deal the items out by itself, and tell the results to one rank alone.
    """
    import datasets
    from lm_eval import evaluator
    from lm_eval.api import task

    source, relay = logging.getLogger("lm_eval"), _Relay()
    with open(os.devnull, "w", encoding="utf-8") as nowhere, ExitStack() as stack:
        for manager in (redirect_stdout(nowhere), warnings.catch_warnings(), quiet_transformers(), unseen_launcher()):
            stack.enter_context(manager)
        warnings.simplefilter("ignore")
        if not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        stack.callback(source.setLevel, source.level)
        source.setLevel(logging.WARNING)
        stack.callback(source.removeHandler, relay)
        source.addHandler(relay)
        stack.enter_context(patch.object(source, "propagate", False))
        stack.enter_context(patch.object(task, "tqdm", lambda items, **_: items))
        stack.enter_context(patch.object(evaluator, "get_git_commit_hash", lambda: None))
        stack.enter_context(patch.object(evaluator, "add_env_info", lambda storage: None))
        yield
