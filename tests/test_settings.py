"""Settings: every shipped file loads, the defaults are the published ones, mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from segcal.calibrators import CALIBRATORS
from segcal.errors import MissingFileError, SettingsError
from segcal.fitting.condense import DEFAULT_ROWS
from segcal.fitting.patches import DEFAULT_PATCHES
from segcal.settings import LogRange, PipelineSettings, SearchSpace, config_names, load_settings

ON_LOGITS = ["ts", "ets", "vs", "ms", "ms_c", "dc", "cdc", "cms_ap", "cms_op", "lts", "lts_ti"]
ON_PROBABILITIES = ["ts", "ets", "vs", "dc", "cdc", "cms_ap", "cms_op", "lts_ti"]
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def test_one_file_per_pipeline_ships() -> None:
    assert config_names() == sorted([*ON_LOGITS, *(f"{method}_p" for method in ON_PROBABILITIES)])


@pytest.mark.parametrize("name", [*ON_LOGITS, *(f"{method}_p" for method in ON_PROBABILITIES)])
def test_a_shipped_file_describes_the_pipeline_of_its_name(name: str) -> None:
    settings = load_settings(name)

    assert settings.method == name.removesuffix("_p")
    assert settings.pooling == ("probabilities" if name.endswith("_p") else "logits")
    assert settings.name == f"{settings.method}({'p' if name.endswith('_p') else 'z'})"
    assert settings.solver == ("adam" if CALIBRATORS[settings.method].spatial else "exact")
    assert settings.space == SearchSpace(), "a shipped file tunes over the published ranges"
    assert settings.lambda_ is None
    assert settings.mu is None
    first_line = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first_line.startswith("# "), "the file says what the method does before anything else"


def test_defaults_are_those_of_the_paper() -> None:
    settings = PipelineSettings(method="cms_ap")

    assert settings.trials == 20
    assert settings.solver == "exact"
    assert settings.space.lambda_ == settings.space.mu == LogRange(zero=True, low=1e-6, high=1e-1)
    assert settings.space.alpha == LogRange(zero=True, low=1e-6, high=1e-2)
    assert settings.space.learning_rate == LogRange(zero=False, low=1e-4, high=3e-2)
    assert settings.space.patience.choices == (10, 20, 50)


@pytest.mark.parametrize("settings", [PipelineSettings(method="ts"), load_settings("dc"), load_settings("lts_ti")])
def test_sample_sizes_are_those_the_samplers_were_measured_with(settings: PipelineSettings) -> None:
    assert settings.rows == DEFAULT_ROWS
    assert settings.max_patches == DEFAULT_PATCHES


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("method: dc\nlambda: 1e-6\nspace: {mu: {zero: no, low: 1e-5, high: 1E-2}}\n", encoding="utf-8")
    assert yaml.safe_load("1e-6") == "1e-6", "PyYAML reads it as text; without that this test shows nothing"

    settings = load_settings(file)

    assert settings.lambda_ == 1e-6
    assert settings.space.mu == LogRange(zero=False, low=1e-5, high=1e-2)
    assert settings.space.alpha == SearchSpace().alpha


def test_a_file_is_told_from_a_name_by_its_ending_or_a_separator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ts").write_text("method: dc\n", encoding="utf-8")
    (tmp_path / "ts.yaml").write_text("method: vs\n", encoding="utf-8")

    assert load_settings("ts").method == "ts"
    assert load_settings("./ts").method == "dc"
    assert load_settings("ts.yaml").method == "vs"
    assert load_settings(Path("ts")).method == "dc"


def test_an_unknown_name_gets_the_nearest_ones() -> None:
    with pytest.raises(SettingsError, match=r"no settings named `cms_apq`; the nearest are cms_ap, ") as caught:
        load_settings("cms_apq")
    assert "zz" not in str(caught.value)

    with pytest.raises(SettingsError, match=r"`zzzz`; there are cdc, .*vs_p"):
        load_settings("zzzz")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(MissingFileError, match=r"^nowhere\.yaml: no such settings file"):
        load_settings("nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("method: dc\nlamda: 1\n", "unknown key `lamda`, did you mean `lambda`?"),
        ("method: dc\ntrails: 5\n", "unknown key `trails`, did you mean `trials`?"),
        (
            "method: dc\nspace: {learning_rte: {low: 1, high: 2}}\n",
            "`space.learning_rte`, did you mean `learning_rate`?",
        ),
        ("method: dc\nspace: {lambda: {low: 1, hihg: 2}}\n", "`space.lambda.hihg`, did you mean `high`?"),
        ("method: dcc\n", "unknown method `dcc`, did you mean `dc`?"),
        ("pooling: logits\n", "`method` is missing"),
        ("method: dc\npooling: mean\n", "`pooling`"),
        ("method: dc\nsolver: lbfgs\n", "`solver`"),
        ("method: dc\ntrials: 0\n", "`trials`"),
        ("method: dc\ntrials: true\n", "`trials`: expected a number"),
        ("method: dc\nrows: 10\n", "`rows`"),
        ("method: dc\nlambda: -1\n", "`lambda`"),
        ("method: dc\nlambda: .nan\n", "`lambda`"),
        ("method: dc\nmu: .inf\n", "`mu`"),
        ("method: dc\nmu: yes\n", "`mu`: expected a number"),
        ("method: dc\nspace: {mu: {low: 1, high: 0.1}}\n", "`space.mu`: low (1) is above high (0.1)"),
        ("method: dc\nspace: {mu: {low: 0, high: 0.1}}\n", "`space.mu.low`"),
        ("method: dc\nspace: {patience: {choices: []}}\n", "`space.patience.choices`"),
        ("method: dc\nmethod: ts\n", "line 2: the key `method` is written twice"),
        ("- method\n", "the file is a list, expected `key: value` lines"),
        ("", "the file is empty"),
        ("method: [dc\n", "not valid YAML: line 2"),
        ("method: 2024-99-99\n", "not valid YAML: month must be"),
        ("method: !!timestamp yesterday\n", "not valid YAML"),
        ("method: !!bool perhaps\n", "not valid YAML"),
        ("method: !!int ''\n", "not valid YAML"),
        ("method: " + "[" * 3000 + "]" * 3000, "nested deeper than 16 levels"),
        ("a: &a [1]\nmethod: *a\n", "line 2: the alias `*a` is not allowed"),
        ("method: 0x" + "f" * 5000 + "\n", "got a number too long to show"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_name(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(text, encoding="utf-8")

    with pytest.raises(SettingsError) as caught:
        load_settings(file)

    assert str(caught.value).startswith(f"{file}: ")
    assert said in str(caught.value)


def test_bytes_that_are_no_text_are_an_error_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_bytes(b"method: \xff\xfe dc\n")

    with pytest.raises(SettingsError, match=r"own\.yaml: not UTF-8 text"):
        load_settings(file)


def test_a_long_value_is_shortened_in_the_message(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(f"method: [{'x, ' * 10_000}]\n", encoding="utf-8")

    with pytest.raises(SettingsError, match=r"`method`: .*\['x', 'x'.*\.\.\.$") as caught:
        load_settings(file)
    assert len(str(caught.value)) < 300


def test_every_fault_of_a_file_is_listed() -> None:
    with pytest.raises(SettingsError, match=r"trials.*; .*lamda"):
        PipelineSettings.parse({"method": "dc", "lamda": 1, "trials": 0}, source="x.yaml")


def test_changes_are_checked_and_unset_options_leave_values_alone() -> None:
    settings = load_settings("cms_ap_p")

    changed = settings.changed(trials=5, seed=None, lambda_=0.0)

    assert (changed.trials, changed.seed, changed.lambda_) == (5, settings.seed, 0.0)
    assert changed.space == settings.space
    assert settings.trials == 20
    with pytest.raises(SettingsError, match=r"^--trials: `trials`"):
        settings.changed(source="--trials", trials=0)


def test_settings_are_frozen() -> None:
    settings = PipelineSettings(method="ts")
    with pytest.raises(ValidationError, match="frozen"):
        settings.trials = 3  # type: ignore[misc]
