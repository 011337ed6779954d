"""Is an uploaded archive one case that the calibrator fits? Answered without ever holding it in memory."""

from __future__ import annotations

from pathlib import Path

from segcal.io.archive import ArrayHeader, open_npz
from segcal.service.errors import UploadError
from segcal.service.model import CalibratorRecord

KEYS = ("logits", "probabilities")
_MOST_ARRAYS = 4
_LONGEST_SIDE = 1 << 14


def check_case_archive(path: Path, calibrator: CalibratorRecord, unpacked_bytes: int) -> None:
    """Check an .npz as the reader does: its directory, every header, every checksum, a few megabytes at a time.

    Args:
        calibrator: its classes are the channels that are expected.
        unpacked_bytes: what all arrays together may declare; nothing is inflated of a file that declares more.

    Raises:
        UploadError: it holds no `logits` or `probabilities` (class, z, y, x), or both, or those of other classes.
        FileFormatError: it is damaged or unsafe.
    """
    with open_npz(path) as reader:
        if len(reader.entries) > _MOST_ARRAYS:
            raise UploadError(f"the upload holds {len(reader.entries)} arrays; expected `logits` or `probabilities`")
        headers = {key: reader.header(key) for key in reader.entries}
        total = sum(header.nbytes for header in headers.values())
        if total > unpacked_bytes:
            raise UploadError(f"the upload unpacks to {total:,} bytes, more than the {unpacked_bytes:,} taken here")
        present = [key for key in KEYS if key in headers]
        if len(present) != 1:
            raise UploadError(
                f"the upload holds {', '.join(f'`{key}`' for key in headers) or 'no array'}; expected an array "
                "`logits` or `probabilities` (class, z, y, x), as nnU-Net and `segcal nnunet export` write it"
            )
        _check_header(present[0], headers[present[0]], calibrator)
        for key in headers:
            reader.verify(key)


def _check_header(key: str, header: ArrayHeader, calibrator: CalibratorRecord) -> None:
    n_classes = len(calibrator.classes)
    if header.dtype.kind != "f" or header.dtype.itemsize > 8:
        raise UploadError(f"`{key}` has dtype {header.dtype}; expected float16, float32 or float64")
    if len(header.shape) != 4 or not all(1 <= side <= _LONGEST_SIDE for side in header.shape):
        raise UploadError(f"`{key}` has the shape {header.shape}; expected (class, z, y, x)")
    if header.shape[0] != n_classes:
        raise UploadError(
            f"`{key}` has {header.shape[0]} channels, but the calibrator was fitted for {n_classes}: "
            f"{', '.join(calibrator.classes)}"
        )
