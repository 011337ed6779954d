"""What a run may write lies where its leftovers are looked for."""

from __future__ import annotations

from pathlib import PurePosixPath

from segcal.applying.possible_files import possible_files
from segcal.applying.record import SUBFOLDERS


def test_every_file_of_a_case_lies_in_the_folder_of_the_run_or_a_subfolder_of_its_own() -> None:
    folders = {str(PurePosixPath(name).parent) for name in possible_files("case")}
    assert folders == {".", *SUBFOLDERS}
