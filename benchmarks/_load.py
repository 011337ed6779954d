"""Bounded load on a server of this machine: a few clients with a connection each, every answer timed."""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Ask:
    """One request; `what` is the row of the table it counts in."""

    what: str
    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Answers:
    """What came back: milliseconds by row, status codes by row."""

    wall_s: float = 0.0
    milliseconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    codes: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    def merge(self, other: Answers) -> None:
        for what, times in other.milliseconds.items():
            self.milliseconds[what] += times
            self.codes[what] += other.codes[what]

    def quantile(self, what: str, percent: int) -> float:
        return statistics.quantiles(self.milliseconds[what], n=100)[percent - 1]

    def rate(self, what: str) -> float:
        return len(self.milliseconds[what]) / self.wall_s


def post_json(what: str, path: str, value: Any) -> Ask:
    return Ask(what, "POST", path, json.dumps(value).encode(), JSON)


def load(port: int, clients: Sequence[Callable[[int], Ask]], *, requests: int, seconds: float) -> Answers:
    """Run the clients side by side; each sends its n-th request when the one before is answered.

    Ends after `requests` a client or after `seconds`, whichever comes first.
    """
    parts = [Answers() for _ in clients]
    ends = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_client, args=(port, client, part, requests, ends), daemon=True)
        for client, part in zip(clients, parts, strict=True)
    ]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = Answers(wall_s=time.perf_counter() - begin)
    for part in parts:
        total.merge(part)
    return total


def _client(port: int, next_ask: Callable[[int], Ask], answers: Answers, requests: int, ends: float) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        for number in range(requests):
            if time.monotonic() > ends:
                return
            ask = next_ask(number)
            begin = time.perf_counter()
            connection.request(ask.method, ask.path, ask.body, dict(ask.headers))
            response = connection.getresponse()
            response.read()
            answers.milliseconds[ask.what].append(1e3 * (time.perf_counter() - begin))
            answers.codes[ask.what][response.status] += 1
    finally:
        connection.close()
