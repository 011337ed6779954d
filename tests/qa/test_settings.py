"""Thresholds: the shipped file is the default, own files are checked, and it is no pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from segcal.errors import SettingsError
from segcal.qa import QaSettings, load_qa_settings
from segcal.settings import config_names, load_settings


def test_the_shipped_file_says_the_defaults() -> None:
    assert load_qa_settings() == QaSettings()
    text = (Path(__file__).resolve().parents[2] / "configs" / "qa.yaml").read_text(encoding="utf-8")
    assert {line.split(":")[0] for line in text.splitlines() if not line.startswith("#")} == set(
        QaSettings.model_fields
    ), "every threshold stands in the file"


def test_it_is_not_taken_for_a_pipeline() -> None:
    assert "qa" not in config_names()
    with pytest.raises(SettingsError, match="no settings named `qa`"):
        load_settings("qa")


def test_an_own_file_changes_what_it_names(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("min_expected_dsc: null\nmax_outlyingness: 5\n", encoding="utf-8")
    settings = load_qa_settings(file)
    assert settings == QaSettings(min_expected_dsc=None, max_outlyingness=5.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("min_expected_dcs: 0.5\n", "did you mean `min_expected_dsc`"),
        ("min_expected_dsc: 80\n", "`min_expected_dsc`"),
        ("max_volume_gap: -1\n", "`max_volume_gap`"),
        ("boundary_voxels: 0\n", "`boundary_voxels`"),
        ("max_pictures: true\n", "`max_pictures`"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load_qa_settings(file)
    assert said in str(caught.value)
