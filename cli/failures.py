"""What the user sees when a command does not come to its end: one message, the right exit code, no traceback."""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

import typer

from segcal.errors import Interrupted, SegcalError, SettingsError, UsageError

FAILED = 1
WRONG_USAGE = 2
STOPPED = 130
DEBUG_KEY = "segcal.debug"


@contextmanager
def reported(ctx: typer.Context) -> Iterator[None]:
    """Turn every way a command can fail into a message on stderr and an exit code.

    Errors made for the user end with 1 (2 when the call or a settings file is wrong), Ctrl-C and SIGTERM with 130.
    Wrong options are left to typer, which prints the usage and ends with 2. `--debug` adds the traceback.
    """
    try:
        try:
            yield
        except typer.Exit:
            _flush()
            raise
        _flush()
    except (typer.Exit, typer.Abort, typer.TyperException):
        raise
    except KeyboardInterrupt:
        _end(ctx, "stopped", STOPPED)
    except Interrupted as error:
        _end(ctx, f"stopped: {error}", STOPPED)
    except SegcalError as error:
        _end(ctx, f"error: {error}", WRONG_USAGE if isinstance(error, UsageError | SettingsError) else FAILED, error)
    except BrokenPipeError as error:
        if not _reader_is_gone():
            _end(ctx, f"error: {error}", FAILED, error)
        _drop_stdout()
        raise typer.Exit(FAILED) from None
    except MemoryError as error:
        _end(ctx, "error: not enough memory for this case", FAILED, error)
    except OSError as error:
        _end(ctx, f"error: {_plain(error)}", FAILED, error)
    except Exception as error:
        text = f"internal error: {type(error).__name__}: {error}; run again with --debug to see where"
        _end(ctx, text, FAILED, error)


def stop_on_sigterm() -> None:
    """Let SIGTERM end the process as Ctrl-C does, so that temporary files are removed and finished cases stay."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _end(ctx: typer.Context, message: str, code: int, error: BaseException | None = None) -> NoReturn:
    with suppress(OSError):
        if error is not None and ctx.meta.get(DEBUG_KEY):
            traceback.print_exception(error, file=sys.stderr)
        print(message, file=sys.stderr, flush=True)
    raise typer.Exit(code) from None


def _plain(error: OSError) -> str:
    """`No such file or directory: x.nii.gz` instead of `[Errno 2] No such file or directory: 'x.nii.gz'`."""
    if error.strerror is None:
        return str(error)
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([error.strerror, " -> ".join(names)]) if names else error.strerror


def _flush() -> None:
    # Output that fits the buffer meets a closed pipe only here, and at interpreter exit nobody could catch that.
    sys.stdout.flush()


def _reader_is_gone() -> bool:
    """Whether it is stdout that broke (`segcal … | head`) and not some other pipe of the run."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _drop_stdout() -> None:
    """Send what is still buffered nowhere: the flush at interpreter exit would complain again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
