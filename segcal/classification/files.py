"""A fitted method with everything it knows of itself: the same file as a segmentation's calibrator."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_safetensors

import segcal
from segcal.calibrator_info import CalibratorInfo
from segcal.classification.base import MOST_FEATURE_ROWS, RowMethod
from segcal.classification.drawing import some_rows
from segcal.classification.methods import METHODS
from segcal.classification.row_warnings import fit_warnings
from segcal.classification.samples import Samples
from segcal.errors import FileFormatError, MismatchError, ParameterError, UsageError
from segcal.fitted import METADATA_KEY, read_calibrator_file
from segcal.io.atomic import atomic_write

NUMBERS_AT_ONCE = 1 << 22
"""Scores and features that a method is given at a time: what it makes of them then stays small for any number of rows,
which never depend on one another."""
MAX_ROWS = "max_rows"
"""The setting of every method with features; see `MOST_FEATURE_ROWS`."""


@dataclass(frozen=True, eq=False)
class FittedMethod:
    """A method and its metadata.

    Attributes:
        method: the fitted map.
        info: how it was made.
    """

    method: RowMethod
    info: CalibratorInfo

    def probabilities(self, samples: Samples, *, classes: Sequence[str] | None = None) -> torch.Tensor:
        """Calibrated (n, C) float64 probabilities.

        Args:
            samples: rows of the same classifier.
            classes: their names, compared with those of the fit where given.

        Raises:
            MismatchError: other classes, or the other kind for a method that is not translation-invariant.
        """
        self.check(samples, classes)
        found = torch.empty_like(samples.logits)
        width = samples.n_classes + (0 if samples.features is None else samples.features.shape[1])
        for part in torch.arange(samples.n_rows, device=found.device).split(max(NUMBERS_AT_ONCE // width, 1)):
            found[part] = self.method.probabilities(samples.rows(part))
        return found

    def check(self, samples: Samples, classes: Sequence[str] | None = None) -> None:
        """Raise MismatchError, naming the field, where these are not rows the method was fitted for."""
        fitted = self.info.classes
        if len(fitted) != samples.n_classes:
            raise MismatchError(
                f"classes differ: {self.info.method} was fitted for {len(fitted)} ({_some(fitted)}), the rows have "
                f"{samples.n_classes} scores."
            )
        if classes is not None and tuple(classes) != fitted:
            raise MismatchError(
                f"classes differ: {self.info.method} was fitted for {_some(fitted)}, the rows name "
                f"{_some(classes)}; the order counts too."
            )
        if samples.kind != self.info.kind and not self.method.translation_invariant:
            raise MismatchError(
                f"kind differs: {self.info.method} was fitted on {self.info.kind} and uses the offset of the "
                f"scores, the rows hold {samples.kind}. Give {self.info.kind}, or fit a translation-invariant method "
                "(ms_c, dc, …)."
            )

    @cached_property
    def content(self) -> bytes:
        """The calibrator file, byte by byte."""
        tensors = {name: value.clone().contiguous() for name, value in self.method.tensors().items()}
        return save_safetensors(tensors, metadata={METADATA_KEY: self.info.to_json()})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibrator file, whole or not at all."""
        with atomic_write(Path(path)) as temporary:
            temporary.write_bytes(self.content)


def fit(
    method: str, samples: Samples, *, classes: Sequence[str] | None = None, seed: int = 0, **settings: Any
) -> FittedMethod:
    """Fit a method by name.

    Args:
        method: a key of `METHODS`.
        samples: labelled rows, with features where the method needs them.
        classes: names of the classes; "0", "1", … without.
        seed: of everything that is drawn.
        **settings: the method's own.

    Raises:
        UsageError: an unknown method, or a setting it does not have.
    """
    kind = method_named(method)
    check_settings(kind, settings)
    names = tuple(str(k) for k in range(samples.n_classes)) if classes is None else tuple(classes)
    if len(names) != samples.n_classes or len(set(names)) != len(names):
        raise UsageError(
            f"{len(names)} class names ({_some(names)}) for {samples.n_classes} scores; one each, all different."
        )
    own = {name: value for name, value in settings.items() if name != MAX_ROWS}
    seen, warnings = _bounded(kind, samples, seed, settings.get(MAX_ROWS, MOST_FEATURE_ROWS))
    fitted = kind.fit(seen, seed=seed, **own)
    doubts = fit_warnings(seen.known_labels.cpu().numpy(), names, by_class=kind.by_class)
    return FittedMethod(fitted, _info(fitted, seen, names, seed, settings, (*warnings, *doubts)))


