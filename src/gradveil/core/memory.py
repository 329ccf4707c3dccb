"""Memory that is freed and asked for again at every step of an attack stays with the process."""

import ctypes
import sys
from functools import cache

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # from glibc's malloc.h


@cache
def keep_freed_memory() -> bool:
    """Tell glibc, once, not to give large buffers back to the system and fetch them again. Whether it could be told.

    An attack allocates the same tens of megabytes thousands of times. By default each is mapped, filled with zeros page by page
    and unmapped again, which takes most of the time on a CPU.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    wanted = ((M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**28))
    return all(bool(mallopt(option, value)) for option, value in wanted)
