"""Fitting local temperature scaling: Adam on weighted patches, stopped by the validation NLL.

The problem is not convex, so the solver is the paper's (SEG App. B). Two things are ours. The features are
standardised by class while fitting and the standardisation is folded into the parameters afterwards: one learning
rate then suits logits of any scale. And the work is done on one thread: the operations are small, a second thread
gains little, and the result does not depend on how many the machine has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch import Tensor

from segcal.calibrators.local_temperature import (
    HALO,
    KERNEL,
    LEAF_BIAS_OF_ONE,
    N_LEAVES,
    N_MAPS,
    TAU_MAX,
    TAU_MIN,
    LocalTemperatureScaling,
    LocalTemperatureScalingTI,
    tree_temperature,
)
from segcal.errors import DataError, ParameterError
from segcal.fitting.patches import PatchSample
from segcal.threads import one_thread
from segcal.types import IGNORED

BATCH_PATCHES = 256
MIN_BATCH_PATCHES, STEPS_PER_EPOCH = 16, 16
"""Small samples get smaller batches, so that an epoch still makes about this many steps."""
GATE_STD = 0.1
"""Spread of the gates' start. With all gates equal the leaves get equal gradients and the tree stays one map."""
MAX_GRADIENT_NORM = 1.0
"""Longer gradients are shortened to this; only batches with an extreme voxel reach it."""
IMPROVEMENT = 1e-5
"""Relative fall of the validation NLL that counts as progress for early stopping."""
BOUND_SHARE = 1e-3
"""Share of voxels at a bound of the temperature from which on the fit says so."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalFit:
    """A fitted local temperature and how it came about.

    Attributes:
        calibrator: the parameters with the lowest validation NLL.
        validation_nll: mean NLL over the voxels the validation patches stand for; never above identity's.
        fit_nll: the same for the training patches, without the penalty.
        objective: fit_nll plus the penalty.
        n_epochs: passes over the training patches.
        warnings: sentences for the log and the calibrator file.
    """

    calibrator: LocalTemperatureScaling
    validation_nll: float
    fit_nll: float
    objective: float
    n_epochs: int
    warnings: tuple[str, ...] = ()


def fit_local(
    train: PatchSample,
    validation: PatchSample,
    *,
    translation_invariant: bool,
    seed: int,
    device: torch.device,
    learning_rate: float = 1e-2,
    patience: int = 20,
    alpha: float = 0.0,
    max_epochs: int = 200,
    on_epoch: Callable[[int, float], None] | None = None,
) -> LocalFit:
    """Minimise the NLL of the training patches plus alpha times the sum of the squared weights.

    Starts at identity with small random gates, halves the learning rate when the validation NLL stalls, stops after
    `patience` epochs without progress and returns the best parameters seen, identity itself included. A step whose
    gradient is not finite is left out and counted in the warnings, so no parameter ever becomes NaN.

    Args:
        train: patches of the calibration cases.
        validation: patches of the validation cases.
        translation_invariant: fit `lts_ti` instead of `lts`.
        seed: of the gates' start and of the order of the batches.
        device: where to compute; the same seed gives the same bytes on any CPU thread count.
        learning_rate: of Adam at the start.
        patience: epochs.
        alpha: L2 penalty; the weights are counted in units of standardised features (biases are free).
        max_epochs: at most this many.
        on_epoch: called with (epoch, validation NLL) after each.
    """
    settings = _Settings(learning_rate, patience, alpha, max_epochs, seed)
    _check(train, validation, settings)
    with one_thread():
        data = _Data.of(train, translation_invariant, device)
        held_out = _Data.of(validation, translation_invariant, device)
        tree = _Tree.start(data, seed)
        search = _search(tree, data, held_out, settings, on_epoch)
        cls = LocalTemperatureScalingTI if translation_invariant else LocalTemperatureScaling
        calibrator = _calibrator(cls, tree, search)
        weight, bias = (tensor.to(device, torch.float32) for tensor in (calibrator.weight, calibrator.bias))
        fit_nll = data.mean_nll(weight, bias)
        return LocalFit(
            calibrator=calibrator,
            validation_nll=held_out.mean_nll(weight, bias),
            fit_nll=fit_nll,
            objective=fit_nll + (0.0 if search.best is None else alpha * float(search.best[0].square().sum())),
            n_epochs=search.n_epochs,
            warnings=_warnings(search, data.share_at_bounds(weight, bias), settings),
        )


@dataclass(frozen=True, slots=True)
class _Settings:
    learning_rate: float
    patience: int
    alpha: float
    max_epochs: int
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class _Data:
    """Patches as the tree sees them; by translation invariance `lts_ti` needs the log-probabilities only."""

    features: Tensor  # (n, C, h + 8, w + 8) float32
    labels: Tensor  # (n, h, w)
    weights: Tensor  # (n,) float32, the sample's over its n_voxels: weighted sums are means over voxels

    @classmethod
    def of(cls, sample: PatchSample, translation_invariant: bool, device: torch.device) -> _Data:
        logits = sample.logits.to(device)
        features = torch.log_softmax(logits, 1) if translation_invariant else logits
        weights = sample.weights / sample.n_voxels
        return cls(features, sample.labels.to(device), weights.to(device, torch.float32))

    @property
    def n_patches(self) -> int:
        return self.labels.shape[0]

    def nll_of(self, chosen: Tensor | slice, weight: Tensor, bias: Tensor) -> Tensor:
        """Each chosen patch's share of the mean NLL."""
        padded = self.features[chosen]
        tau = tree_temperature(padded, weight, bias)
        log_q = torch.log_softmax(_inner(padded) / tau.unsqueeze(1), 1)
        voxels = F.nll_loss(log_q, self.labels[chosen], ignore_index=IGNORED, reduction="none")
        return voxels.sum((1, 2)) * self.weights[chosen]

    def mean_nll(self, weight: Tensor, bias: Tensor) -> float:
        with torch.no_grad():
            parts = [self.nll_of(part, weight, bias).to(torch.float64).sum() for part in self._blocks()]
        return float(torch.stack(parts).sum())

    def share_at_bounds(self, weight: Tensor, bias: Tensor) -> float:
        hits, total = 0, 0
        for part in self._blocks():
            counted = self.labels[part] != IGNORED
            tau = tree_temperature(self.features[part], weight, bias)
            hits += int((((tau <= TAU_MIN) | (tau >= TAU_MAX)) & counted).sum())
            total += int(counted.sum())
        return hits / total

    def _blocks(self) -> Iterator[slice]:
        for begin in range(0, self.n_patches, BATCH_PATCHES):
            yield slice(begin, begin + BATCH_PATCHES)


