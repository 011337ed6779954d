"""The images of a folder in nnU-Net's naming: `<case>_0000<ending>`, `<case>_0001<ending>`, … one file a channel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segcal.errors import FileFormatError, MissingFileError

PICTURE_READER = "NaturalImage2DIO"
"""Takes the colours of a picture for channels, so one file can hold three of them."""


def find_cases(folder: Path, dataset_json: Mapping[str, Any], reader: str = "") -> dict[str, tuple[Path, ...]]:
    """The cases in a folder of images, sorted by id, with their channel files in order.

    Args:
        folder: of images, such as nnU-Net's imagesTs.
        dataset_json: of the model: names the file ending and the channels.
        reader: name of nnU-Net's class that will read the files.

    Raises:
        MissingFileError: the folder is not there, or no file in it is named as an image of this model.
        FileFormatError: a case lacks a channel or has one too many.
    """
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: there is no such folder of images.")
    ending = str(dataset_json["file_ending"])
    channels = dataset_json.get("channel_names", dataset_json.get("modality", {}))
    name = re.compile(r"(?P<case>.+)_(?P<channel>\d{4})" + re.escape(ending))
    found: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        match = name.fullmatch(path.name)
        if match and path.is_file():
            found.setdefault(match["case"], {})[int(match["channel"])] = path
    if not found:
        raise MissingFileError(
            f"{folder}: no image named `<case>_0000{ending}` in it, which is how nnU-Net finds the channels of a case; "
            f"the ending {ending} comes from the model's dataset.json."
        )
    for case_id, files in found.items():
        n_files = range(1, len(channels) + 1) if reader == PICTURE_READER else [len(channels)]
        if len(files) not in n_files or sorted(files) != list(range(len(files))):
            raise FileFormatError(
                f"{folder}: case {case_id} has the channels {', '.join(f'_{k:04d}' for k in sorted(files))}, the model "
                f"expects {len(channels)} ({', '.join(map(str, channels.values()))}), numbered from _0000."
            )
    return {case_id: tuple(files[k] for k in sorted(files)) for case_id, files in sorted(found.items())}
