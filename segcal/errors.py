"""Every exception segcal raises on purpose. The command line prints their message and nothing else."""

from __future__ import annotations


class SegcalError(Exception):
    """Base of all errors that carry a message meant for the user."""


class UsageError(SegcalError, ValueError):
    """The call itself is wrong: options that do not go together, a name that does not exist."""


class SettingsError(SegcalError, ValueError):
    """A settings file has an unknown key or a value out of range."""


class ManifestError(SegcalError, ValueError):
    """A manifest does not say what a manifest has to say."""


class MissingFileError(SegcalError, FileNotFoundError):
    """A file that was named is not there."""


class FileFormatError(SegcalError, ValueError):
    """A file is truncated, unsafe to open or holds something else than it should."""


class WrongKindError(FileFormatError):
    """A member file holds the other kind of values than the manifest declares."""


class GeometryError(SegcalError, ValueError):
    """Two arrays that belong together do not share one grid."""


class DataError(SegcalError, ValueError):
    """Values that no calibration can start from: NaN, labels outside the classes, no labelled voxel."""


class ParameterError(SegcalError, ValueError):
    """A calibrator or metric was given parameters outside their range."""


class MismatchError(SegcalError, ValueError):
    """A calibrator does not belong to the data it is applied to."""


class CaseError(SegcalError, RuntimeError):
    """One case failed for a reason outside segcal: nnU-Net cannot read it, a worker process was killed."""


class OutputError(SegcalError, OSError):
    """Something could not be written: a full disk, a folder without permission."""


class Interrupted(SegcalError):
    """The user or the system asked the run to stop; everything finished so far is on disk."""


class ClusterError(SegcalError, RuntimeError):
    """The machines the work runs on are not there, or no longer: nothing that one case could be blamed for."""


class ClusterAwayError(ClusterError):
    """Nobody answers where the cluster should be, or it has no workers: the same work can be done when it is back."""


class LostCaseError(SegcalError, RuntimeError):
    """The workers that tried a case died or ran out of memory, one after the other."""
