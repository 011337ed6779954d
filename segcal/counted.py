"""Numbers of things in words, for messages, tables and pages alike."""

from __future__ import annotations


def count(n: int, one: str, many: str = "") -> str:
    """`1 case`, `20 cases`."""
    return f"{n:,} {one if n == 1 else many or f'{one}s'}"
