"""One way to make an HTML page: escaped, self-contained, without any request to elsewhere.

Pages extend `base.html.j2`, which carries the style, the content security policy and the script. The policy allows
pictures and styles of the page itself and the one script whose hash it names; nothing a data file says can run.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from segcal.counted import count
from segcal.report.wording import MEASURES, listing, number, relative, share, signed

SCRIPT_FILE = "page.js"


def render(template: str, **values: Any) -> str:
    """The text of a page; the same values give the same text."""
    script = _script()
    return _environment().get_template(template).render(script=script, script_hash=_hash(script), **values)


def code(text: str) -> Markup:
    """A sentence with its `quoted` words set as code; everything is escaped first."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def page_environment(package: str) -> Environment:
    """How templates of a package are read, everywhere alike: all values escaped, a name that is missing is an error."""
    environment = Environment(
        loader=PackageLoader(package, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"code": code, "listing": listing}
    environment.globals |= {"count": count}
    return environment


@cache
def _environment() -> Environment:
    environment = page_environment("segcal.report")
    environment.filters |= {"number": number, "signed": signed, "share": share}
    environment.globals |= {"MEASURES": MEASURES, "relative": relative}
    return environment


@cache
def _script() -> str:
    return (files("segcal.report") / "templates" / SCRIPT_FILE).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
