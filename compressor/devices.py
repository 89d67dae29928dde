"""Devices: choosing one, its free memory, where float64 sums are added up, and threads for small
pieces."""

import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from compressor.distributed import ranks
from compressor.errors import CompressionError, reason_of
from compressor.memory import available


def pick_device(name: str) -> torch.device:
    """Return the torch device for `auto` or a device's name; refuses one that is not there."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return torch.device("cpu")
        if ranks().is_alone:
            return accelerator
        return torch.device(accelerator.type, ranks().local % torch.accelerator.device_count())
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = reason_of(error, 120)
        raise CompressionError(
            f"device {name!r} cannot be used ({reason}); pass --device cpu or auto"
        ) from error
    return device


def device_name(device: torch.device) -> str:
    """Return the name of a device's model."""
    if device.type == "cpu":
        return f"cpu ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    module = torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else device.type


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that tensors on a device may still take; None: not known."""
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return int(module.mem_get_info(device)[0]) + int(unused)
    if hasattr(module, "recommended_max_memory"):  # mps, which shares the machine's memory
        return int(module.recommended_max_memory()) - int(module.driver_allocated_memory())
    return available()


@cache
def float64_device(device: torch.device) -> torch.device:
    """Return the device for float64 tensors: this one, or the CPU if it has no float64 (mps, some
    of xpu)."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.device("cpu")
    return device


def as_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, moved to the CPU if its device has no float64. Other operands
    must follow it."""
    return tensor.to(float64_device(tensor.device)).double()


@contextmanager
def one_thread_each() -> Iterator[ThreadPoolExecutor]:
    """A pool of as many threads as torch has, which all compute alone: small pieces gain nothing
    from being shared."""
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)  # that of threads to come, too
