"""A result that is lost on its way to us is the cluster's fault, also in the moment before Dask has noticed."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("distributed")

from distributed.comm.core import CommClosedError

from segcal.errors import ClusterAwayError
from segcal.scale.dask_cases import _Run


@dataclass
class FailingFuture:
    """Of a case that ended with this status; asking for its result raises this error."""

    status: str
    error: Exception

    def result(self, timeout: float) -> Any:
        raise self.error


def a_run() -> _Run:
    client = SimpleNamespace(status="running", scheduler=SimpleNamespace(address="tcp://127.0.0.1:8786"))
    return _Run(client, patience_s=1.0)  # type: ignore[arg-type]


def test_a_connection_that_closes_while_a_result_is_fetched_is_no_fault_of_the_case() -> None:
    with pytest.raises(ClusterAwayError, match=r"tcp://127.0.0.1:8786 is gone: Stream is closed"):
        a_run().outcome("case", FailingFuture("finished", CommClosedError("Stream is closed")))  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [CommClosedError("in a worker"), OSError("disk full"), ValueError("x")], ids=repr)
def test_what_the_work_itself_raised_stays_with_its_case(error: Exception) -> None:
    assert a_run().outcome("case", FailingFuture("error", error)) == (None, error)  # type: ignore[arg-type]
