"""Confidence scores of the reweighted-risk paper (its Appendix, Table 1), each within [0, 1]: 1 is certain."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from segcal.classification.losses.voxels import Voxels
from segcal.errors import ParameterError

ScoreName = Literal["msp", "margin", "negative_entropy"]


def msp(voxels: Voxels) -> Tensor:
    """Maximum softmax probability."""
    return voxels.confidence()


def margin(voxels: Voxels) -> Tensor:
    """Largest minus second largest probability."""
    return voxels.confidence() - voxels.log_second().exp()


def negative_entropy(voxels: Voxels) -> Tensor:
    """1 - H(p) / ln C. The paper's score is -H(p); this rescaling keeps its order and fits the bins on [0, 1].

    The released code rescales with a slip of the sign, so that every input is clamped to 1 and all weights are equal.
    """
    return 1 - voxels.entropy() / math.log(voxels.n_classes)


SCORES: dict[str, Callable[[Voxels], Tensor]] = {"msp": msp, "margin": margin, "negative_entropy": negative_entropy}


def score_function(name: str) -> Callable[[Voxels], Tensor]:
    if name not in SCORES:
        raise ParameterError(f"score {name!r}: expected one of {', '.join(SCORES)}")
    return SCORES[name]
