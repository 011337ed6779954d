"""A folder of 2-D images, each corrupted once: a shifted test set that keeps the file names and the labels."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from segcal.corruptions import Corruption, Pixels, Severity, choose_corruption, corrupt, parameters, random_words
from segcal.errors import DataError, FileFormatError, ParameterError, UsageError
from segcal.io.atomic import atomic_write, write_text_atomic
from segcal.io.zip_reader import opened
from segcal.scan_folders import find_labels
from segcal.types import Progress

RECORD_FILE = "corruptions.csv"
FORMATS = {".png": "PNG", ".bmp": "BMP", ".tif": "TIFF", ".tiff": "TIFF"}
"""Formats that lose nothing when they are written, by ending."""
MAX_CHANNELS = 4
"""More numbered files of one name than this are rather the frames of a film than channels."""

_LOSSY = (".jpg", ".jpeg")
_CHANNEL = re.compile(r"(.+)_(\d{4})")
_PNG_DEPTH_AT = 24  # bit depth and colour type in the header every PNG begins with


@dataclass(frozen=True, slots=True)
class CorruptedFile:
    """One line of corruptions.csv.

    Attributes:
        file: name of the file, before and after.
        image: what was hashed: the name without ending and channel number.
        corruption, parameters: what was done.
        severity, seed: of the run.
    """

    file: str
    image: str
    corruption: Corruption
    parameters: str
    severity: Severity
    seed: int


def corrupt_folder(
    images: Path,
    out: Path,
    *,
    severity: Severity,
    seed: int = 0,
    channels: bool | None = None,
    progress: Progress | None = None,
) -> list[CorruptedFile]:
    """Write every image of a folder once more under the same name, corrupted, and corruptions.csv last.

    An image's corruption depends on its name and the seed alone, not on the other files. The numbered channel files
    nnU-Net has for one image (`<case>_0000.png`, `<case>_0001.png`, …) are put together, corrupted as one image and
    taken apart again, so that three files of red, green and blue get exactly what one colour file would get.

    Args:
        images: folder with .png, .bmp or .tif files; other files are left out.
        out: another folder, without corruptions.csv of an earlier run.
        severity: mild or strong, SEG Table 6.
        seed: with the name of an image it decides everything that is random.
        channels: whether `_0000`, `_0001`, … at the end of names number the channels of one image; None decides by
            the names and asks when these leave a doubt.
        progress: told about images.
    """
    groups = group_channels(_image_files(images), channels=channels)
    if out.resolve() == images.resolve():
        raise UsageError(f"--out {out}: is the folder of the images themselves; choose another one")
    if (out / RECORD_FILE).exists():
        raise UsageError(f"{out}: holds corrupted images already ({RECORD_FILE}); choose another --out")
    done: list[CorruptedFile] = []
    for count, (name, paths) in enumerate(groups.items(), start=1):
        corruption = choose_corruption(name, seed)
        _corrupt_image(paths, out, corruption, severity, random_words(name, seed))
        how = parameters(corruption, severity)
        done += [CorruptedFile(path.name, name, corruption, how, severity, seed) for path in paths]
        if progress is not None:
            progress("corrupting", count, len(groups))
    _write_record(done, out / RECORD_FILE)
    return done


def group_channels(files: Mapping[str, Path], *, channels: bool | None) -> dict[str, list[Path]]:
    """The files of each image by its name, channels in order.

    Args:
        files: by name without ending.
        channels: see `corrupt_folder`.
    """
    single = {name: [path] for name, path in files.items()}
    numbered = {name: match for name in files if (match := _CHANNEL.fullmatch(name))}
    if channels is False or (channels is None and not any(match[2] == "0000" for match in numbered.values())):
        return single
    groups: dict[str, dict[str, Path]] = {}
    for name, match in sorted(numbered.items()):
        groups.setdefault(match[1], {})[match[2]] = files[name]
    doubt = _doubt(files, numbered, groups, sure=bool(channels))
    if doubt is not None:
        raise UsageError(
            f"{doubt}. Say --no-channels if every file is an image of its own"
            f"{', or make the names agree' if channels else ', or --channels if they are the channels of one image'}."
        )
    return {name: list(paths.values()) for name, paths in groups.items()}


def _doubt(
    files: Mapping[str, Path], numbered: Collection[str], groups: Mapping[str, Mapping[str, Path]], *, sure: bool
) -> str | None:
    """Why the numbers at the end of the names may not be those of channels; groups: files by number, by name."""
    folder = next(iter(files.values())).parent
    without = next((name for name in files if name not in numbered), None)
    if without is not None:
        return f"{folder}: some names end in a channel number like _0000, but {files[without].name} does not"
    n_channels = len(next(iter(groups.values())))
    for name, paths in groups.items():
        if list(paths) != [f"{number:04d}" for number in range(n_channels)]:
            return f"{folder}: {name} has the channels {', '.join(paths)}, others have {n_channels} from 0000"
        if len(paths) > MAX_CHANNELS and not sure:
            return f"{folder}: {name} has {len(paths)} numbered files, more than the channels of an image usually are"
    return None


def _image_files(folder: Path) -> dict[str, Path]:
    """The images of a folder by name without ending; volumes and lossy files are refused before any work."""
    files = find_labels(folder)
    for path in files.values():
        ending = path.suffix.lower()
        if ending in _LOSSY:
            raise DataError(
                f"{path}: is a JPEG, which would be compressed once more when it is written; convert it to PNG first."
            )
        if ending not in FORMATS:
            raise DataError(
                f"{path}: is a volume. The corruptions of SEG App. H are defined for 2-D images with a known black "
                f"and white ({', '.join(FORMATS)}); remove it, or name a folder of such images."
            )
    if not files:
        raise DataError(f"{folder}: holds no image ({', '.join(FORMATS)}); subfolders are not searched.")
    return files


def _corrupt_image(
    paths: list[Path], out: Path, corruption: Corruption, severity: Severity, words: tuple[int, ...]
) -> None:
    """Corrupt the files of one image together and write each."""
    loaded = [_read(path) for path in paths]
    for path, other in zip(paths, loaded, strict=True):
        if (other.colours.shape[:2], other.colours.dtype) != (loaded[0].colours.shape[:2], loaded[0].colours.dtype):
            raise DataError(
                f"{path}: {other.colours.shape[:2]} {other.colours.dtype}, but {paths[0].name}, another channel of "
                f"the same image, is {loaded[0].colours.shape[:2]} {loaded[0].colours.dtype}"
            )
    together = np.concatenate([one.colours for one in loaded], axis=2)
    try:
        changed = corrupt(together, corruption, severity, words)
    except ParameterError as error:
        raise DataError(f"{paths[0]}: {error}") from None
    ends = np.cumsum([one.colours.shape[2] for one in loaded])[:-1]
    for path, one, values in zip(paths, loaded, np.split(changed, ends, axis=2), strict=True):
        _write(out / path.name, values, one.alpha)


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """A file: (y, x, 1 or 3) gray or colours and, if it has one, the (y, x, 1) transparency, which stays as it is."""

    colours: Pixels
    alpha: Pixels | None


def _read(path: Path) -> _Loaded:
    with opened(path) as file:
        if FORMATS[path.suffix.lower()] == "PNG":
            _refuse_deep_colours(path, file.read(_PNG_DEPTH_AT + 2))
            file.seek(0)
        try:
            with Image.open(file, formats=[FORMATS[path.suffix.lower()]]) as image:
                n_frames = getattr(image, "n_frames", 1)
                image.load()
                mode, values = _plain(image)
        except Exception as error:  # Pillow has a type of its own for every way to be broken
            raise FileFormatError(f"{path}: not a readable image, truncated or damaged ({error}).") from error
    if n_frames > 1:
        raise DataError(
            f"{path}: holds {n_frames} pages or frames, a volume; the corruptions of SEG App. H are for 2-D images."
        )
    if mode not in ("L", "LA", "RGB", "RGBA", "I;16", "F"):
        raise DataError(f"{path}: pixels of kind {mode}; expected gray, colour (RGB) or floating point from 0 to 1.")
    values = values if values.ndim == 3 else values[:, :, np.newaxis]
    if mode in ("LA", "RGBA"):
        return _Loaded(values[:, :, :-1], values[:, :, -1:])
    return _Loaded(values, None)


def _plain(image: Image.Image) -> tuple[str, Any]:
    """Mode and values without palettes, bits and foreign byte orders."""
    if image.mode in ("P", "PA"):
        image = image.convert("RGBA" if "transparency" in image.info or image.mode == "PA" else "RGB")
    elif image.mode == "1":
        image = image.convert("L")
    values = np.array(image)
    sixteen_bit = image.mode == "I" and values.min() >= 0 and values.max() <= np.iinfo(np.uint16).max
    if sixteen_bit or image.mode.startswith("I;16"):
        return "I;16", values.astype(np.uint16)
    return image.mode, values


def _refuse_deep_colours(path: Path, header: bytes) -> None:
    """Pillow halves the depth of 16-bit colours and says nothing."""
    if len(header) == _PNG_DEPTH_AT + 2 and header[_PNG_DEPTH_AT] == 16 and header[_PNG_DEPTH_AT + 1] != 0:
        raise DataError(f"{path}: 16 bits a colour; only gray images may be this deep. Save it with 8 bits a colour.")


def _write(path: Path, colours: Pixels, alpha: Pixels | None) -> None:
    values = colours if alpha is None else np.concatenate([colours, alpha], axis=2)
    with atomic_write(path) as temporary:
        Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values).save(
            temporary, format=FORMATS[path.suffix.lower()]
        )


def _write_record(done: list[CorruptedFile], path: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(CorruptedFile)])
    writer.writerows(astuple(one) for one in done)
    write_text_atomic(path, text.getvalue())
