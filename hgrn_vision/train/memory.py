"""How this process reuses memory on the CPU, and how much it has used at most."""

import ctypes
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

# parameters of mallopt, from glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Let malloc reuse freed memory instead of giving it back to the system; returns whether that could be set.

    A training step frees and allocates the same activations each time. If they were returned to the system in between,
    each of their pages would have to be mapped and cleared again. Only glibc has these settings.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        return all(mallopt(name, 2**30) for name in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD))
    except (OSError, AttributeError):
        return False


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process on the device, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # Linux counts in KiB, macOS in bytes
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def forget_peak(device: torch.device) -> None:
    """Give freed memory back to the system and reset `peak_memory`, for the next run in the same process.

    If the system cannot do that, the peak remains that of the whole process.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
