"""Commands that write a manifest do not replace one by accident."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from segcal.errors import UsageError

ReplaceOption = Annotated[bool, typer.Option("--force", help="Replace a manifest that is already there.")]


def check_free(out: Path, *, replace: bool) -> None:
    """Refuse a path that is taken, unless it may be replaced."""
    if out.exists() and not replace:
        raise UsageError(f"{out}: already there; give another --out, or --force to replace it")
