"""The core's voxel-wise calibrators on a classifier's rows: same maps, same optimum, same file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from torch import Tensor

from segcal.calibrators import Calibrator
from segcal.calibrators.affine import AffineCalibrator
from segcal.calibrators.class_conditional import ArgmaxConeScaling, ConditionalDirichlet, OrderConeScaling
from segcal.calibrators.ensemble_temperature import EnsembleTemperatureScaling
from segcal.calibrators.identity import Identity
from segcal.calibrators.matrix import ConstrainedMatrixScaling, DirichletCalibration, MatrixScaling, VectorScaling
from segcal.calibrators.temperature import TemperatureScaling
from segcal.classification.base import RowMethod
from segcal.classification.drawing import some_rows, stratified
from segcal.classification.matrix_free import solve_matrix_free
from segcal.classification.one_vs_rest import check_labelled
from segcal.classification.samples import Samples
from segcal.errors import DataError, UsageError
from segcal.fitting.exact import KKT_PROMISE, ExactSolver, Solution
from segcal.fitting.likelihood import Likelihood
from segcal.fitting.mixture import solve_mixture
from segcal.fitting.problem import Penalty
from segcal.fitting.rows import Rows, all_rows
from segcal.settings import SearchSpace

DENSE_CLASSES = 12
"""Up to here the core's dense Newton steps are quicker than conjugate gradients."""
MAX_PARAMETERS = 100_000
"""More than this is refused: neither the time nor the rows of a calibration set would do."""
MAX_BOUNDED_PARAMETERS = 30_000
"""Of cms_ap and cms_op, whose bounds need the dense solver."""
TUNING_ROWS = 50_000
"""λ and µ are tuned on at most this many rows; the final fit sees all of them."""
SENSIBLE = 1e-3
"""λ and µ where there are too few rows to tune."""
FEWEST_TUNING_ROWS = 20
TRIAL_TOLERANCE = 1e-4
"""Gradient at which the trials of many-class problems stop; it moves their NLL by less than 1e-6."""
DENSE_TRIALS, LARGE_TRIALS = 20, 6
FEW_CLASSES_SPACE = SearchSpace.model_validate(
    {"lambda": {"zero": True, "low": 1e-6, "high": 1e3}, "mu": {"zero": True, "low": 1e-6, "high": 1e3}}
)
"""Wider than for voxels (SEG: up to 0.1): a classifier brings thousands of rows, not millions. On CIFAR the best λ
lies between 0.1 and 1000."""
MANY_CLASSES_SPACE = SearchSpace.model_validate(
    {"lambda": {"low": 1.0, "high": 1e4}, "mu": {"zero": True, "low": 1e-2, "high": 1e3}}
)
"""Above `DENSE_CLASSES`: λ is spread over C (C - 1) weights, so smaller values mean no penalty at all."""

BOUNDED = (ArgmaxConeScaling, OrderConeScaling)

Solve = Callable[[Penalty], Solution]


@dataclass(frozen=True, slots=True, eq=False)
class CoreMethod(RowMethod):
    """A calibrator of the core and how it was found."""

    core: ClassVar[type[Calibrator]]

    calibrator: Calibrator
    values: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    validation_nll: float | None = None

    def __init_subclass__(cls, *, core: type[Calibrator]) -> None:
        """Name and promises are the calibrator's own."""
        cls.core = core
        cls.name = cls.core.name
        cls.translation_invariant = cls.core.translation_invariant
        cls.preserves = cls.core.preserves
        cls.order_matters = issubclass(cls.core, AffineCalibrator) and cls.core.penalised
        cls.by_class = cls.core.parameter_counts(3) != cls.core.parameter_counts(2)

    @property
    def n_classes(self) -> int | None:
        return self.calibrator.n_classes

    @classmethod
    def fit(  # type: ignore[override]
        cls,
        samples: Samples,
        *,
        seed: int = 0,
        lambda_: float | None = None,
        mu: float | None = None,
        trials: int | None = None,
        validation: Samples | None = None,
        validation_share: float = 0.2,
    ) -> Self:
        """The global optimum of the penalised NLL (`ets`: of a search over T); λ and µ are tuned where left open.

        Args:
            samples: labelled.
            seed: of the validation share and the trials.
            lambda_, mu: fix the regulariser (SEG eq. 15) of ms, ms_c, dc, cdc, cms_ap and cms_op.
            trials: settings of λ and µ that are tried; None for 20, or 6 with more than 12 classes.
            validation: rows to judge the trials by; the fit then sees `samples` only. Otherwise a share is drawn,
                the same of every class, and the chosen setting is fitted again on all rows.
            validation_share: how much to draw.
        """
        check_labelled(samples, cls.name)
        _check_size(cls.core, samples.n_classes)
        rows = _rows(samples)
        if cls.core is EnsembleTemperatureScaling:
            return cls._of(solve_mixture(rows), {})
        if not issubclass(cls.core, AffineCalibrator):
            return cls(cls.core.identity(samples.n_classes))
        if not cls.core.penalised:
            return cls._of(_solver(cls.core, rows)(Penalty()), {})
        fixed = {name: value for name, value in (("lambda", lambda_), ("mu", mu)) if value is not None}
        if samples.n_classes == 2:
            # At C = 2 a matrix can say everything at no cost: lambda means nothing (METHODS 2).
            fixed.setdefault("lambda", 0.0)
        tuned, nll = _tuned(cls.core, samples, fixed, seed, trials, validation, validation_share)
        values = {**fixed, **tuned}
        return cls._of(_solver(cls.core, rows)(Penalty(values["lambda"], values["mu"])), values, nll)

    @classmethod
    def _of(cls, solution: Solution, values: Mapping[str, Any], validation_nll: float | None = None) -> Self:
        warnings = tuple(text.replace("voxel", "row") for text in solution.warnings)
        return cls(solution.calibrator, values, warnings, validation_nll)

    def probabilities(self, samples: Samples) -> Tensor:
        return self.calibrator.probabilities(samples.logits, class_axis=1)

    def tensors(self) -> dict[str, Tensor]:
        return self.calibrator.tensors()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(cls.core.from_tensors(tensors))


