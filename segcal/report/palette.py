"""Colours that colour-blind readers can tell apart, and that survive a grey-scale printer where it matters.

Classes and curves take the Okabe-Ito palette (Okabe & Ito 2008); maps take cividis and viridis, whose brightness rises
with the value. Curves also differ in marker and line style, so colour is never the only cue.
"""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.colors import to_hex, to_rgb

OKABE_ITO = {
    "orange": "#E69F00",
    "sky blue": "#56B4E9",
    "bluish green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "reddish purple": "#CC79A7",
    "black": "#000000",
}
INK, FAINT = "#222222", "#8A8A8A"
HARMFUL, BENEFICIAL = OKABE_ITO["vermillion"], OKABE_ITO["sky blue"]

CONFIDENCE_MAP = "cividis"
FREE_ENERGY_MAP = "viridis"

_CLASS_ORDER = ("sky blue", "orange", "reddish purple", "yellow", "bluish green", "vermillion", "blue")


@dataclass(frozen=True, slots=True)
class CurveStyle:
    """How one curve is drawn; two curves of a figure differ in all three."""

    colour: str
    marker: str
    line: str | tuple[int, tuple[int, ...]]


CURVES = (
    CurveStyle(OKABE_ITO["vermillion"], "o", "-"),
    CurveStyle(OKABE_ITO["blue"], "s", "--"),
    CurveStyle(OKABE_ITO["bluish green"], "^", "-."),
    CurveStyle(OKABE_ITO["reddish purple"], "D", ":"),
    CurveStyle(OKABE_ITO["orange"], "v", (0, (5, 1, 1, 1, 1, 1))),
    CurveStyle(OKABE_ITO["black"], "P", (0, (1, 1))),
)


def class_colours(n_foreground: int) -> list[str]:
    """One colour for each foreground class; from the eighth on the same hues return lighter, then darker."""
    colours = []
    for index in range(n_foreground):
        turn, hue = divmod(index, len(_CLASS_ORDER))
        red, green, blue = to_rgb(OKABE_ITO[_CLASS_ORDER[hue]])
        towards, share = (1.0, 0.0) if turn == 0 else ((1.0, 0.55) if turn % 2 else (0.0, 0.45))
        mixed = [(1 - share) * part + share * towards for part in (red, green, blue)]
        colours.append(to_hex((mixed[0], mixed[1], mixed[2])).upper())
    return colours
