"""The seam between the stages and where their work is done: order, errors, and how much is in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from segcal.case_map import ReadAhead, in_process


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Nothing is read ahead with a single thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def double(item: int) -> int:
    if item == 3:
        raise ValueError("three")
    return 2 * item


class Doubled(ReadAhead[int, int, int]):
    """Notes how many cases are between the beginning of their reading and the end of their work."""

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self.most = 0
        self.readers: set[str] = set()
        self._lock = threading.Lock()

    def read(self, item: int) -> int:
        with self._lock:
            self.alive.add(item)
            self.most = max(self.most, len(self.alive))
            self.readers.add(threading.current_thread().name)
        if item == 5:
            self.alive.discard(item)
            raise OSError("five")
        return item

    def finish(self, item: int, data: int) -> int:
        assert threading.current_thread() is threading.main_thread()
        time.sleep(0.01)  # long enough for the reading of the next case to begin
        try:
            return double(data)
        finally:
            with self._lock:
                self.alive.discard(item)


@pytest.mark.parametrize("ahead", [False, True])
def test_outcomes_come_in_order_and_an_error_stays_with_its_case(ahead: bool) -> None:
    outcomes = list(in_process(Doubled() if ahead else double, range(5)))
    assert [outcome.item for outcome in outcomes] == [0, 1, 2, 3, 4]
    assert [outcome.value for outcome in outcomes] == [0, 2, 4, None, 8]
    with pytest.raises(ValueError, match="three"):
        outcomes[3].result()
    assert outcomes[4].result() == 8


def test_an_error_while_reading_ahead_is_that_of_its_own_case() -> None:
    outcomes = list(in_process(Doubled(), [4, 5, 6]))
    assert [type(outcome.error) for outcome in outcomes] == [type(None), OSError, type(None)]


def test_reading_ahead_overlaps_and_never_holds_more_than_two_cases() -> None:
    work = Doubled()
    list(in_process(work, [10, 11, 12, 13, 14, 15]))
    assert work.most == 2
    assert all(name.startswith("segcal-ahead") for name in work.readers)


@pytest.mark.parametrize("ahead", [False, True])
def test_items_are_drawn_when_they_are_needed(ahead: bool) -> None:
    """What was learnt from earlier results can go into a later item."""
    drawn: list[int] = []

    def items() -> Iterator[int]:
        for item in range(10, 20):
            drawn.append(item)
            yield item

    outcomes = in_process(Doubled() if ahead else double, items())
    next(outcomes)
    assert len(drawn) == 1 + ahead
    outcomes.close()
    assert len(drawn) == 1 + ahead


def test_an_interrupt_is_no_outcome() -> None:
    def stopped(item: int) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(in_process(stopped, [1]))


def test_without_cases_there_is_nothing() -> None:
    assert list(in_process(Doubled(), [])) == []