@dataclass(frozen=True, slots=True, eq=False)
class _Tree:
    """The parameters while they are fitted, in units of standardised features."""

    weight: Tensor  # (7, C, 5, 5)
    bias: Tensor  # (7,)
    mean: Tensor  # (C,)
    scale: Tensor  # (C,)

    @classmethod
    def start(cls, data: _Data, seed: int) -> _Tree:
        """Identity: equal leaves of temperature 1 under random gates."""
        counted = data.labels != IGNORED
        voxels = _inner(data.features).movedim(1, -1)[counted].to(torch.float64)
        deviation = voxels.std(0, correction=0)
        scale = torch.where(deviation > 1e-6, deviation, torch.ones_like(deviation))
        weight = torch.zeros(N_MAPS, voxels.shape[1], KERNEL, KERNEL, device="cpu")
        generator = torch.Generator("cpu").manual_seed(seed)
        weight[N_LEAVES:].normal_(0.0, GATE_STD, generator=generator)
        bias = torch.zeros(N_MAPS, device="cpu")
        bias[:N_LEAVES] = LEAF_BIAS_OF_ONE
        device = data.features.device
        return cls(
            weight.to(device).requires_grad_(), bias.to(device).requires_grad_(), voxels.mean(0).float(), scale.float()
        )

    def folded(self) -> tuple[Tensor, Tensor]:
        """(weight, bias) for plain features: w (x - mean) / scale + b = (w / scale) x + (b - mean w / scale)."""
        weight = self.weight / self.scale.view(1, -1, 1, 1)
        return weight, self.bias - (weight * self.mean.view(1, -1, 1, 1)).sum((1, 2, 3))


@dataclass(slots=True)
class _Search:
    """Where the fit stands: the best parameters so far and what happened on the way."""

    best_nll: float
    best: tuple[Tensor, Tensor] | None = None  # standardised weight and bias; None: still identity
    n_epochs: int = 0
    n_skipped: int = 0
    settled: bool = False


