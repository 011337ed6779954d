"""The Hessian of the softmax NLL in the parameters of a design, summed over blocks of rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators.affine import AffineDesign, Vector


class Curvature:
    """Sums  sum_i J_i' (diag(w q) - w q q') J_i  with J_i the derivative of row i's scores in theta.

    Only the entries of B that the parameters reach take part: one of six for temperature scaling with five classes,
    one of three for vector scaling. Where many entries share few parameters, they are added up before rows are.
    """

    def __init__(self, design: AffineDesign) -> None:
        n_columns = design.shape[1]
        embed = design.embed.toarray()
        used = np.flatnonzero(np.any(embed != 0, axis=1))
        self._feature, self._column = used // n_columns, used % n_columns
        self._embed = embed[used]
        self._added_first = 2 * design.n_parameters <= used.size
        n_kept = design.n_parameters if self._added_first else used.size
        self._rank_one: Vector = np.zeros((n_kept, n_kept))
        self._diagonal: Vector = np.zeros((used.size, used.size))
        self._by_column = [np.flatnonzero(self._column == column) for column in range(n_columns)]

    def add(self, features: Tensor, weighted: Tensor, weights: Tensor) -> None:
        """Add one block.

        Args:
            features: (d, n).
            weighted: (C, n), w_i q_i.
            weights: (n,), w_i; rows of weight 0 drop out.
        """
        root = torch.where(weights > 0, weights, torch.ones_like(weights)).rsqrt_()
        scaled = weighted * root
        # One symmetric product gives the rank-one part.
        factor = features[self._feature.tolist()].mul_(scaled[self._column.tolist()])
        if self._added_first:
            factor = torch.as_tensor(self._embed.T.copy()).to(factor) @ factor
        self._rank_one += (factor @ factor.T).cpu().numpy()
        for column, entries in enumerate(self._by_column):
            if entries.size:
                seen = features[self._feature[entries].tolist()]
                self._diagonal[np.ix_(entries, entries)] += ((seen * weighted[column]) @ seen.T).cpu().numpy()

    def hessian(self) -> Vector:
        """(P, P)."""
        if self._added_first:
            return np.asarray(self._embed.T @ self._diagonal @ self._embed - self._rank_one)
        return np.asarray(self._embed.T @ (self._diagonal - self._rank_one) @ self._embed)
