"""A real PostgreSQL for tests: Debian's binaries, a private folder, a Unix socket; one a test process."""

from __future__ import annotations

import atexit
import ctypes
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

UNSAFE_BUT_QUICK = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=200")


@dataclass(frozen=True)
class Postgres:
    """A running server.

    Attributes:
        folder: data and socket.
        process: the postmaster.
    """

    folder: Path
    process: subprocess.Popen[bytes]

    def new_database(self) -> str:
        """The address of an empty database of its own."""
        import psycopg

        name = f"t_{secrets.token_hex(6)}"
        with psycopg.connect(f"host={self.folder} user=segcal dbname=postgres", autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')  # type: ignore[call-overload]
        return f"postgresql://segcal@/{name}?host={self.folder}"

    def stop(self) -> None:
        """End it at once and remove its folder."""
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)


def running_postgres() -> Postgres:
    """The server of this test process, started at the first call; skips the test where there is none."""
    found = _start()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@cache
def _start() -> Postgres | str:
    programs = _programs()
    if programs is None:
        return "no PostgreSQL here: /usr/lib/postgresql/*/bin/initdb is absent (Debian: apt-get install postgresql)"
    user: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="segcal-pg-"))
    if os.geteuid() == 0:  # which PostgreSQL refuses
        account = _account()
        if account is None:
            return "PostgreSQL does not run as root, and there is no user postgres or nobody to run it as"
        os.chown(folder, account.pw_uid, account.pw_gid)
        user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    data = folder / "data"
    command = [programs / "initdb", "-D", data, "-U", "segcal", "-A", "trust", "-E", "UTF8", "--no-sync", "--locale=C"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, timeout=120, **user)
    options = [part for option in UNSAFE_BUT_QUICK for part in ("-c", option)]
    process = subprocess.Popen(
        [programs / "postgres", "-D", data, "-k", folder, "-c", "listen_addresses=", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        preexec_fn=_die_with_parent,
        **user,
    )
    server = Postgres(folder, process)
    atexit.register(server.stop)
    _wait_until_ready(server)
    return server


def _wait_until_ready(server: Postgres) -> None:
    import psycopg

    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(f"host={server.folder} user=segcal dbname=postgres").close()
            return
        except psycopg.OperationalError:
            if time.monotonic() > deadline or server.process.poll() is not None:
                raise
            time.sleep(0.05)


def _programs() -> Path | None:
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if installed:
        return installed[-1].parent
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


def _account() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return None


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGQUIT)  # PR_SET_PDEATHSIG
