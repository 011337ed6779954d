"""Results never replace files of somebody else: a JSON file among them says which command wrote them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from segcal.errors import UsageError

PAGE_FILE = "report.html"
"""What `segcal report` writes into a folder of results; it goes when the results do."""


def check_replaceable(
    folder: Path, names: Iterable[str], *, record: str, ours: Callable[[Mapping[str, Any]], bool]
) -> None:
    """Refuse a folder that holds files of the wanted names by another hand; nnU-Net has a summary.json of its own.

    Args:
        folder: where results are about to be written; need not exist.
        names: of the files that would be replaced.
        record: the JSON file among them that says whose they are.
        ours: whether its content is that of a file this command wrote.

    Raises:
        UsageError: one of them is there, and the record is missing or not ours.
    """
    taken = [name for name in names if (folder / name).exists()]
    if taken and not _is_ours(folder / record, ours):
        raise UsageError(
            f"{folder / taken[0]}: already exists, and {record} does not say that this command wrote it. "
            "Choose another folder with --out."
        )


def check_replaceable_file(path: Path, what: Literal["calibrator", "page"]) -> None:
    """Refuse to write a single file over one that is something else, such as an input that was named by mistake.

    Raises:
        UsageError: it is there and does not begin as such a file does.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        begin = file.read(512)
    if begin and not _BEGINS[what].match(begin):  # nothing is lost in an empty one
        raise UsageError(f"{path}: already exists and is no {what}; choose another --out.")


_BEGINS = {
    "calibrator": re.compile(rb".{8}\{", re.DOTALL),  # safetensors: the length of a JSON header, and the header
    "page": re.compile(rb"\s*<!doctype html", re.IGNORECASE),
}


def _is_ours(path: Path, ours: Callable[[Mapping[str, Any]], bool]) -> bool:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and ours(content)
