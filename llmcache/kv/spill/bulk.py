"""Many reads in one call of compiled code, without the interpreter in between: all threads share it, and wait for it."""

from __future__ import annotations

import numba
import numpy as np
from numba.core import types

# ssize_t pread(int, void *, size_t, off_t): all of 64 bits but the first, on the machines that this runs on.
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uintp, types.int64))


@numba.njit(nogil=True, cache=True)
def read_all(fd, address, sizes, offsets):  # type: ignore[no-untyped-def]
    """Fills memory from `address` on with `sizes` [n] bytes at each of `offsets` [n], both int64.

    Ends at the first that fails or is short; returns how many were read whole.
    """
    done = 0
    for i in range(sizes.size):
        if _pread(fd, np.uintp(address + done), np.uintp(sizes[i]), offsets[i]) != sizes[i]:
            return i
        done += sizes[i]
    return sizes.size
