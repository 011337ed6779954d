"""What the statistics of QA are called, for whoever shows them without computing them."""

from __future__ import annotations

STATISTIC_WORDS = {
    "free_energy_mean": "mean free energy",
    "free_energy_std": "spatial spread of the free energy",
    "confidence_mean": "mean confidence before calibration",
}
