"""The slices of a report: one picture a case, encoded so that a hundred of them stay within the page's size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from segcal.evaluation.pictures import CasePicture
from segcal.report.encoding import EncodedPicture, photograph, plain_text
from segcal.report.orientation import slice_view
from segcal.report.results import Results
from segcal.report.roles import Roles
from segcal.report.slices import slice_alt_text, slice_figure
from segcal.types import Progress

SHARP_DPI, SMALL_DPI, SHARP_UP_TO = 140, 100, 40
"""Up to 40 pictures are made sharper; at 100 dpi a picture takes 40 to 80 kB."""
PICTURES_BYTES, FULL_PAGE = 10_000_000, 100
"""What a hundred pictures may take together (a third more in the page, as text); fewer may each be larger."""


def case_pictures(
    results: Results, roles: Roles, cases: Sequence[str], progress: Progress | None = None
) -> tuple[dict[str, EncodedPicture], dict[str, str]]:
    """Pictures of the named cases, and the reasons why some that have a file could not be shown."""
    dpi = SHARP_DPI if len(cases) <= SHARP_UP_TO else SMALL_DPI
    max_bytes = PICTURES_BYTES // min(max(len(cases), SHARP_UP_TO), FULL_PAGE)
    pictures: dict[str, EncodedPicture] = {}
    broken: dict[str, str] = {}
    for done, case in enumerate(cases, start=1):
        found = results.picture(case)
        if isinstance(found, CasePicture):
            pictures[case] = case_picture(case, found, results.summary, roles, dpi=dpi, max_bytes=max_bytes)
        elif found is not None:
            broken[case] = found
        if progress is not None:
            progress("pictures", done, len(cases))
    return pictures, broken


def case_picture(
    case: str, picture: CasePicture, summary: Mapping[str, Any], roles: Roles, *, dpi: int, max_bytes: int
) -> EncodedPicture:
    """All panels of the kept slice of a case."""
    names = class_names(summary, picture)
    after = roles.focus if roles.focus != roles.base else ""
    figure = slice_figure(
        picture.maps,
        class_names=[plain_text(name) for name in names],
        after_name=plain_text(f"after {after}") if after else "again (nothing was calibrated)",
        grid=picture.grid,
        index=0,
    )
    position = (picture.index, picture.n_slices)
    alt = slice_alt_text(picture.maps, class_names=names, title=case, index=0, position=position)
    where = f"{slice_view(picture.grid).plane} slice {picture.index + 1} of {picture.n_slices}".strip()
    caption = f"{where}, the one with most classes, doubt and errors"
    return photograph(figure, alt=alt, caption=caption, dpi=dpi, max_bytes=max_bytes)


def class_names(summary: Mapping[str, Any], picture: CasePicture) -> list[str]:
    """Background first; region models name no background, and files without names get numbers."""
    names = list(summary.get("classes") or [])
    if summary.get("regions") or not names:
        names = ["background", *names]
    highest = int(picture.maps.segmentation.max())
    return names + [f"class {value}" for value in range(len(names), highest + 1)]
