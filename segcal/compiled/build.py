"""How loops over voxels are compiled: alike for all of them, and so that results do not depend on the machine.

Without `fastmath` the compiler keeps to IEEE arithmetic: it neither reorders sums nor fuses products with additions.
A loop of + - * / and sqrt alone (`segcal.compiled.elementary` has exponential and logarithm in these terms) therefore
gives the same bits on every processor, whatever the width of its vectors. The interpreter lock is released.
Compiled code is kept beside the source or in the user's cache, so only the first run of an installation waits for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])

# Under Python's error model every division has a branch for 0, which keeps loops from being vectorised.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}


def compiled(function: Function) -> Function:
    """Compile a loop when it is first called, and keep the result for later runs where there is room for it."""
    loop = njit(**_OPTIONS)(function)
    with suppress(RuntimeError):  # no folder can be written to, as in a read-only container without a home
        loop._cache = _Kept(function)
    return cast(Function, loop)


def inlined(function: Function) -> Function:
    """A piece of a loop: becomes part of every `compiled` function that calls it."""
    return cast(Function, njit(inline="always", **_OPTIONS)(function))


def _fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return a(a, a, a), generate


fused = cast(Callable[[np.float32, np.float32, np.float32], np.float32], intrinsic(_fused))
"""a b + c rounded once: half the work of two operations, and as they do it gives the same bits on every processor: one
that has no instruction for it calls a function. The compiler never fuses by itself."""


class _Kept(FunctionCache):
    """Machine code of earlier runs, kept by numba, with three differences.

    It belongs to the sources of all loops and not of its own file alone, so that a piece changed elsewhere, or other
    options, never leave old code in use. Every piece has a file of its own. And what cannot be read or written is
    compiled anew instead of ending the run: a full disk below the home folder, a file cut off by a power failure.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, stamp)  # type: ignore[no-untyped-call]

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), _sources())  # type: ignore[no-untyped-call]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # whatever a damaged file makes of numba
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(Exception):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


class _Files(IndexDataCacheFile):
    """One file for each piece of machine code, named after all it depends on.

    numba numbers the files and notes in a table, written before them, which is whose. Of processes that start together,
    or one that is ended between the two, code for another signature or processor, or of the version before, would
    stay behind under a number that the table gives to the new one.
    """

    def load(self, key: tuple[Any, ...]) -> Any:
        with suppress(FileNotFoundError):
            return self._load_data(self._name_of(key))  # type: ignore[no-untyped-call]
        return None

    def save(self, key: tuple[Any, ...], data: Any) -> None:
        self._save_data(self._name_of(key), data)  # type: ignore[no-untyped-call]

    def _name_of(self, key: tuple[Any, ...]) -> str:
        owner = repr((key, self._version, self._source_stamp))
        return f"{Path(self._index_name).stem}.{hashlib.sha256(owner.encode()).hexdigest()[:32]}.nbc"


@cache
def _sources() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
