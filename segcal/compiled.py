"""Loops over voxels that numba compiles when they are first called; docs/adr/0008-compiled-voxel-loops.md.

Only modules that hold such loops import this one, and they are imported where they are first needed, so that nobody
else waits for numba. A loop and all it calls stand in one file, with the constants it uses: the cache on disk notices a
changed file, not a changed import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile a function of numpy arrays; it lets go of the interpreter lock and keeps to IEEE arithmetic.

    Machine code is kept beside the source or, where that is read-only, in the user's cache folder. Where neither can be
    written it is made again in every process, which takes seconds and changes nothing else.
    """
    try:
        return cast(Function, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
    except RuntimeError:  # what numba raises, when decorating, if it finds no folder to keep code in
        return cast(Function, numba.njit(nogil=True, error_model="numpy")(function))
