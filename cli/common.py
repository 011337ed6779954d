"""What all commands share: their common options, the example under each help text, and where output goes.

A command is a plain function with annotated options, listed in the table of `main.py`:

    @example("segcal audit calibrator.safetensors manifest.yaml")
    def audit(calibrator: Path, manifest: Path, json: JsonOption = False, quiet: QuietOption = False,
              debug: DebugOption = False, device: DeviceOption = "auto") -> None:
        '''First sentence says what it does for the user.'''
        out = Output(json=json, quiet=quiet)
        with out.stages() as progress:
            result = do_the_work(..., progress=progress)
        out.line("...")
        out.result({...})
        if result.has_findings:
            raise typer.Exit(1)

Errors are raised as classes of `segcal.errors`; `failures.py` prints them.
"""

from __future__ import annotations

import json as jsonlib
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from segcal.errors import UsageError
from segcal.report.wording import about_case

from .failures import DEBUG_KEY
from .progress import shown_progress

if TYPE_CHECKING:
    from segcal.types import Progress  # not at run time: it brings numpy, and `segcal --help` is to stay quick

Function = TypeVar("Function", bound=Callable[..., None])


def _remember_debug(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[DEBUG_KEY] = value
    return value


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]
DebugOption = Annotated[
    bool, typer.Option("--debug", callback=_remember_debug, is_eager=True, help="Show the traceback of an error.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps; auto takes the fastest.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue a run: what is finished is not done again.")]
KeepGoingOption = Annotated[
    bool, typer.Option("--keep-going", help="Leave a broken case out, list it at the end, exit 1.")
]
ForceKindOption = Annotated[bool, typer.Option("--force", help="Apply a method that needs logits to probabilities.")]


DIFFERING = "members calibrated one by one: in {:,} voxels the mean names another class than the segmentation"
"""Said after every run with `--pooling members-probabilities`, which does not promise that the two agree."""


def epilog(command_line: str) -> str:
    """The end of a help text: one call that works, in one line that can be copied."""
    return f"\b\nExample:\n  {command_line}"


def example(command_line: str) -> Callable[[Function], Function]:
    """Decorate a command function with the example its `--help` ends with."""

    def mark(function: Function) -> Function:
        function.__dict__["example"] = command_line
        return function

    return mark


def sub_app(help_text: str) -> typer.Typer:
    """A command that has commands of its own (`segcal manifest scan`); give each an `epilog=epilog(...)`."""
    return typer.Typer(help=help_text, rich_markup_mode=None, add_completion=False, no_args_is_help=True)


def name_and_file(text: str) -> tuple[str, str]:
    """NAME=FILE taken apart; the name is empty where a file was given alone, whose path may have a `=` in it."""
    name, sign, file = text.partition("=")
    return ("", text) if not sign or Path(text).is_file() else (name, file)


@dataclass
class Output:
    """Where a command's output goes: results to stdout, progress and warnings to stderr.

    Attributes:
        json: stdout gets exactly one JSON object, from `result`.
        quiet: only warnings and errors are printed.
    """

    json: bool = False
    quiet: bool = False
    _printed: bool = field(default=False, init=False)

    @property
    def silent(self) -> bool:
        """Whether text meant for people is left out."""
        return self.json or self.quiet

    def line(self, text: str = "") -> None:
        """Print one line for people."""
        if not self.silent:
            print(text)

    def note(self, text: str) -> None:
        """Print one line for people on stderr: about the run, not of its result."""
        if not self.silent:
            print(text, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Print a warning on stderr; also with --quiet and --json, because results may not mean what they seem to."""
        print(f"warning: {text}", file=sys.stderr)

    def warn_of_case(self, what: str, case_id: str, message: str) -> None:
        """Print what became of a case and why."""
        self.warn(f"{what}: {about_case(case_id, message)}")

    def table(self, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print aligned columns for people; columns that hold numbers only are set flush right."""
        if self.silent:
            return
        from rich.console import Console
        from rich.table import Table

        cells = [list(row) for row in rows]
        table = Table(box=None, pad_edge=False, header_style="")
        for index, name in enumerate(header):
            numeric = bool(cells) and all(isinstance(row[index], int | float) for row in cells)
            table.add_column(name, justify="right" if numeric else "left", overflow="fold")
        for row in cells:
            table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
        # A file or a pipe has no width to fit: no cell is broken there.
        width = None if sys.stdout.isatty() else 10_000
        Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False).print(table)

    def result(self, values: Mapping[str, object]) -> None:
        """Hand over the machine-readable result: printed with --json (sorted keys, NaN and infinity as null), once."""
        if not self.json:
            return
        if self._printed:
            raise RuntimeError("a command prints one JSON object; collect everything and call `result` once")
        self._printed = True
        print(jsonlib.dumps(_plain(values), sort_keys=True, ensure_ascii=False, allow_nan=False))

    @contextmanager
    def stages(self) -> Iterator[Progress | None]:
        """Yield the `progress` argument of a library function; None when nothing is to be shown."""
        if self.silent:
            yield None
            return
        with shown_progress() as report:
            yield report

    @contextmanager
    def progress(self, total: int, label: str) -> Iterator[Callable[[int], None]]:
        """Yield advance(steps) for a loop of `total` steps; may be called from several threads."""
        done, lock = 0, threading.Lock()
        with self.stages() as report:

            def advance(steps: int = 1) -> None:
                nonlocal done
                with lock:
                    done += steps
                    if report is not None:
                        report(label, done, total)

            yield advance


def _plain(value: Any) -> Any:
    """The same value from JSON's own types; numpy scalars and arrays included, without importing numpy."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def calibrator_paths(methods: Sequence[str], out: Path) -> dict[str, Path]:
    """Where the calibrator of each method goes; asked before the fit, which may take long.

    Raises:
        UsageError, OutputError: nothing can be written there, or something else would be lost.
    """
    from segcal.io.atomic import check_folder
    from segcal.io.own_files import check_replaceable_file

    if len(methods) > 1 and (out.suffix == ".safetensors" or out.is_file()):
        raise UsageError(f"{out}: several methods need a folder, not a file; try --out {out.parent / 'calibrators'}")
    alone = len(methods) == 1 and not out.is_dir()
    paths = {name: out if alone else out / f"{name}.safetensors" for name in methods}
    for path in paths.values():
        check_folder(path.parent)
        check_replaceable_file(path, "calibrator")
    return paths