def _search(
    tree: _Tree, data: _Data, held_out: _Data, settings: _Settings, on_epoch: Callable[[int, float], None] | None
) -> _Search:
    optimiser = torch.optim.Adam([tree.weight, tree.bias], lr=settings.learning_rate)
    # A quarter of the patience: the rate falls a few times before the fit gives up.
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimiser, factor=0.5, patience=max(1, settings.patience // 4), threshold=IMPROVEMENT
    )
    generator = torch.Generator("cpu").manual_seed(settings.seed + 1)
    search = _Search(held_out.mean_nll(*tree.folded()))
    if not isfinite(search.best_nll + data.mean_nll(*tree.folded())):
        raise DataError("the NLL of the uncalibrated patches is not finite: the logits are too large for float32")
    reference, stalled = search.best_nll, 0
    while search.n_epochs < settings.max_epochs and stalled < settings.patience:
        search.n_skipped += _epoch(tree, data, optimiser, settings.alpha, generator)
        search.n_epochs += 1
        nll = held_out.mean_nll(*tree.folded())
        schedule.step(nll)
        if nll < search.best_nll:
            search.best_nll, search.best = nll, (tree.weight.detach().clone(), tree.bias.detach().clone())
        if nll < reference * (1 - IMPROVEMENT):
            reference, stalled = nll, 0
        else:
            stalled += 1
        if on_epoch is not None:
            on_epoch(search.n_epochs, nll)
    search.settled = stalled >= settings.patience
    return search


def _epoch(tree: _Tree, data: _Data, optimiser: torch.optim.Adam, alpha: float, generator: torch.Generator) -> int:
    """One pass over the patches in random order; returns the number of steps left out."""
    n_skipped = 0
    order = torch.randperm(data.n_patches, generator=generator, device="cpu").to(data.labels.device)
    batch = min(BATCH_PATCHES, max(MIN_BATCH_PATCHES, data.n_patches // STEPS_PER_EPOCH))
    for chosen in order.split(batch):
        optimiser.zero_grad()
        share = data.n_patches / len(chosen)
        loss = share * data.nll_of(chosen, *tree.folded()).sum() + alpha * tree.weight.square().sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([tree.weight, tree.bias], MAX_GRADIENT_NORM)
        if bool(torch.isfinite(norm)):
            optimiser.step()
        else:
            n_skipped += 1
    return n_skipped


def _calibrator(cls: type[LocalTemperatureScaling], tree: _Tree, search: _Search) -> LocalTemperatureScaling:
    """The best parameters, for plain features and in float64; identity when nothing was better."""
    if search.best is None:
        return cls.identity(tree.weight.shape[1])
    weight, bias = search.best
    best = _Tree(*(tensor.cpu().to(torch.float64) for tensor in (weight, bias, tree.mean, tree.scale)))
    return cls(*best.folded())


def _warnings(search: _Search, share_at_bounds: float, settings: _Settings) -> tuple[str, ...]:
    found = []
    if search.best is None:
        found.append("no local temperature lowered the validation NLL: the calibrator is the identity")
    elif not search.settled:
        found.append(f"stopped after {settings.max_epochs} epochs while the validation NLL was still moving")
    if search.n_skipped:
        found.append(f"{search.n_skipped} steps were left out because their gradient was not finite")
    if share_at_bounds > BOUND_SHARE:
        found.append(
            f"the temperature of {100 * share_at_bounds:.1f} % of the voxels in the sample is at a bound "
            f"({TAU_MIN:g} or {TAU_MAX:g}): the labels are (nearly) separable or say nothing there"
        )
    return tuple(found)


def _inner(padded: Tensor) -> Tensor:
    """The patch without its halo."""
    return padded[:, :, HALO:-HALO, HALO:-HALO]


def _check(train: PatchSample, validation: PatchSample, settings: _Settings) -> None:
    if train.n_classes != validation.n_classes:
        raise DataError(
            f"the calibration patches have {train.n_classes} classes, the validation patches {validation.n_classes}"
        )
    if not (settings.learning_rate > 0 and settings.alpha >= 0 and settings.patience >= 1 and settings.max_epochs >= 1):
        raise ParameterError(
            f"lts: learning_rate must be > 0, alpha >= 0, patience and max_epochs >= 1, got {settings.learning_rate}, "
            f"{settings.alpha}, {settings.patience} and {settings.max_epochs}"
        )
