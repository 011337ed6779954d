"""How to install what a part of segcal needs beyond the core."""

from __future__ import annotations

from typing import Literal


def how_to_install(extra: Literal["nnunet", "dask", "service"]) -> str:
    """The command for messages; it is run in a checkout, where the constraints are."""
    return f"in a checkout of segcal, pip install -c constraints.txt '.[{extra}]'"
