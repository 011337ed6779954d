"""The pictures of pages and reports: pure functions from small data to matplotlib figures, and figures to bytes.

Figures are made through matplotlib's object interface: no global state, no window system, safe in threads.
"""

from __future__ import annotations

import base64
import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from segcal.evaluation.picture_maps import PictureMaps, informative_slice
from segcal.report.reliability import reliability_alt_text, reliability_figure
from segcal.report.slices import slice_alt_text, slice_figure

__all__ = [
    "PictureMaps",
    "figure_png",
    "informative_slice",
    "png_data_uri",
    "reliability_alt_text",
    "reliability_figure",
    "slice_alt_text",
    "slice_figure",
]


def figure_png(figure: Figure, *, alt: str = "", dpi: int = 150) -> bytes:
    """Renders a figure as PNG; the same figure gives the same bytes (no date, no program version inside).

    Args:
        alt: Stored in the file as its description, so the words travel with the picture.
    """
    buffer = io.BytesIO()
    metadata = {"Software": None} | ({"Description": alt} if alt else {})
    FigureCanvasAgg(figure).print_figure(
        buffer, format="png", dpi=dpi, bbox_inches="tight", pad_inches=0.08, metadata=metadata
    )
    return buffer.getvalue()


def png_data_uri(png: bytes) -> str:
    """The picture as text that can stand in an HTML page, so the page needs no second file."""
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
