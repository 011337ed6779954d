"""Child processes that tests stop with signals."""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """For `preexec_fn`: a suite in the background was started with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
