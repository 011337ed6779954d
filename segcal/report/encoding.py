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
    image = _rendered(figure, dpi).quantize(64, dither=Image.Dither.NONE)
    return _encoded(_bytes(image, "png", optimize=True), image, "png", alt, caption)


def photograph(figure: Figure, *, alt: str, caption: str, dpi: int = 100, max_bytes: int = 100_000) -> EncodedPicture:
    """Panels of medical images as WebP, which noise makes several times smaller than PNG.

    What is still larger than `max_bytes` loses quality first and then size, so that a page can promise a size.
    """
    image = _rendered(figure, dpi)
    while True:
        for quality in (75, 60, 45):
            data = _bytes(image, "webp", quality=quality, method=4)
            if len(data) <= max_bytes or min(image.size) < 100:
                return _encoded(data, image, "webp", alt, caption)
        image = image.resize((image.width * 4 // 5, image.height * 4 // 5), Image.Resampling.LANCZOS)


def _rendered(figure: Figure, dpi: int) -> Image.Image:
    """The figure without its white margin."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(buffer, format="png", dpi=dpi, pil_kwargs={"compress_level": 0})
    with Image.open(buffer) as opened:
        image = opened.convert("RGB")
    box = ImageChops.difference(image, Image.new("RGB", image.size, _WHITE)).getbbox()
    return image if box is None else image.crop(box)


def _bytes(image: Image.Image, kind: str, **options: bool | int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def _encoded(data: bytes, image: Image.Image, kind: str, alt: str, caption: str) -> EncodedPicture:
    text = base64.b64encode(data).decode("ascii")
    return EncodedPicture(f"data:image/{kind};base64,{text}", alt, caption, *image.size)
