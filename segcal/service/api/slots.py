"""How many of something may be under way at once; the next one is told to come again, not made to wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from segcal.service.api.problems import BUSY, ProblemError


class Slots:
    """A number of places. Taken and given back on the event loop only, so no lock is needed."""

    def __init__(self, n_slots: int, noun: str) -> None:
        self.n_slots, self.taken, self._noun = n_slots, 0, noun

    def take(self) -> None:
        """Take a place; raises ProblemError (429) when there is none."""
        if self.taken >= self.n_slots:
            raise ProblemError(BUSY, f"{self.taken} {self._noun} are open, which is the limit; try again in a moment")
        self.taken += 1

    def give_back(self) -> None:
        """Give a place back."""
        self.taken -= 1

    @contextmanager
    def one(self) -> Iterator[None]:
        """Have a place for the time of the block."""
        self.take()
        try:
            yield
        finally:
            self.give_back()
