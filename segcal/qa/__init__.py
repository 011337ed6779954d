"""Quality assurance without ground truth: expected Dice, volumes, disagreement, outlyingness, and who needs a look.

The names below are loaded when they are first used: who only shows results needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from segcal.lazy_names import lazy_names

if TYPE_CHECKING:
    from segcal.qa.results import QaResult
    from segcal.qa.run import run_qa
    from segcal.qa.settings import QaSettings, load_qa_settings

__all__ = ["QaResult", "QaSettings", "load_qa_settings", "run_qa"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {"QaResult": "results", "QaSettings": "settings", "load_qa_settings": "settings", "run_qa": "run"},
)
