"""The command itself: light to start, every command in its table works, help texts end with an example."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.testing import CliRunner

import segcal
from segcal_cli import main

HEAVY = ("torch", "numpy", "optuna", "matplotlib", "scipy", "sklearn", "SimpleITK", "nibabel", "pydantic", "jinja2")


def leaves() -> Iterator[tuple[str, TyperCommand]]:
    """Every command that can be run, with its full name."""
    for entry in main.COMMANDS:
        command = main.load_command(entry)
        if isinstance(command, TyperGroup):
            for name, inner in command.commands.items():
                assert isinstance(inner, TyperCommand)
                yield f"{entry.name} {name}", inner
        else:
            yield entry.name, command


@pytest.mark.parametrize("argument", ["--help", "--version", "--no-such-option"])
def test_help_and_version_load_no_heavy_library(argument: str) -> None:
    script = (
        "import sys; from segcal_cli import main\n"
        f"sys.argv = ['segcal', {argument!r}]\n"
        "try: main.run()\n"
        "except SystemExit: pass\n"
        f"print('LOADED', *(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "LOADED"


def test_version() -> None:
    result = CliRunner().invoke(main.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"segcal {segcal.__version__}\n")


def test_help_lists_every_command_with_its_whole_line() -> None:
    result = CliRunner().invoke(main.app, ["--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for entry in main.COMMANDS:
        assert f"{entry.name} {entry.help}" in lines


def test_no_arguments_show_the_help_and_are_wrong_usage() -> None:
    result = CliRunner().invoke(main.app, [])
    assert result.exit_code == 2
    assert "Commands:" in result.stderr


def test_a_misspelt_command_gets_a_suggestion() -> None:
    result = CliRunner().invoke(main.app, ["aply"])
    assert result.exit_code == 2
    assert "Did you mean 'apply'?" in result.stderr


def test_every_command_in_the_table_has_the_common_options_and_ends_its_help_with_an_example() -> None:
    found = list(leaves())
    assert {name.split()[0] for name, _ in found} == {entry.name for entry in main.COMMANDS}
    for name, command in found:
        result = CliRunner().invoke(main.app, [*name.split(), "--help"])
        assert result.exit_code == 0, f"{name}: {result.output}"
        *_, heading, last = result.stdout.rstrip().splitlines()
        assert heading.strip() == "Example:", name
        assert last.strip().startswith(f"segcal {name}"), name
        options = {option for parameter in command.params for option in parameter.opts}
        assert {"--json", "--quiet", "--debug"} <= options, name


def test_a_missing_argument_of_a_command_is_wrong_usage() -> None:
    needy = [name for name, command in leaves() if any(parameter.required for parameter in command.params)]
    assert needy
    for name in needy:
        result = CliRunner().invoke(main.app, name.split())
        assert result.exit_code == 2, name
        assert "Missing" in result.stderr, name


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_closed_stream_is_no_error(closed: str) -> None:
    command = f"{sys.executable} -c 'from segcal_cli.main import run; run()' manifest scan --help {closed}"
    assert subprocess.run(["sh", "-c", command], capture_output=True, check=False).returncode == 0
