"""Run by another interpreter, one that has netcal: fit its methods on one half, write probabilities of the other."""

from __future__ import annotations

import sys
import warnings

import numpy as np

warnings.simplefilter("ignore")

from netcal.binning import HistogramBinning, IsotonicRegression  # noqa: E402
from netcal.scaling import BetaCalibration, LogisticCalibration, TemperatureScaling  # noqa: E402

SLOW_CLASSES = 10
"""Above it, finite differences of its scalings with a parameter a class take minutes a fit: one seed is enough."""


def main(source: str, target: str) -> None:
    data = np.load(source)
    found = {}
    for seed in range(len(data["fit_labels"])):
        # float64: with float32 netcal's finite differences vanish and every scaling stays at the identity.
        fit_probs, test_probs = (data[name][seed].astype(np.float64) for name in ("fit_probs", "test_probs"))
        models = {
            "ts": TemperatureScaling(),
            "isotonic": IsotonicRegression(),
            "histogram, equal width": HistogramBinning(bins=15),  # it has no other
        }
        if seed == 0 or fit_probs.shape[1] <= SLOW_CLASSES:
            models |= {"vs": LogisticCalibration(), "beta": BetaCalibration()}
        for name, model in models.items():
            model.fit(fit_probs, data["fit_labels"][seed])
            found[f"{seed}/{name}"] = model.transform(test_probs)
    np.savez(target, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
