"""Tuning: the same questions for the same seed, also after a stop; ranges, zeros and pruning as asked."""

from __future__ import annotations

import errno
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from segcal.errors import DataError, FileFormatError, OutputError
from segcal.settings import Choices, LogRange, SearchSpace
from segcal.tuning import Report
from segcal.tuning.search import SENSIBLE, Tuned, tune

NAMES = ("lambda", "mu")


def smooth(values: Mapping[str, float]) -> float:
    """A bowl around lambda = 1e-3, mu = 1e-5; zero lies at the far end of its side."""
    at = [math.log10(max(values[name], 1e-7)) for name in NAMES]
    return 1 + (at[0] + 3) ** 2 + (at[1] + 5) ** 2


class Search:
    """An objective that remembers what it was asked, and may be killed at one of the questions."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.asked: list[dict[str, float]] = []
        self.kill_at = kill_at

    def __call__(self, values: Mapping[str, float], report: Report) -> float:
        if len(self.asked) == self.kill_at:
            raise KeyboardInterrupt
        self.asked.append(dict(values))
        return smooth(values)


def run(search: Search, *, storage: Path | None = None, n_trials: int = 14, seed: int = 0, problem: str = "p") -> Tuned:
    return tune(search, NAMES, SearchSpace(), n_trials=n_trials, seed=seed, problem=problem, storage=storage)


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[list[dict[str, float]], Tuned]:
    search = Search()
    return search.asked, run(search)


def test_the_same_seed_asks_the_same_questions(uninterrupted: tuple[list[dict[str, float]], Tuned]) -> None:
    asked, found = uninterrupted
    again, other = Search(), Search()
    assert run(again) == found
    assert again.asked == asked
    run(other, seed=1)
    assert other.asked[0] == asked[0]
    assert other.asked[1:] != asked[1:]


def test_the_best_trial_is_returned(uninterrupted: tuple[list[dict[str, float]], Tuned]) -> None:
    asked, found = uninterrupted
    best = min(asked, key=smooth)
    assert found == Tuned(best, smooth(best), 14)


def test_the_first_trial_is_what_one_would_try_by_hand(uninterrupted: tuple[list[dict[str, float]], Tuned]) -> None:
    assert uninterrupted[0][0] == {"lambda": 1e-3, "mu": 1e-3}


def test_zero_is_tried_and_everything_else_lies_in_the_range(
    uninterrupted: tuple[list[dict[str, float]], Tuned],
) -> None:
    for name in NAMES:
        tried = [values[name] for values in uninterrupted[0]]
        assert 0.0 in tried
        assert all(value == 0 or 1e-6 <= value <= 1e-1 for value in tried)


@pytest.mark.parametrize("kill_at", [0, 1, 5, 13])
def test_a_killed_search_goes_on_as_if_nothing_had_happened(
    kill_at: int, tmp_path: Path, uninterrupted: tuple[list[dict[str, float]], Tuned]
) -> None:
    storage = tmp_path / "trials.log"
    killed, resumed = Search(kill_at), Search()
    with pytest.raises(KeyboardInterrupt):
        run(killed, storage=storage)
    found = run(resumed, storage=storage)
    assert (killed.asked + resumed.asked, found) == uninterrupted


def test_a_search_may_be_killed_again_and_again(
    tmp_path: Path, uninterrupted: tuple[list[dict[str, float]], Tuned]
) -> None:
    asked = []
    for _ in range(14):
        search = Search(kill_at=1)
        with pytest.raises(KeyboardInterrupt):
            run(search, storage=tmp_path / "trials.log", n_trials=15)
        asked += search.asked
    assert asked == uninterrupted[0]


def test_a_finished_search_is_not_repeated_and_more_trials_go_on(
    tmp_path: Path, uninterrupted: tuple[list[dict[str, float]], Tuned]
) -> None:
    storage = tmp_path / "trials.log"
    first, again, more = Search(), Search(), Search()
    run(first, storage=storage, n_trials=6)
    assert run(again, storage=storage, n_trials=6).n_trials == 6
    assert again.asked == []
    assert run(more, storage=storage) == uninterrupted[1]
    assert first.asked + more.asked == uninterrupted[0]


def test_problems_share_a_file_without_mixing(
    tmp_path: Path, uninterrupted: tuple[list[dict[str, float]], Tuned]
) -> None:
    storage = tmp_path / "trials.log"
    run(Search(), storage=storage, problem="another", n_trials=3)
    search = Search()
    assert run(search, storage=storage) == uninterrupted[1]
    assert len(search.asked) == 14


def test_ranges_and_choices_of_the_settings_are_kept() -> None:
    space = SearchSpace(
        lambda_=LogRange(zero=False, low=1e-2, high=5e-2),
        learning_rate=LogRange(low=1e-3, high=1e-3),
        patience=Choices(choices=(5, 7)),
    )
    asked: list[dict[str, float]] = []

    def objective(values: Mapping[str, float], report: Report) -> float:
        asked.append(dict(values))
        return values["lambda"]

    tune(objective, ("lambda", "learning_rate", "patience"), space, n_trials=12, seed=0, problem="p")
    assert asked[0] == {"lambda": 1e-2, "learning_rate": 1e-3, "patience": 7}
    assert all(1e-2 <= values["lambda"] <= 5e-2 for values in asked)
    assert {values["learning_rate"] for values in asked} == {1e-3}
    assert {values["patience"] for values in asked} == {5, 7}


def test_every_name_has_a_sensible_first_value_within_its_range() -> None:
    asked: list[dict[str, float]] = []

    def objective(values: Mapping[str, float], report: Report) -> float:
        asked.append(dict(values))
        return 0.0

    names = ("lambda", "mu", "alpha", "learning_rate", "patience")
    tune(objective, names, SearchSpace(), n_trials=1, seed=0, problem="p")
    assert asked == [SENSIBLE]


def test_hopeless_trials_are_pruned_and_still_count() -> None:
    steps: list[int] = []

    def objective(values: Mapping[str, float], report: Report) -> float:
        steps.append(0)
        final = 1.0 if len(steps) <= 5 else 10.0
        for step in range(60):
            steps[-1] = step
            report(step, final)
        return final

    found = tune(objective, NAMES, SearchSpace(), n_trials=8, seed=0, problem="p")
    assert found.n_trials == len(steps) == 8
    assert steps[:5] == [59] * 5
    assert all(20 <= step < 30 for step in steps[5:])
    assert found.validation_nll == 1.0


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    tune(
        lambda values, report: smooth(values),
        NAMES,
        SearchSpace(),
        n_trials=3,
        seed=0,
        problem="p",
        on_trial=lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_search_without_any_finite_result_says_so(value: float) -> None:
    with pytest.raises(DataError, match="none of 3 trials gave a finite validation NLL"):
        tune(lambda values, report: value, NAMES, SearchSpace(), n_trials=3, seed=0, problem="p")


def test_a_trial_without_a_finite_result_is_never_the_best() -> None:
    def objective(values: Mapping[str, float], report: Report) -> float:
        return math.nan if values["lambda"] == 0 else smooth(values)

    found = tune(objective, NAMES, SearchSpace(), n_trials=10, seed=0, problem="p")
    assert found.values["lambda"] > 0
    assert found.n_trials == 10


def test_the_lock_of_a_killed_process_does_not_hold_up_the_next_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    uninterrupted: tuple[list[dict[str, float]], Tuned],
) -> None:
    # A relative path in a subfolder: Optuna's own lock would dangle there and be waited for without end.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("segcal.tuning.journal._LOCK_SECONDS", 3)
    storage = Path("sub/trials.log")
    with pytest.raises(KeyboardInterrupt):
        run(Search(kill_at=2), storage=storage)
    Path("sub/trials.log.lock").touch()
    assert run(Search(), storage=storage) == uninterrupted[1]
    assert capsys.readouterr().err == ""


def test_half_a_line_of_a_killed_process_is_dropped(
    tmp_path: Path, uninterrupted: tuple[list[dict[str, float]], Tuned]
) -> None:
    storage = tmp_path / "trials.log"
    with pytest.raises(KeyboardInterrupt):
        run(Search(kill_at=3), storage=storage)
    with storage.open("ab") as file:
        file.write(b'{"op_code":5,"worker_id":"x","stu')
    assert run(Search(), storage=storage) == uninterrupted[1]
    assert run(Search(), storage=storage) == uninterrupted[1]


@pytest.mark.parametrize("n_bytes", [1, 20, -1])
def test_a_process_killed_within_its_first_line_leaves_a_usable_file(
    n_bytes: int, tmp_path: Path, uninterrupted: tuple[list[dict[str, float]], Tuned]
) -> None:
    run(Search(), storage=tmp_path / "whole.log", n_trials=1)
    first_line = (tmp_path / "whole.log").read_bytes().splitlines(keepends=True)[0]
    storage = tmp_path / "trials.log"
    storage.write_bytes(first_line[:n_bytes])
    assert run(Search(), storage=storage) == uninterrupted[1]
    assert run(Search(), storage=storage) == uninterrupted[1]


@pytest.mark.parametrize(
    "content",
    ["hello\nworld\n", "hello", "version: 1\nname: x", '{"a": 1}\n', "[1, 2]\n", '{"op_code":99}\n', '{"op_code":1}\n'],
)
def test_a_file_of_something_else_is_refused_and_left_alone(content: str, tmp_path: Path) -> None:
    storage = tmp_path / "manifest.yaml"
    storage.write_text(content)
    with pytest.raises(FileFormatError, match=r"manifest\.yaml: not a file of tuning trials"):
        run(Search(), storage=storage)
    assert storage.read_text() == content


def test_an_error_of_a_trial_is_not_blamed_on_the_file_of_trials(tmp_path: Path) -> None:
    def cut_off(values: Mapping[str, float], report: Report) -> float:
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    with pytest.raises(ConnectionResetError, match="reset by peer"):
        tune(cut_off, NAMES, SearchSpace(), n_trials=1, seed=0, problem="p", storage=tmp_path / "trials.log")


def test_a_storage_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trials").mkdir()
    with pytest.raises(OutputError, match=r"trials: finished trials cannot be kept here: a folder of that name"):
        run(Search(), storage=tmp_path / "trials")

    def full(self: object, logs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("optuna.storages.journal.JournalFileBackend.append_logs", full)
    with pytest.raises(OutputError, match=r"trials\.log: finished trials cannot be kept here: the disk is full"):
        run(Search(), storage=tmp_path / "trials.log")
