"""Figures as data URIs: small enough that a hundred of them fit into one page."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageChops

_WHITE = (255, 255, 255)


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """An image that stands in the page itself.

    Attributes:
        uri: `data:image/...`.
        alt: what it shows, in words.
        caption: the text below it.
        width, height: in pixels, so that the page does not jump when it is decoded.
    """

    uri: str
    alt: str
    caption: str
    width: int
    height: int


def plain_text(text: str) -> str:
    """Text as matplotlib shows it letter by letter: `$` starts no formula, a first `_` hides nothing from a legend."""
    return text.replace("$", r"\$") if not text.startswith("_") else " " + text.replace("$", r"\$")


def drawing(figure: Figure, *, alt: str, caption: str, dpi: int = 150) -> EncodedPicture:
    """A line drawing as PNG with 64 colours: sharp, and a fraction of the full-colour size."""
    image = _rendered(figure, dpi)
    return _encoded(image.quantize(64, dither=Image.Dither.NONE), "png", alt, caption, optimize=True)


def photograph(figure: Figure, *, alt: str, caption: str, dpi: int = 100) -> EncodedPicture:
    """Panels of medical images as WebP; noise makes them several times as large as PNG."""
    return _encoded(_rendered(figure, dpi), "webp", alt, caption, quality=75, method=4)


def _rendered(figure: Figure, dpi: int) -> Image.Image:
    """The figure without its white margin."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(buffer, format="png", dpi=dpi, pil_kwargs={"compress_level": 0})
    with Image.open(buffer) as opened:
        image = opened.convert("RGB")
    box = ImageChops.difference(image, Image.new("RGB", image.size, _WHITE)).getbbox()
    return image if box is None else image.crop(box)


def _encoded(image: Image.Image, kind: str, alt: str, caption: str, **options: bool | int) -> EncodedPicture:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    text = base64.b64encode(buffer.getvalue()).decode("ascii")
    return EncodedPicture(f"data:image/{kind};base64,{text}", alt, caption, *image.size)
