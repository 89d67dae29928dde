"""What a search has tried, kept in the user's cache at once: one that was killed tries nothing twice.

A trial is the gate's result of one number of experts. It is found again only by all that decides it: the request, the
source's files, the tasks with their versions, margin, confidence, and the versions of the packages that compute.
"""

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.evaluation.scores import PACKAGES
from compressor.gates.run import GateRequest
from compressor.gates.verdict import GateResult, gate_content, gate_from_content
from compressor.pipeline.repeating import request_key
from compressor.run_record import cache_folder, read_cached, versions, write_cached

logger = logging.getLogger(__name__)


def gate_facts(gate: GateRequest) -> dict[str, Any]:
    """What decides a verdict beside models and tasks; streaming does not, nor where results are kept."""
    plain = replace(gate, options=replace(gate.options, stream=None))
    return {name: value for name, value in asdict(plain).items() if name != "cache"}


def trial_key(facts: Any, gate: GateRequest, *terms: Any) -> str:
    """The key of one number of experts; `facts` are of model and recipe, `terms` what else decides."""
    return request_key("trial", facts, gate_facts(gate), versions(PACKAGES), terms)


def keep_trial(key: str, result: GateResult) -> None:
    """Keep a result; where nothing can be kept, a killed search merely tries it again."""
    if here().is_first:
        write_cached(_path(key), gate_content(result))


def kept_trial(key: str) -> GateResult | None:
    """What was kept, by the first rank for all; None if nothing was, or nothing that can be read."""
    content = here().broadcast(lambda: read_cached(_path(key)))
    try:
        return None if content is None else gate_from_content(content)
    except CompressionError as error:
        logger.debug("the trial %s is ignored: %s", _path(key), error)
        return None


def _path(key: str) -> Path:
    return cache_folder("trials") / f"{key}.json"
