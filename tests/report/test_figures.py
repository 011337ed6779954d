"""Pictures render from small data, the same bytes every time, and say in words what they show."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from segcal.errors import GeometryError, ParameterError
from segcal.metrics.bins import BinTable
from segcal.report.figures import (
    PictureMaps,
    figure_png,
    informative_slice,
    png_data_uri,
    reliability_alt_text,
    reliability_figure,
    slice_alt_text,
    slice_figure,
)
from segcal.report.orientation import SliceView, slice_view
from segcal.report.palette import CURVES, OKABE_ITO, class_colours
from segcal.types import Grid

NAMES = ("background", "organ", "lesion", "vessel")


def table(accuracy_minus_confidence: float, n_bins: int = 20) -> BinTable:
    """10,000 voxels in every bin from 50 % on, with one gap everywhere."""
    middle = (np.arange(n_bins) + 0.5) / n_bins
    counts = np.where(middle > 0.5, 10_000, 0).astype(np.int64)
    hits = np.rint(counts * np.clip(middle + accuracy_minus_confidence, 0, 1)).astype(np.int64)
    return BinTable(counts, counts * middle, hits)


@pytest.fixture
def maps() -> PictureMaps:
    """A square organ; slice 2 also holds lesion and vessel, slice 4 most of the doubt."""
    rng = np.random.default_rng(0)
    label = np.zeros((6, 20, 30), dtype=np.int64)
    label[:, 5:15, 5:20] = 1
    label[2, 7:11, 7:11] = 2
    label[2, 12:15, 12:15] = 3
    segmentation = label.copy()
    segmentation[2, 5:7, 5:9] = 0
    before = np.full(label.shape, 0.99)
    before[4] = 0.6
    after = np.where(segmentation == label, 0.95, 0.6)
    flips = np.zeros(label.shape, dtype=bool)
    flips[2, 5, 5:8], flips[2, 14, 18] = True, True
    return PictureMaps(
        segmentation, before, after, rng.normal(size=label.shape), label, flips, rng.normal(size=label.shape)
    )


def headings(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]


def legend_texts(figure: Figure) -> list[str]:
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend()] + figure.legends
    return [text.get_text() for legend in legends for text in legend.get_texts()]


def test_reliability_curves_pass_through_the_accuracy_of_each_bin() -> None:
    figure = reliability_figure({"before": table(-0.2), "after": table(0.0)}, title="all")
    before, after = figure.axes[0].get_lines()[1:]
    assert np.asarray(before.get_ydata()) == pytest.approx(np.asarray(before.get_xdata()) - 0.2, abs=1e-4)
    assert np.asarray(after.get_ydata()) == pytest.approx(np.asarray(after.get_xdata()), abs=1e-4)
    assert len(before.get_xdata()) == 10
    assert legend_texts(figure) == ["perfect calibration", "before (ECE 20.00 %)", "after (ECE 0.00 %)"]


def test_reliability_leaves_bins_of_few_voxels_out_of_the_curve_but_in_the_strip() -> None:
    sparse = table(-0.1)
    sparse.counts[12], sparse.confidence[12], sparse.hits[12] = 3, 1.9, 0
    figure = reliability_figure({"before": sparse}, min_count=50)
    assert len(figure.axes[0].get_lines()[1].get_xdata()) == 9
    (strip,) = figure.axes[1].patches
    shares = strip.get_data().values
    assert np.isfinite(shares).sum() == 10
    assert shares[12] == pytest.approx(3 / sparse.total)


def test_reliability_shows_points_below_the_first_confidence() -> None:
    figure = reliability_figure({"before": table(-0.45)})
    lowest = figure.axes[0].get_lines()[1].get_ydata()
    assert figure.axes[0].get_ylim()[0] <= np.min(lowest) < 0.5


@pytest.mark.parametrize("excess", [-0.45, 0.0])
def test_the_lowest_marker_is_not_cut_by_the_frame(excess: float) -> None:
    upper = reliability_figure({"before": table(excess)}).axes[0]
    curve = upper.lines[-1]
    bottom, top = upper.get_ylim()
    points_high = upper.get_window_extent().height * 72 / upper.figure.dpi
    room = (np.min(curve.get_ydata()) - bottom) / (top - bottom) * points_high
    assert room > (curve.get_markersize() + curve.get_markeredgewidth()) / 2


def test_reliability_of_no_voxels_still_renders() -> None:
    empty = BinTable(np.zeros(10, dtype=np.int64), np.zeros(10), np.zeros(10, dtype=np.int64))
    figure = reliability_figure({"before": table(-0.1), "nothing": empty})
    assert figure_png(figure)
    assert "nothing (no voxels)" in legend_texts(figure)
    assert "nothing: no voxels." in reliability_alt_text({"nothing": empty})


@pytest.mark.parametrize("n", [0, len(CURVES) + 1])
def test_reliability_refuses_a_number_of_curves_nobody_can_tell_apart(n: int) -> None:
    with pytest.raises(ParameterError, match="1 to 6 curves"):
        reliability_figure({f"curve {i}": table(0.0) for i in range(n)})


def test_reliability_alt_text_says_who_is_overconfident() -> None:
    text = reliability_alt_text({"before": table(-0.2), "after": table(0.1)}, title="test cases")
    assert "test cases" in text
    assert "before: expected calibration error 20.00 percent" in text
    assert "20.00 percentage points higher than accuracy" in text
    assert "points lower than accuracy" in text.split("after:")[1]


def test_informative_slice_prefers_classes_then_doubt(maps: PictureMaps) -> None:
    assert informative_slice(maps) == 2
    assert maps.label is not None
    only_organ = replace(maps, label=np.minimum(maps.label, 1), segmentation=np.minimum(maps.label, 1), flips=None)
    assert informative_slice(only_organ) == 4
    assert informative_slice(replace(maps, label=None, flips=None)) == 2


def test_slice_figure_shows_what_is_known(maps: PictureMaps) -> None:
    full = slice_figure(maps, class_names=NAMES, title="case_1", after_name="after cms_ap")
    assert headings(full) == [
        "image",
        "label",
        "segmentation",
        "decisions moved: 4",
        "confidence before",
        "confidence after cms_ap",
        "free energy",
    ]
    assert full.get_suptitle() == "case_1, slice 3 of 6"
    assert legend_texts(full)[:3] == list(NAMES[1:])
    assert "flip of a right voxel" in legend_texts(full)
    kept = slice_figure(replace(maps, flips=np.zeros(maps.segmentation.shape, dtype=bool)), class_names=NAMES)
    assert "decisions moved: none" in headings(kept)
    assert not any("flip" in text for text in legend_texts(kept))
    bare = slice_figure(replace(maps, image=None, label=None, flips=None, free_energy=None), class_names=NAMES)
    assert headings(bare) == ["segmentation", "confidence before", "confidence after"]
    assert legend_texts(bare) == list(NAMES[1:])


@pytest.mark.parametrize(
    "missing", [(), ("flips",), ("free_energy",), ("flips", "free_energy"), ("label",), ("image", "label", "flips")]
)
def test_slice_figure_renders_with_any_part_missing(maps: PictureMaps, missing: tuple[str, ...]) -> None:
    figure = slice_figure(replace(maps, **dict.fromkeys(missing)), class_names=NAMES, title="case_1")
    with Image.open(io.BytesIO(figure_png(figure, dpi=60))) as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(maxcolors=10**6) or []) > 50


def test_flips_are_coloured_by_whether_the_voxel_was_right(maps: PictureMaps) -> None:
    panel = next(
        axes
        for axes in slice_figure(maps, class_names=NAMES).axes
        if axes.get_title(loc="left").startswith("decisions moved")
    )
    shown = np.asarray(panel.get_images()[1].get_array())
    assert (shown[5, 5:8] == 2).all()  # wrong before: may have helped
    assert shown[14, 18] == 1  # right before: did harm
    assert (shown > 0).sum() == 4


def test_rgb_pictures_keep_their_colours(maps: PictureMaps) -> None:
    one = {name: getattr(maps, name)[:1] for name in ("segmentation", "confidence_before", "confidence_after", "label")}
    rgb = np.random.default_rng(1).uniform(0, 255, (3, 1, 20, 30))
    figure = slice_figure(PictureMaps(**one, image=rgb), class_names=NAMES)
    assert np.asarray(figure.axes[0].get_images()[0].get_array()).shape == (20, 30, 3)


def test_maps_of_another_shape_are_refused(maps: PictureMaps) -> None:
    with pytest.raises(GeometryError, match=r"label has shape \(3, 20, 30\)"):
        replace(maps, label=maps.segmentation[:3])


def test_slice_alt_text_names_classes_errors_and_flips(maps: PictureMaps) -> None:
    text = slice_alt_text(maps, class_names=NAMES, title="case_1")
    assert "case_1, slice 3 of 6" in text
    assert "organ, lesion, vessel" in text
    assert "99 percent before and 60 percent after" in text
    assert "decision of 4 voxels" in text


def test_png_bytes_are_reproducible_and_carry_the_description(maps: PictureMaps) -> None:
    def bytes_of() -> bytes:
        figure = slice_figure(maps, class_names=NAMES, title="case_1")
        return figure_png(figure, alt=slice_alt_text(maps, class_names=NAMES), dpi=60)

    first = bytes_of()
    assert first == bytes_of()
    assert figure_png(reliability_figure({"a": table(0.0)})) == figure_png(reliability_figure({"a": table(0.0)}))
    with Image.open(io.BytesIO(first)) as picture:
        assert set(picture.info) - {"dpi"} == {"Description"}
        assert picture.info["Description"].startswith("Case, slice 3")
    assert png_data_uri(first).startswith("data:image/png;base64,iVBORw0KGgo")


def test_figures_leave_pyplot_and_global_state_alone() -> None:
    script = (
        "import sys, matplotlib; before = matplotlib.rcParams.copy()\n"
        "import numpy as np; from segcal.metrics.bins import BinTable\n"
        "from segcal.report.figures import figure_png, reliability_figure\n"
        "one = np.full(4, 100); figure_png(reliability_figure({'a': BinTable(one, one * 0.5, one // 2)}))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert matplotlib.rcParams.copy() == before\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("n_classes", [3, 7, 20])
def test_class_colours_are_distinct_and_start_with_okabe_ito(n_classes: int) -> None:
    colours = class_colours(n_classes)
    assert len(set(colours)) == n_classes
    assert set(colours[:7]) <= set(OKABE_ITO.values())


def test_curves_differ_in_marker_and_line_not_in_colour_alone() -> None:
    assert len({style.marker for style in CURVES}) == len({str(style.line) for style in CURVES}) == len(CURVES)


def test_before_and_after_differ_for_colour_blind_readers() -> None:
    """Simulated deuteranopia and protanopia (Machado et al. 2009, severity 1) leave them far apart."""
    deutan = np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])
    protan = np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])
    before, after = (np.array(to_rgb(style.colour)) for style in CURVES[:2])
    for matrix in (deutan, protan):
        assert np.linalg.norm(matrix @ before - matrix @ after) > 0.5


def grid(*columns: tuple[float, float, float]) -> Grid:
    affine = np.eye(4)
    affine[:3, :3] = np.array(columns).T
    return Grid((4, 6, 8), affine)


@pytest.mark.parametrize(
    ("lie", "view"),
    [
        (None, SliceView()),
        # x to the left, y to the back: already as radiologists look at it.
        (grid((-1, 0, 0), (0, -2, 0), (0, 0, 3)), SliceView(False, False, False, 2.0, "axial", "R", "A")),
        # RAS: both axes run the other way.
        (grid((1, 0, 0), (0, 1, 0), (0, 0, 3)), SliceView(False, True, True, 1.0, "axial", "R", "A")),
        # Array rows run along the body's left-right axis: rows and columns change places.
        (grid((0, -1, 0), (-2, 0, 0), (0, 0, 3)), SliceView(True, False, False, 0.5, "axial", "R", "A")),
        (grid((-1, 0, 0), (0, 0, 1), (0, 3, 0)), SliceView(False, True, False, 1.0, "coronal", "R", "S")),
        (grid((0, -1, 0), (0, 0, -1), (3, 0, 0)), SliceView(False, False, False, 1.0, "sagittal", "A", "S")),
    ],
)
def test_slices_are_shown_the_radiological_way(lie: Grid | None, view: SliceView) -> None:
    assert slice_view(lie) == view


@pytest.mark.parametrize("flip", [(1, 1), (-1, 1), (1, -1), (-1, -1)])
@pytest.mark.parametrize("swap", [False, True])
def test_the_same_anatomy_looks_the_same_however_it_is_stored(flip: tuple[int, int], swap: bool) -> None:
    standard = np.arange(48).reshape(6, 8)  # rows to the back, columns to the left
    x, y = np.array([-1.0 * flip[1], 0, 0]), np.array([0, -1.0 * flip[0], 0])
    stored = standard[:: flip[0], :: flip[1]]
    if swap:
        stored, x, y = stored.T, y, x
    tilt = 0.2  # an oblique scan is named after the nearest directions
    lie = grid((x[0], x[1], tilt), (y[0], y[1], -tilt), (0, tilt, 3))
    assert np.array_equal(slice_view(lie).picture(stored), standard)
