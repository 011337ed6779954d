"""What every command relies on: output that machines and people can read, errors as messages, clean stops."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from segcal import errors
from segcal_cli import main
from segcal_cli.common import DebugOption, DeviceOption, JsonOption, Output, QuietOption, example, name_and_file
from segcal_cli.progress import PlainLines
from tests.processes import heed_interrupts

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run `segcal probe …` with the given body; the probe is a command like any other."""

    def run(body: Callable[[Output], None], *arguments: str) -> Result:
        @example("segcal probe")
        def probe(
            json: JsonOption = False,
            quiet: QuietOption = False,
            debug: DebugOption = False,
            device: DeviceOption = "auto",
        ) -> None:
            """Do what the test asks for."""
            body(Output(json=json, quiet=quiet))

        module = ModuleType("segcal_cli.probe")
        module.__dict__["probe"] = probe
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(main, "COMMANDS", (main.Entry("probe", "probe", "probe", "A probe."),))
        return CliRunner().invoke(main.app, ["probe", *arguments])

    return run


def raising(error: BaseException) -> Callable[[Output], None]:
    def body(_: Output) -> None:
        raise error

    return body


OWN_ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SegcalError)]


@pytest.mark.parametrize("kind", OWN_ERRORS)
def test_our_errors_are_one_message_and_the_right_code(invoke: Invoke, kind: type[errors.SegcalError]) -> None:
    result = invoke(raising(kind("case_7: what was seen")))

    codes = {errors.UsageError: 2, errors.SettingsError: 2, errors.Interrupted: 130}
    assert result.exit_code == codes.get(kind, 1)
    prefix = "stopped" if kind is errors.Interrupted else "error"
    assert result.stderr == f"{prefix}: case_7: what was seen\n"
    assert result.stdout == ""


@pytest.mark.parametrize("error", [KeyError("lost"), RuntimeError("lost"), AssertionError("lost")])
def test_an_unexpected_error_is_short_and_points_to_debug(invoke: Invoke, error: Exception) -> None:
    result = invoke(raising(error))

    assert result.exit_code == 1
    assert result.stderr.startswith(f"internal error: {type(error).__name__}: ")
    assert "--debug" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1


def test_errors_of_the_system_read_like_messages(invoke: Invoke, tmp_path: Path) -> None:
    missing = tmp_path / "absent.npz"

    result = invoke(lambda _: missing.read_bytes() and None)

    assert (result.exit_code, result.stderr) == (1, f"error: No such file or directory: {missing}\n")
    assert "not enough memory" in invoke(raising(MemoryError())).stderr


@pytest.mark.parametrize("error", [errors.DataError("NaN in a.npz"), ZeroDivisionError("oops")])
def test_debug_adds_the_traceback(invoke: Invoke, error: Exception) -> None:
    result = invoke(raising(error), "--debug")

    assert result.exit_code == 1
    assert "Traceback (most recent call last)" in result.stderr
    assert "in body" in result.stderr, "the traceback shows the line that failed"


def test_ctrl_c_says_stopped(invoke: Invoke) -> None:
    result = invoke(raising(KeyboardInterrupt()))
    assert (result.exit_code, result.stderr) == (130, "stopped\n")


def test_a_finding_keeps_its_exit_code_and_its_output(invoke: Invoke) -> None:
    def body(out: Output) -> None:
        out.line("case_1: no label")
        raise typer.Exit(1)

    result = invoke(body)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "case_1: no label\n", "")


def test_a_wrong_option_ends_with_2(invoke: Invoke) -> None:
    result = invoke(lambda _: None, "--devcie", "cpu")
    assert result.exit_code == 2
    assert "--devcie" in result.stderr


def test_json_is_one_object_with_sorted_keys_and_null_for_what_json_lacks(invoke: Invoke) -> None:
    values = {
        "zeta": [1, np.float32(0.5), float("nan")],
        "alpha": {"path": Path("a/b"), "table": np.array([[1.0, np.inf]]), 3: np.int64(4), "flag": np.bool_(True)},
        "set": {"b", "a"},
        "text": "λ",
    }

    def body(out: Output) -> None:
        out.line("for people")
        out.table(["a"], [[1]])
        with out.progress(3, "cases") as advance:
            advance(3)
        out.result(values)

    result = invoke(body, "--json")

    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    pairs = json.loads(result.stdout, object_pairs_hook=list)
    assert [key for key, _ in pairs] == ["alpha", "set", "text", "zeta"]
    assert json.loads(result.stdout) == {
        "zeta": [1, 0.5, None],
        "alpha": {"path": str(Path("a/b")), "table": [[1.0, None]], "3": 4, "flag": True},
        "set": ["a", "b"],
        "text": "λ",
    }


def test_a_second_json_object_is_a_bug_of_ours() -> None:
    out = Output(json=True)
    out.result({})
    with pytest.raises(RuntimeError, match="once"):
        out.result({})


def test_a_value_without_a_form_in_json_is_refused() -> None:
    with pytest.raises(TypeError, match="object has no form in JSON"):
        Output(json=True).result({"a": object()})


def test_without_json_the_result_is_not_printed_and_people_get_their_lines(invoke: Invoke) -> None:
    def body(out: Output) -> None:
        out.line("two cases")
        out.table(["case", "nll"], [["a", 0.123456], ["long_name", 12]])
        out.result({"n": 2})

    lines = [line.rstrip() for line in invoke(body).stdout.splitlines()]
    assert lines == ["two cases", "case          nll", "a          0.1235", "long_name      12"]


