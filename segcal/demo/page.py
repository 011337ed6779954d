"""The demo's page: one HTML file with the table, the pictures and what they mean, readable offline and in print."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from segcal.demo.findings import CANNOT_SHOW
from segcal.demo.pictures import DemoPicture
from segcal.demo.table import COLUMNS, Row
from segcal.report.figures import png_data_uri


def demo_page(
    *,
    rows: Sequence[Row],
    groups: Sequence[str],
    sentences: Sequence[str],
    reliability: Sequence[DemoPicture],
    slices: Sequence[DemoPicture],
    commands: Sequence[str],
) -> str:
    """Renders the page; nothing in it depends on the machine or the date."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["data_uri"] = png_data_uri
    template = environment.from_string((files("segcal.demo") / "templates" / "page.html").read_text(encoding="utf-8"))
    return template.render(
        rows=rows,
        groups=groups,
        columns=COLUMNS,
        sentences=sentences,
        cannot_show=CANNOT_SHOW,
        reliability=reliability,
        slices=slices,
        commands=commands,
    )
