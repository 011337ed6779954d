"""run.json is written after every case while that is quick, and never costs more than a small share of the time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from segcal.applying.record import RunRecord
from segcal.applying.record_pace import QUICK_S, SHARE, RecordPace
from segcal.errors import OutputError


@dataclass
class Record:
    """Takes `cost` seconds of a clock of its own to be written."""

    cost: float
    now: float = 0.0
    written_at: list[float] = field(default_factory=list)

    def save(self, out: Path) -> None:
        self.now += self.cost
        self.written_at.append(self.now)

    @property
    def pace(self) -> RecordPace:
        return RecordPace(clock=lambda: self.now)

    @property
    def record(self) -> RunRecord:
        return cast(RunRecord, self)


def finish_cases(fake: Record, n: int, seconds_each: float) -> None:
    pace = fake.pace
    with pace.saved_at_the_end(fake.record, Path()):
        for _ in range(n):
            fake.now += seconds_each
            pace.save(fake.record, Path())


def test_a_short_record_is_written_after_every_case() -> None:
    fake = Record(cost=QUICK_S / 2)
    finish_cases(fake, 50, seconds_each=0.001)
    assert len(fake.written_at) == 50


def test_a_long_record_takes_a_small_share_of_the_time_and_is_complete_at_the_end() -> None:
    fake = Record(cost=1.0)
    finish_cases(fake, 1000, seconds_each=0.1)
    spent = len(fake.written_at) * fake.cost
    assert 2 <= len(fake.written_at) <= 8
    assert spent <= SHARE * fake.now + 2 * fake.cost
    assert fake.written_at[-1] == fake.now


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OutputError])
def test_what_was_left_to_later_is_written_when_the_run_is_stopped(stop: type[BaseException]) -> None:
    fake = Record(cost=1.0)
    pace = fake.pace

    def stopped_run() -> None:
        with pace.saved_at_the_end(fake.record, Path()):
            for _ in range(3):
                fake.now += 0.1
                pace.save(fake.record, Path())
            assert len(fake.written_at) == 1
            raise stop

    with pytest.raises(stop):
        stopped_run()
    assert len(fake.written_at) == 2