def _bounded(method: type[RowMethod], samples: Samples, seed: int, most: object) -> tuple[Samples, tuple[str, ...]]:
    """The rows a fit sees, and what to say where they are not all."""
    if not method.needs_features or samples.labels is None:
        return samples, ()
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ParameterError(f"{method.name}: max_rows must be a whole number of at least 1, got {most!r}")
    if samples.n_rows <= most:
        return samples, ()
    text = (
        f"fitted on {most:,} rows drawn from the {samples.n_rows:,}, the classes in their proportions; "
        "`max_rows` sets how many, and time and memory grow with it."
    )
    return samples.rows(some_rows(samples.labels, most, seed)), (text,)


def load(path: str | os.PathLike[str]) -> FittedMethod:
    """Read a calibrator file: one of `segcal classify`, or a voxel-wise one of `segcal fit` for classes.

    Raises:
        MissingFileError: there is no such file.
        FileFormatError: not a calibrator, truncated, of an unknown version, or one that needs volumes.
    """
    path = Path(path)
    info, tensors = read_calibrator_file(path)
    if info.method not in METHODS or info.regions:
        what = "the regions of a sigmoid model" if info.regions else f"method `{info.method}`"
        raise FileFormatError(f"{path}: {what} cannot be applied to rows; known methods are {', '.join(METHODS)}")
    try:
        method = METHODS[info.method].from_tensors(tensors)
    except ParameterError as error:
        raise FileFormatError(f"{path}: {error}") from None
    if method.n_classes not in (None, len(info.classes)):
        raise FileFormatError(
            f"{path}: {info.method} has parameters for {method.n_classes} classes, the metadata names "
            f"{len(info.classes)}"
        )
    return FittedMethod(method, info)


def method_named(name: str) -> type[RowMethod]:
    """The class of a method; UsageError with the nearest name where there is none."""
    if name not in METHODS:
        close = get_close_matches(name, METHODS, 1)
        hint = f"; did you mean `{close[0]}`?" if close else f"; there are {', '.join(METHODS)}"
        raise UsageError(f"unknown method `{name}`{hint}")
    return METHODS[name]


def settings_of(method: type[RowMethod]) -> dict[str, Any]:
    """The settings a method has, with their defaults."""
    parameters = inspect.signature(method.fit).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "seed"}
    shared = () if method.training is None else fields(method.training)
    bound = {MAX_ROWS: MOST_FEATURE_ROWS} if method.needs_features else {}
    return own | {field.name: field.default for field in shared if field.name not in own} | bound


def check_settings(method: type[RowMethod], settings: Mapping[str, Any]) -> None:
    """UsageError where a setting is not one of the method's, ParameterError where it is no number that it could be."""
    known = settings_of(method)
    for name, value in settings.items():
        if name not in known:
            raise UsageError(f"{method.name} has no setting `{name}`; it has {', '.join(known) or 'none'}")
        if type(known[name]) is int and isinstance(value, float | str):
            raise ParameterError(f"{method.name}: {name} must be a whole number, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ParameterError(f"{method.name}: {name.rstrip('_')} must be finite, got {value}")


def _info(
    method: RowMethod,
    samples: Samples,
    classes: tuple[str, ...],
    seed: int,
    settings: Mapping[str, Any],
    warnings: tuple[str, ...],
) -> CalibratorInfo:
    values = dict(method.values)
    plain = {name: value for name, value in settings.items() if isinstance(value, str | int | float | bool)}
    nll = -float(method.probabilities(samples).gather(1, samples.known_labels.unsqueeze(1)).log().mean())
    return CalibratorInfo(
        method=method.name,
        classes=classes,
        # One classifier: its probabilities are the pooled ones, and their logarithms have no offset left.
        pooling=samples.kind,
        kind=samples.kind,
        n_members=1,
        translation_invariant=method.translation_invariant or samples.kind == "probabilities",
        preserves=method.preserves,
        lambda_=values.pop("lambda", None),
        mu=values.pop("mu", None),
        fit_nll=nll if math.isfinite(nll) else None,
        validation_nll=method.validation_nll,
        versions={"segcal": segcal.__version__, "torch": version("torch"), "numpy": version("numpy")},
        seed=seed,
        warnings=(*warnings, *method.warnings),
        settings={**plain, **values},
    )


def _some(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
