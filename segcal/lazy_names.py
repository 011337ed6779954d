"""Public names of a package that are loaded when they are first used, so that importing the package costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package (PEP 562).

    Args:
        package: `__name__` of the package.
        home: by public name, the module inside the package that holds it.
    """
    own = vars(sys.modules[package])

    def get(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{package}.{home[name]}"), name)
        own[name] = value
        return value

    def names() -> list[str]:
        return sorted({*own, *home})

    return get, names
