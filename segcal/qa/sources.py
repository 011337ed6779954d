"""Where QA gets its cases from: a list of ids, and the maps of one case at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from segcal.qa.case import QaMaps


class Source(ABC):
    """Cases to look at.

    Attributes:
        ids: of the cases, in order.
        names: of the foreground classes or regions.
        reference: the calibrator's statistics of its calibration cases; empty when unknown.
        describe: what stands in the results about where they come from.
        warnings: what the user should know about the match of calibrator and data.
    """

    ids: tuple[str, ...]
    names: tuple[str, ...]
    reference: Mapping[str, tuple[float, ...]]
    describe: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    @abstractmethod
    def load(self, case_id: str) -> QaMaps:
        """Read one case; errors of `segcal.errors` mean that this case cannot be looked at."""
