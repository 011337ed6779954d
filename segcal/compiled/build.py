"""How loops over voxels are compiled: alike for all of them, and so that results do not depend on the machine.

Without `fastmath` the compiler keeps to IEEE arithmetic: it neither reorders sums nor fuses products with additions.
A loop of + - * / and sqrt alone (`segcal.compiled.elementary` has exponential and logarithm in these terms) therefore
gives the same bits on every processor, whatever the width of its vectors. The interpreter lock is released.
Compiled code is kept beside the source or in the user's cache, so only the first run of an installation waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])

# Under Python's error model every division has a branch for 0, which keeps loops from being vectorised.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}


def compiled(function: Function) -> Function:
    """Compile a loop when it is first called, and keep the result for later runs where there is room for it."""
    try:
        return cast(Function, njit(cache=True, **_OPTIONS)(function))
    except RuntimeError:  # no folder for the cache can be written to, as in a read-only container without a home
        return cast(Function, njit(**_OPTIONS)(function))


def inlined(function: Function) -> Function:
    """A piece of a loop: becomes part of every `compiled` function that calls it.

    What is kept from earlier runs is looked up by the file of the `compiled` function alone. Whoever changes a piece in
    another file while developing removes `segcal/compiled/__pycache__`; an installation writes all files anew.
    """
    return cast(Function, njit(inline="always", **_OPTIONS)(function))
