"""Quality assurance without ground truth: expected Dice, volumes, disagreement, outlyingness, and who needs a look.

The names below are loaded when they are first used: who only shows results needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segcal.qa.results import QaResult
    from segcal.qa.run import run_qa
    from segcal.qa.settings import QaSettings, load_qa_settings

__all__ = ["QaResult", "QaSettings", "load_qa_settings", "run_qa"]

_HOME = {
    "QaResult": "segcal.qa.results",
    "QaSettings": "segcal.qa.settings",
    "load_qa_settings": "segcal.qa.settings",
    "run_qa": "segcal.qa.run",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
