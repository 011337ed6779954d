"""Brings NiiVue, the viewer of volumes in the browser, into the package: `python -m segcal.service.web.build_viewer`.

Node's npm fetches the pinned release and checks it against the checksum below; its one bundled module and the licences
of everything in it are copied to static/niivue/. Without them the pages show slices drawn by the server.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from segcal.errors import FileFormatError, SegcalError, UsageError
from segcal.io.atomic import atomic_write, write_text_atomic

PACKAGE, VERSION = "@niivue/niivue", "0.69.0"
INTEGRITY = "sha512-YMjQvJgD1W2b7DuoxkwlC4VxbrgIePRJ5qyQzXKxi2v2MBVg285P/CIQyg46oDDGDIcaNlbd+MhtO/edMbXJkA=="
"""Of the package file, as the npm registry publishes it."""

TARGET = Path(__file__).parent / "static" / "niivue"
MODULE, LICENCES = "niivue.js", "LICENSES.txt"
_TIMEOUT_S = 600

_OWN_LICENCE = """BSD 2-Clause License

Copyright (c) 2021, Niivue
All rights reserved.

Redistribution and use in source and binary forms, with or without
modification, are permitted provided that the following conditions are met:

1. Redistributions of source code must retain the above copyright notice, this
   list of conditions and the following disclaimer.

2. Redistributions in binary form must reproduce the above copyright notice,
   this list of conditions and the following disclaimer in the documentation
   and/or other materials provided with the distribution.

THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS"
AND ANY EXPRESS OR IMPLIED WARRANTIES, INCLUDING, BUT NOT LIMITED TO, THE
IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A PARTICULAR PURPOSE ARE
DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT HOLDER OR CONTRIBUTORS BE LIABLE
FOR ANY DIRECT, INDIRECT, INCIDENTAL, SPECIAL, EXEMPLARY, OR CONSEQUENTIAL
DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR
SERVICES; LOSS OF USE, DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER
CAUSED AND ON ANY THEORY OF LIABILITY, WHETHER IN CONTRACT, STRICT LIABILITY,
OR TORT (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE
OF THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE.
"""
"""The package names its licence but does not hold the text, which has to go with a copy."""


def build_viewer(target: Path = TARGET) -> Path:
    """Fetch NiiVue and put it into `target`; gives the path of the module.

    Raises:
        UsageError: there is no npm, or it cannot reach its registry.
        FileFormatError: what came is not the pinned release.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise UsageError("npm is not on the path; install Node.js, or do without: the pages show slices then")
    with tempfile.TemporaryDirectory(prefix="segcal-viewer-") as folder:
        build = Path(folder)
        _run(npm, "pack", "--silent", f"{PACKAGE}@{VERSION}", folder=build)
        (archive,) = build.glob("*.tgz")
        _check(archive)
        # Only for the texts of the licences: the module in the package already holds what it needs.
        (build / "package.json").write_text("{}")
        _run(
            npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--omit=optional", archive.name, folder=build
        )
        package = build / "node_modules" / PACKAGE
        with atomic_write(target / MODULE) as temporary:
            temporary.write_bytes(_module(package))
        write_text_atomic(target / LICENCES, _licences(build / "node_modules", package))
    return target / MODULE


def _run(*command: str, folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise UsageError(f"npm {command[1]} failed: {error.stderr.strip()[-500:]}") from error
    except subprocess.TimeoutExpired:
        raise UsageError(f"npm {command[1]} took longer than {_TIMEOUT_S} s; is its registry reachable?") from None


def _check(archive: Path) -> None:
    found = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != INTEGRITY:
        raise FileFormatError(f"{PACKAGE} {VERSION}: checksum {found}, expected {INTEGRITY}; not the pinned release")


def _module(package: Path) -> bytes:
    """The bundle, without the pointer to a map that is not there."""
    text = (package / "dist" / "index.js").read_text(encoding="utf-8")
    return re.sub(r"\n//# sourceMappingURL=.*\s*$", "\n", text).encode()


def _licences(modules: Path, package: Path) -> str:
    """The licence of every package whose code is in the bundle."""
    inputs = json.loads((package / "dist" / "metafile-esm.json").read_text(encoding="utf-8"))["inputs"]
    found = (re.search(r"node_modules/((?:@[^/]+/)?[^/]+)/", name) for name in inputs)
    names = sorted({match[1] for match in found if match})
    texts = [f"{PACKAGE} {VERSION}\n\n{_OWN_LICENCE}"]
    for name in names:
        about = json.loads((modules / name / "package.json").read_text(encoding="utf-8"))
        files = sorted(
            path for path in (modules / name).iterdir() if path.name.lower().startswith(("licen", "copying"))
        )
        words = files[0].read_text(encoding="utf-8") if files else f"Licence: {about.get('license', 'not given')}\n"
        texts.append(f"{name} {about['version']}\n\n{words}")
    return f"\n{'-' * 78}\n\n".join(texts)


if __name__ == "__main__":
    try:
        print(build_viewer())
    except SegcalError as error:
        sys.exit(f"error: {error}")
