"""Quality assurance without ground truth: expected Dice, volumes, disagreement, outlyingness, and who needs a look."""

from segcal.qa.results import QaResult
from segcal.qa.run import run_qa
from segcal.qa.settings import QaSettings, load_qa_settings

__all__ = ["QaResult", "QaSettings", "load_qa_settings", "run_qa"]