def test_quiet_leaves_warnings_only(invoke: Invoke) -> None:
    def body(out: Output) -> None:
        out.line("chatter")
        out.table(["a"], [["chatter"]])
        with out.stages() as progress:
            assert progress is None
        out.warn("3 values were floored")

    result = invoke(body, "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "warning: 3 values were floored\n")


def test_table_cells_are_neither_markup_nor_broken_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    wide = "[bold]x[/bold] :smile: " + "y" * 300
    Output().table(["name"], [[wide]])
    assert wide in capsys.readouterr().out


def test_progress_off_a_terminal_is_plain_lines_on_stderr(invoke: Invoke) -> None:
    def body(out: Output) -> None:
        with out.progress(3, "cases") as advance:
            for _ in range(3):
                advance(1)

    result = invoke(body)
    assert result.stdout == ""
    assert [line.split(",")[0] for line in result.stderr.splitlines()] == ["cases: 1 of 3", "cases: 3 of 3"]


def test_plain_lines_come_every_ten_seconds_with_rate_and_time_left() -> None:
    now, stream = [100.0], io.StringIO()
    lines = PlainLines(stream, clock=lambda: now[0])
    for done in range(1, 21):
        now[0] += 4.0
        lines("read", done, 20)

    assert stream.getvalue().splitlines() == [
        "read: 1 of 20, 0.25/s, 76 s left",
        "read: 4 of 20, 0.25/s, 64 s left",
        "read: 7 of 20, 0.25/s, 52 s left",
        "read: 10 of 20, 0.25/s, 40 s left",
        "read: 13 of 20, 0.25/s, 28 s left",
        "read: 16 of 20, 0.25/s, 16 s left",
        "read: 19 of 20, 0.25/s, 4 s left",
        "read: 20 of 20, 0.25/s",
    ]


def test_the_rate_of_a_resumed_run_counts_only_its_own_steps() -> None:
    now, stream = [0.0], io.StringIO()
    lines = PlainLines(stream, clock=lambda: now[0])
    now[0] = 2.0
    lines("apply", 91, 100)
    assert stream.getvalue() == "apply: 91 of 100, 0.5/s, 18 s left\n"


def test_a_second_stage_starts_its_own_clock() -> None:
    now, stream = [0.0], io.StringIO()
    lines = PlainLines(stream, clock=lambda: now[0])
    now[0] = 100.0
    lines("read", 1, 1)
    now[0] = 102.0
    lines("fit", 1, 2)
    assert stream.getvalue().splitlines()[1] == "fit: 1 of 2, 0.5/s, 2 s left"


def test_bars_are_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", stream)
    with Output().stages() as progress:
        assert progress is not None
        progress("read [bold] cases", 2, 4)
        progress("read [bold] cases", 4, 4)
    shown = stream.getvalue()
    assert "read [bold] cases" in shown
    assert "4/4" in shown


PROBE_PROCESS = """
import os, sys, time
from pathlib import Path
from types import ModuleType
from segcal_cli import main
from segcal_cli.common import example

def start(body):
    @example("segcal probe")
    def probe() -> None:
        body()

    module = ModuleType("segcal_cli.probe")
    module.probe = probe
    sys.modules[module.__name__] = module
    main.COMMANDS = (main.Entry("probe", "probe", "probe", "A probe."),)
    sys.argv = ["segcal", "probe"]
    main.run()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_process_after_its_cleanup(tmp_path: Path, number: signal.Signals) -> None:
    body = f"""
folder = Path({str(tmp_path)!r})

def body():
    partial = folder / "partial"
    partial.touch()
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        partial.unlink()
        (folder / "cleaned").touch()

start(body)
"""
    command = [sys.executable, "-c", PROBE_PROCESS + body]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, preexec_fn=heed_interrupts) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, error_text = process.communicate(timeout=60)

    assert (process.returncode, error_text) == (130, "stopped\n")
    assert [path.name for path in tmp_path.iterdir()] == ["cleaned"]


@pytest.mark.parametrize("n_lines", [1, 100_000], ids=["met at the last flush", "met while printing"])
def test_a_reader_that_went_away_is_no_traceback(n_lines: int) -> None:
    body = f"""
def body():
    time.sleep(0.05)
    for number in range({n_lines}):
        print("line", number)

start(body)
"""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE_PROCESS + body],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_pipe_that_is_not_stdout_is_still_an_error(invoke: Invoke) -> None:
    result = invoke(raising(BrokenPipeError(32, "Broken pipe")))
    assert (result.exit_code, result.stderr) == (1, "error: [Errno 32] Broken pipe\n")


def test_a_terminal_that_cannot_show_greek_gets_an_escape() -> None:
    body = "start(lambda: print('λ = 0.1'))\n"
    done = subprocess.run(
        [sys.executable, "-c", PROBE_PROCESS + body],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\\u03bb = 0.1\n", b"")


def test_a_file_whose_path_has_an_equals_sign_can_be_given_with_and_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("run=3", "cal.safetensors")
    path.parent.mkdir()
    path.touch()
    assert name_and_file(str(path)) == ("", str(path))
    assert name_and_file(f"mine={path}") == ("mine", str(path))
    assert name_and_file("mine=other.safetensors") == ("mine", "other.safetensors")
    assert name_and_file("other.safetensors") == ("", "other.safetensors")
