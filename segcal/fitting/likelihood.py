"""The number every fit is judged by: mean NLL over all voxels a sample stands for."""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.calibrators import Calibrator
from segcal.fitting.rows import CONTROL_TEMPERATURES, Rows


class Likelihood:
    """Estimates mean NLLs from one sample; what does not depend on the calibrator is computed once.

    A weighted sum over the sample is unbiased but noisy. Where the exact NLLs at the control temperatures are
    known, the loss is regressed on them and only the residual is estimated from the sample (the regression
    estimator of survey sampling): several times less noise for the same rows.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._controls = None if rows.control_nll is None else torch.cat([_controls(rows, p) for p in rows.blocks()])

    def mean(self, calibrator: Calibrator) -> float:
        """Mean NLL of a voxel-wise calibrator."""
        rows = self._rows
        losses = torch.cat([_losses(calibrator, rows, part) for part in rows.blocks()])
        n_voxels = max(rows.n_voxels, 1.0)
        if self._controls is None or rows.control_nll is None:
            return float(rows.weights @ losses) / n_voxels
        # Rows of weight 1 stand for themselves alone and add no noise: the slopes are chosen to spare the others.
        noisy = (rows.weights * (rows.weights - 1.0)).unsqueeze(1) * self._controls
        right = (noisy.T @ losses).unsqueeze(1)
        slopes = torch.linalg.lstsq(noisy.T @ self._controls, right, driver="gelsd").solution.squeeze(1)
        known = torch.tensor([1.0, *rows.control_nll], dtype=torch.float64, device=losses.device)
        return float(slopes @ known + rows.weights @ (losses - self._controls @ slopes) / n_voxels)


def mean_nll(calibrator: Calibrator, rows: Rows) -> float:
    """Mean NLL of one calibrator over the voxels behind `rows`."""
    return Likelihood(rows).mean(calibrator)


def _losses(calibrator: Calibrator, rows: Rows, part: slice) -> Tensor:
    log_q = calibrator.log_probs(rows.logits[part].to(torch.float64), rows.decision[part])
    return -log_q.gather(1, rows.labels[part].unsqueeze(1)).squeeze(1)


def _controls(rows: Rows, part: slice) -> Tensor:
    """(n, 1 + controls): the constant and the NLL at every control temperature."""
    logits, picked = rows.logits[part].to(torch.float64), rows.labels[part].unsqueeze(1)
    columns = [torch.ones_like(logits[:, :1])]
    columns += [-torch.log_softmax(logits / t, 1).gather(1, picked) for t in CONTROL_TEMPERATURES]
    return torch.cat(columns, 1)
