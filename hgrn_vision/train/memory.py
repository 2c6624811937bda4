"""How this process keeps memory on the CPU."""

import ctypes
import sys

# of mallopt in glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Let malloc reuse what was freed instead of giving it back to the system; whether that could be set.

    A training step frees and allocates the same activations each time. Where they went back to the system in between,
    each of their pages has to be mapped and cleared anew. Only glibc has these settings; elsewhere nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        return all(mallopt(name, 2**30) for name in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD))
    except (OSError, AttributeError):
        return False
