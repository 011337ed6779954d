"""By which names the server is reached, and whether a request comes from a page of its own.

A page of a foreign site can make a browser send requests to this machine, also under a name that its owner points here
(DNS rebinding). The Host header gives such a name away; Origin and Sec-Fetch-Site, which scripts cannot set, tell the
page that a request comes from.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from segcal.service.settings import ServiceSettings, is_loopback

_HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9._-]{1,253}))(?::(?P<port>[0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}
_WILDCARDS = frozenset({"", "0.0.0.0", "::"})
_PROXIED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")


def host_name(header: str) -> str | None:
    """The name in a Host header, without port and brackets, in lower case; None when it is no such header."""
    match = _HOST.fullmatch(header)
    if match is None:
        return None
    return (match["six"] or match["name"]).lower().rstrip(".")


def known_host(headers: Headers, settings: ServiceSettings) -> bool:
    """Whether the one Host header names this server: this machine, the address it listens on, a configured name."""
    given = headers.getlist("host")
    name = host_name(given[0]) if len(given) == 1 else None
    if name is None:
        return False
    own = {each.lower().rstrip(".") for each in (settings.host, *settings.host_names)} - _WILDCARDS
    return is_loopback(name) or name in own


def from_other_site(headers: Headers) -> bool:
    """Whether a browser says that a page of another site sends the request."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None and site not in ("same-origin", "none"):
        return True
    return origin is not None and not _same_place(origin, headers.get("host", ""))


def says_own_site(headers: Headers) -> bool:
    """Whether a browser says that the request comes from a page of this server."""
    said = headers.get("sec-fetch-site") is not None or headers.get("origin") is not None
    return said and not from_other_site(headers)


def came_through_proxy(headers: Headers) -> bool:
    """Whether something in between says that it passed the request on for somebody else."""
    return any(name in headers for name in _PROXIED)


def _same_place(origin: str, host: str) -> bool:
    """Whether an Origin is that of the pages under a Host; a proxy may write the port that a browser leaves out."""
    scheme, _, place = origin.lower().partition("://")
    if scheme not in _PORTS or host_name(place) is None or host_name(place) != host_name(host):
        return False
    return _port(place, _PORTS[scheme]) == _port(host, _PORTS[scheme])


def _port(host: str, usual: int) -> int:
    match = _HOST.fullmatch(host)
    return usual if match is None or match["port"] is None else int(match["port"])
