"""REST under /v1 and who may do what.

A request passes, from outside to inside:

    connections.py  what is no HTTP, or says nothing
    doorway.py      security headers, one log line, one count, no traceback
    gate.py         the right name (hosts.py), a known caller (auth.py), no page of another site
    body_limit.py   size and time of what it sends
    *_routes.py     one file a noun; answers.py is what they answer with, problems.py what they refuse with

`service.py` starts and ends all of `segcal serve`, `app.py` puts the application together.
"""
