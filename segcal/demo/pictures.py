"""The pictures of the demo: reliability of both sites, and slices of one case of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from segcal.demo.scores import BEFORE, DemoScores, Shown
from segcal.report.figures import (
    figure_png,
    informative_slice,
    reliability_alt_text,
    reliability_figure,
    slice_alt_text,
    slice_figure,
)

CURVES = ("ts", "ms", "cms_ap")
"""Methods whose reliability is drawn beside that of the uncalibrated ensemble, where they were fitted."""


@dataclass(frozen=True, slots=True)
class DemoPicture:
    """A finished picture: its file name, what it shows for readers who do not see it, and the text under it."""

    name: str
    alt: str
    caption: str
    png: bytes


def reliability_pictures(scores: DemoScores) -> Iterator[DemoPicture]:
    """One diagram for each site."""
    curves = [name for name in scores.pipelines if name in (BEFORE, *CURVES)]
    for group in scores.groups:
        tables = {name: scores.reliability(name, group) for name in curves}
        title = f"{group}, {len(scores.groups[group])} test cases"
        alt = reliability_alt_text(tables, title=title)
        caption = (
            f"Reliability on {group}, all voxels of its test cases together. Below the diagonal a map is more "
            "confident than it is right. The strip shows how many voxels each confidence has, on a logarithmic axis. "
            "The ECE in the legend is that of all voxels together; the table has the mean over cases."
        )
        png = figure_png(reliability_figure(tables, title=title), alt=alt)
        yield DemoPicture(f"reliability_{group}.png", alt, caption, png)


def slice_pictures(scores: DemoScores, class_names: Sequence[str]) -> Iterator[DemoPicture]:
    """The kept cases, once for each calibrator whose maps were kept."""
    for shown in scores.shown.values():
        # One slice for all methods of a case, so that they can be compared: where most decisions move.
        busiest = max(shown.maps.values(), key=lambda maps: 0 if maps.flips is None else int(maps.flips.sum()))
        index = informative_slice(busiest)
        for method in shown.maps:
            yield _slice_picture(shown, method, class_names, index)


def _slice_picture(shown: Shown, method: str, class_names: Sequence[str], index: int) -> DemoPicture:
    maps = shown.maps[method]
    title = f"{shown.case_id} ({shown.group}), {method}"
    alt = slice_alt_text(maps, class_names=class_names, title=title, index=index)
    figure = slice_figure(
        maps, class_names=class_names, title=title, after_name=f"after {method}", grid=shown.grid, index=index
    )
    assert maps.flips is not None
    moved = (
        f"moves the decision of {int(maps.flips.sum()):,} of its voxels" if maps.flips.any() else "moves no decision"
    )
    caption = (
        f"{shown.case_id} from {shown.group}: {method} {moved}. Outlined in the confidence maps: voxels that are wrong."
    )
    return DemoPicture(f"{shown.case_id}_{method}.png", alt, caption, figure_png(figure, alt=alt))
