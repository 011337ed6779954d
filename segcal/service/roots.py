"""Which files of the machine a job may name: those below configured folders, links resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from segcal.service.errors import RefusedPathError


@dataclass(frozen=True, slots=True)
class Roots:
    """The allowed folders, links resolved."""

    folders: tuple[Path, ...]

    @classmethod
    def of(cls, folders: tuple[Path, ...]) -> Roots:
        return cls(tuple(folder.resolve() for folder in folders))

    def allow(self, path: str | Path) -> Path:
        """The real path behind `path`, which must be absolute and lie below a root.

        Raises:
            RefusedPathError: relative, with a NUL, or outside of every root once `..` and links are resolved. The
                message is the same whether the file exists or not.
        """
        text = str(path)
        if "\0" in text or not Path(text).is_absolute():
            raise RefusedPathError(f"{text!r}: give an absolute path below one of the service's folders")
        try:
            real = Path(text).resolve()
        except (OSError, RuntimeError):
            real = None
        if real is None or not any(real == root or root in real.parents for root in self.folders):
            raise RefusedPathError(
                f"{text!r}: not below a folder this service may read; whoever runs it allows one with --root"
            )
        return real