def _rows(samples: Samples) -> Rows:
    return all_rows(samples.logits, samples.known_labels, samples.decision)


def _check_size(method: type[Calibrator], n_classes: int) -> None:
    n_parameters = method.parameter_counts(n_classes)[0]
    most = MAX_BOUNDED_PARAMETERS if method in BOUNDED else MAX_PARAMETERS
    if n_parameters > most:
        raise UsageError(
            f"{method.name} has {n_parameters:,} parameters at {n_classes:,} classes, more than the {most:,} "
            "that can be fitted here, and far more than a calibration set determines. Methods that grow slowly with "
            "the classes: ts, ets, vs, isotonic, platt, beta, histogram."
        )


def _solver(method: type[AffineCalibrator], rows: Rows, tolerance: float = KKT_PROMISE / 2) -> Solve:
    """What solves a method on some rows for any penalty."""
    if method in BOUNDED or rows.n_classes <= DENSE_CLASSES:
        return ExactSolver(method, rows).solve
    return lambda penalty: solve_matrix_free(method, rows, penalty, tolerance=tolerance)


def _tuned(
    method: type[AffineCalibrator],
    samples: Samples,
    fixed: Mapping[str, float],
    seed: int,
    trials: int | None,
    validation: Samples | None,
    share: float,
) -> tuple[dict[str, float], float | None]:
    """What was left open, and the validation NLL of the best trial."""
    names = [name for name in ("lambda", "mu") if name not in fixed]
    if not names:
        return {}, None
    few = samples.n_classes <= DENSE_CLASSES
    trials = (DENSE_TRIALS if few else LARGE_TRIALS) if trials is None else trials
    if trials < 1:
        raise UsageError(f"{method.name}: trials must be at least 1, got {trials}")
    labels = samples.known_labels
    if validation is None:
        if samples.n_rows < FEWEST_TUNING_ROWS:
            return dict.fromkeys(names, SENSIBLE), None
        chosen = some_rows(labels, TUNING_ROWS, seed)
        kept, aside = stratified(labels[chosen], share, seed)
        if len(aside) == 0 or len(kept) == 0:
            raise DataError(
                f"{method.name}: a validation share of {share:g} leaves {len(aside)} of {samples.n_rows} rows to judge "
                "trials by; give a larger one, or fix lambda_ and mu."
            )
        inner, judge = samples.rows(chosen[kept]), samples.rows(chosen[aside])
    else:
        if validation.n_classes != samples.n_classes or validation.n_rows == 0:
            raise DataError(
                f"{method.name}: validation rows must be some, with {samples.n_classes} classes; got "
                f"{validation.n_rows} with {validation.n_classes}."
            )
        inner, judge = samples, validation
    likelihood = Likelihood(_rows(judge))
    solve = _solver(method, _rows(inner), TRIAL_TOLERANCE)

    def objective(values: Mapping[str, float], report: object) -> float:
        now = {**fixed, **values}
        return likelihood.mean(solve(Penalty(now["lambda"], now["mu"])).calibrator)

    from segcal.tuning.search import tune  # here, because it brings Optuna

    space = FEW_CLASSES_SPACE if few else MANY_CLASSES_SPACE
    found = tune(objective, names, space, n_trials=trials, seed=seed, problem=method.name)
    return dict(found.values), found.validation_nll


class IdentityRows(CoreMethod, core=Identity):
    """`identity`: changes nothing."""


class TemperatureRows(CoreMethod, core=TemperatureScaling):
    """`ts`: z / T."""


class EnsembleTemperatureRows(CoreMethod, core=EnsembleTemperatureScaling):
    """`ets`: a mixture of z / T, z and the uniform distribution."""


class VectorRows(CoreMethod, core=VectorScaling):
    """`vs`: diag(a) z + b."""


class MatrixRows(CoreMethod, core=MatrixScaling):
    """`ms`: W z + b."""


class ConstrainedMatrixRows(CoreMethod, core=ConstrainedMatrixScaling):
    """`ms_c`: W z + b with equal row sums."""


class DirichletRows(CoreMethod, core=DirichletCalibration):
    """`dc`: W log S(z) + b."""


class ConditionalDirichletRows(CoreMethod, core=ConditionalDirichlet):
    """`cdc`: one `dc` per predicted class."""


class ArgmaxConeRows(CoreMethod, core=ArgmaxConeScaling):
    """`cms_ap`: one map per predicted class that keeps the winner."""


class OrderConeRows(CoreMethod, core=OrderConeScaling):
    """`cms_op`: one map per predicted class that keeps the ranking."""
