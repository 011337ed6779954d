"""Tokens: shown once, kept as a hash.

A token's secret is 32 random bytes, so nobody finds it by trying words, and a plain SHA-256 tells as little about it
as a slow password hash would; it can be checked at every request without cost.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from sqlalchemy import insert, select, update

from segcal.service.errors import UnknownError
from segcal.service.model import Scope, TokenRecord
from segcal.service.store.database import Database
from segcal.service.store.rows import token_of
from segcal.service.store.tables import tokens

SECRET_BYTES = 32

_FORM = re.compile(rf"segcal_([0-9a-f]{{12}})_([0-9a-f]{{{2 * SECRET_BYTES}}})", re.ASCII)
_NO_HASH = "0" * 64


class Tokens:
    """Making, checking and revoking."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str, scope: Scope, expires: float | None = None) -> tuple[TokenRecord, str]:
        """A new token and its text `segcal_<id>_<secret>`, which cannot be shown again."""
        token_id, secret = secrets.token_hex(6), secrets.token_hex(SECRET_BYTES)
        with self._database.write() as connection:
            record = TokenRecord(token_id, name, scope, self._database.now(connection), expires, None)
            values = {"id": token_id, "name": name, "scope": scope, "created": record.created, "expires": expires}
            connection.execute(insert(tokens).values(hash=_hash(secret), **values))
        return record, f"segcal_{token_id}_{secret}"

    def check(self, text: str) -> TokenRecord | None:
        """The token behind a text; None when it is unknown, wrong, revoked or expired.

        The hashes are compared in constant time; a text that names no token costs a look-up and a comparison too.
        """
        form = _FORM.fullmatch(text)
        token_id, secret = form.groups() if form else ("", text)
        with self._database.read() as connection:
            row = connection.execute(select(tokens).where(tokens.c.id == token_id)).mappings().one_or_none()
            now = self._database.now(connection)
        expected = _NO_HASH if row is None else str(row["hash"])
        right = hmac.compare_digest(_hash(secret), expected)
        if row is None or not right:
            return None
        record = token_of(row)
        over = record.revoked is not None or (record.expires is not None and record.expires <= now)
        return None if over else record

    def list(self) -> list[TokenRecord]:
        """All tokens, newest first."""
        with self._database.read() as connection:
            rows = connection.execute(select(tokens).order_by(tokens.c.created.desc(), tokens.c.id)).mappings()
            return [token_of(row) for row in rows]

    def revoke(self, token_id: str) -> TokenRecord:
        """Let a token work no more, from the next request on.

        Raises:
            UnknownError: there is none of that id.
        """
        with self._database.write() as connection:
            valid = update(tokens).where(tokens.c.id == token_id, tokens.c.revoked.is_(None))
            connection.execute(valid.values(revoked=self._database.now(connection)))
            row = connection.execute(select(tokens).where(tokens.c.id == token_id)).mappings().one_or_none()
        if row is None:
            raise UnknownError(f"there is no token {token_id!r}; `segcal token list` shows them")
        return token_of(row)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
