"""The `segcal` command: a table of commands whose modules are imported when they are called.

`segcal --help` and `segcal --version` stay fast because nothing of torch, optuna or matplotlib is loaded for them.
"""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

import segcal

from .common import epilog
from .failures import DEBUG_KEY, reported, stop_on_sigterm


class Entry(NamedTuple):
    """One command: its name, the module and function (or sub-app) behind it, its line in `segcal --help`."""

    name: str
    module: str
    function: str
    help: str


COMMANDS = (
    Entry("demo", "demo", "demo", "Run the whole flow on a small synthetic ensemble."),
    Entry("manifest", "manifest", "app", "Make a manifest from folders of predictions; check one."),
    Entry("fit", "fit", "fit", "Fit calibrators on the labelled cases of a manifest."),
    Entry("apply", "apply", "apply", "Write calibrated probabilities and the segmentation."),
    Entry("evaluate", "evaluate", "evaluate", "Measure calibrators on labelled cases, with intervals."),
    Entry("study", "study", "study", "Fit and measure many pipelines over repeats: the paper's table."),
    Entry("report", "report", "report", "Make one HTML page from the results of evaluate, study or apply."),
    Entry("qa", "qa", "qa", "Look at a batch without ground truth: who needs a look."),
    Entry("audit", "audit", "audit", "Check that shifts change nothing and decisions are kept."),
    Entry("nnunet", "nnunet", "app", "Logits out of nnU-Net, calibrated maps into its folders."),
    Entry("classify", "classify", "app", "Calibrate the scores of a plain classifier."),
    Entry("serve", "serve", "serve", "Run the service: REST, pages, workers, watched folders."),
    Entry("worker", "worker", "worker", "Do the jobs of a service whose server runs elsewhere."),
    Entry("token", "token", "app", "Make, list and revoke the tokens of a service."),
    Entry("corrupt", "corrupt", "corrupt", "Corrupt 2-D images, to measure calibrators under shift."),
)


class LazyGroup(TyperGroup):
    """Knows every command by its line in the table and imports one only to run it or to show its own help."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for entry in COMMANDS:
            self.add_command(TyperCommand(entry.name, help=entry.help, rich_markup_mode=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Replace the placeholder that the table gave by the command itself."""
        # The command's own --debug is parsed after its module is imported, and the import can fail too.
        ctx.meta[DEBUG_KEY] = "--debug" in args
        name, command, rest = super().resolve_command(ctx, args)
        entry = next((entry for entry in COMMANDS if entry.name == name), None)
        return name, command if entry is None else load_command(entry), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; failures become messages and exit codes."""
        with reported(ctx):
            return super().invoke(ctx)


def load_command(entry: Entry) -> TyperCommand | TyperGroup:
    """Import a command's module and build the command from its function or sub-app."""
    target = getattr(import_module(f".{entry.module}", __package__), entry.function)
    if isinstance(target, typer.Typer):
        group = typer.main.get_group(target)
        group.name = entry.name
        return group
    single = typer.Typer(rich_markup_mode=None, add_completion=False)
    single.command(entry.name, epilog=epilog(target.example))(target)
    command = typer.main.get_command(single)
    assert isinstance(command, TyperCommand)
    return command


app = typer.Typer(
    cls=LazyGroup,
    name="segcal",
    help="Calibrated probabilities from nnU-Net ensembles, without touching the deployed segmentation.",
    epilog=epilog("segcal demo --out demo_out"),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(value: bool) -> None:
    if value:
        print(f"segcal {segcal.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Give typer the options of `segcal` itself; the commands do the work."""


def run() -> None:
    """Entry point of the installed command."""
    stop_on_sigterm()
    # Closed by whoever started us (`>&-`), they are None, and every line said would be an error.
    sys.stdout, sys.stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show λ gets an escape, not a UnicodeEncodeError in the middle of a run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")
