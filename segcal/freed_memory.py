"""Giving freed memory back to the system."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Hand back what was freed but is kept for the next request.

    The allocator of Linux keeps up to 64 MB for every thread that ever asked for some. Beside the volumes of the next
    case that is a tenth of the peak, so it is given back between cases. Elsewhere, and with another allocator, this
    does nothing.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
