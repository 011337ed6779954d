"""What the service refuses, each with a message for the user; the API turns them into status codes."""

from __future__ import annotations

from segcal.errors import SegcalError


class ServiceError(SegcalError):
    """Base of the service's own errors."""


class RefusedPathError(ServiceError, PermissionError):
    """A path that leads outside the folders the service may read."""


class UnknownError(ServiceError, LookupError):
    """There is no such job, case, calibrator or token."""


class QueueFullError(ServiceError):
    """As many jobs are waiting as are allowed to."""


class KeyReusedError(ServiceError, ValueError):
    """An idempotency key came again with another request."""


class WrongStateError(ServiceError, ValueError):
    """What is asked of a job cannot be done in the state it is in."""


class IntakePausedError(ServiceError):
    """Nothing new is taken in for now: the disk is nearly full."""


class UploadError(ServiceError, ValueError):
    """An upload is too large, too slow or not what it says it is."""


class StoreError(ServiceError, RuntimeError):
    """The store cannot be reached, or was made by another version."""
