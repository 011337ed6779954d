"""One fit of one peer, run inside the environment of the peers by `peers.py`; imports nothing of segcal.

    python _peer.py PACKAGE METHOD FOLDER --timeout 170

FOLDER holds logits.npy (n, C) float32 and labels.npy (n,) int64. The calibrated result goes to <package>_<method>.npy
there, as logits or probabilities as the peer gives them; CPU seconds of the fit alone are printed as JSON. A fit that
takes longer than the time-out (CPU seconds) ends the process with SIGXCPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

Array = np.ndarray[Any, Any]
Fit = Callable[[], Any]
Result = tuple[str, Array]
"""`logits` or `probabilities`, and the array."""


def prepare_sklearn(method: str, z: Array, y: Array) -> tuple[Fit, Callable[[Any], Result]]:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.frozen import FrozenEstimator

    class Logits(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        """A classifier whose decision function is its input."""

        def fit(self, x: Array, y: Array) -> Any:
            self.classes_ = np.unique(y)
            return self

        def decision_function(self, x: Array) -> Array:
            return x

        def predict(self, x: Array) -> Any:
            return self.classes_[x.argmax(1)]

    ready = FrozenEstimator(Logits().fit(z[:100_000], y[:100_000]))
    model = CalibratedClassifierCV(ready, method="temperature", cv=2, ensemble=False)
    return lambda: model.fit(z, y), lambda m: ("probabilities", m.predict_proba(z.astype(np.float64)))


def prepare_netcal(method: str, z: Array, y: Array) -> tuple[Fit, Callable[[Any], Result]]:
    from netcal.scaling import LogisticCalibration, TemperatureScaling

    # Only double precision works: with float32 the finite differences of its solver are 0 and nothing is fitted.
    probs = torch.softmax(torch.from_numpy(z).double(), 1).numpy()
    model = {"ts": TemperatureScaling, "vs": LogisticCalibration}[method]()
    return lambda: model.fit(probs, y), lambda m: ("probabilities", m.transform(probs))


def prepare_probmetrics(method: str, z: Array, y: Array) -> tuple[Fit, Callable[[Any], Result]]:
    from probmetrics.calibrators import get_calibrator
    from probmetrics.distributions import CategoricalLogits

    model = get_calibrator({"ts": "temp-scaling", "vs": "svs", "ms": "sms"}[method])
    logits, labels = CategoricalLogits(torch.from_numpy(z)), torch.from_numpy(y)

    def fit() -> Any:
        model.fit_torch(logits, labels)
        return model

    return fit, lambda m: ("logits", m.predict_proba_torch(logits).get_logits().double().numpy())


def prepare_torch_uncertainty(method: str, z: Array, y: Array) -> tuple[Fit, Callable[[Any], Result]]:
    _without_torchvision()
    from torch_uncertainty.post_processing import (
        DirichletScaler,
        MatrixScaler,
        TemperatureScaler,
        VectorScaler,
    )

    logits, labels = torch.from_numpy(z), torch.from_numpy(y)
    n_classes = z.shape[1]
    model: Any = {
        "ts": lambda: TemperatureScaler(model=None),
        "vs": lambda: VectorScaler(num_classes=n_classes, model=None),
        "ms": lambda: MatrixScaler(num_classes=n_classes, model=None),
        "dc": lambda: DirichletScaler(num_classes=n_classes, model=None, lambda_reg=None, mu_reg=None),
    }[method]()

    def fit() -> Any:
        model.fit([(logits, labels)], progress=False)
        return model

    def result(fitted: Any) -> Result:
        given = torch.log_softmax(logits, 1) if method == "dc" else logits
        with torch.no_grad():
            return "logits", fitted._scale(given).double().numpy()

    return fit, result


def prepare_torchmetrics(method: str, z: Array, y: Array) -> tuple[Fit, Callable[[Any], Result]]:
    _without_torchvision()
    from torchmetrics.classification import MulticlassCalibrationError

    probs, labels = torch.softmax(torch.from_numpy(z), 1), torch.from_numpy(y)
    metric = MulticlassCalibrationError(num_classes=z.shape[1], n_bins=15, norm="l1", validate_args=False)
    return lambda: metric(probs, labels), lambda value: ("value", np.array([float(value)]))


PREPARE: dict[str, Callable[[str, Array, Array], tuple[Fit, Callable[[Any], Result]]]] = {
    "sklearn": prepare_sklearn,
    "netcal": prepare_netcal,
    "probmetrics": prepare_probmetrics,
    "torch-uncertainty": prepare_torch_uncertainty,
    "torchmetrics": prepare_torchmetrics,
}


def _without_torchvision() -> None:
    """An empty stand-in where torchvision does not load beside this torch; the scalers never use it."""
    try:
        import torchvision  # noqa: F401
    except Exception:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.meta_path.insert(0, _StandIn())


class _StandIn:
    """Finds every module below `torchvision` and fills it with classes that do nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        class Empty(types.ModuleType):
            __path__: ClassVar[list[str]] = []
            __version__ = "0.28.0"

            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def main() -> None:
    """Load, prepare, then time the fit alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=PREPARE)
    parser.add_argument("method")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timeout", type=int, default=170)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    z, y = np.load(options.folder / "logits.npy"), np.load(options.folder / "labels.npy")
    fit, result = PREPARE[options.package](options.method, z, y)
    unlimited = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + options.timeout, unlimited[1]))
    begin = time.process_time()
    fitted = fit()
    seconds = time.process_time() - begin
    resource.setrlimit(resource.RLIMIT_CPU, unlimited)
    kind, values = result(fitted)
    np.save(options.folder / f"{options.package}_{options.method}.npy", values)
    print(json.dumps({"cpu_s": seconds, "kind": kind}))


if __name__ == "__main__":
    main()
