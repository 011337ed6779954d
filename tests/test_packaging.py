"""The wheel is complete: installed elsewhere, without the checkout, the command and its settings work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import segcal
from segcal.settings import config_names, load_settings

ROOT = Path(__file__).resolve().parents[1]
FOLDER_OF = {"segcal": "segcal", "segcal_cli": "cli", "segcal_configs": "configs"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def shipped_files() -> set[str]:
    """Every file of the three packages, under the name it has once installed."""
    return {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in FOLDER_OF.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources: building in place would leave `build/` in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in FOLDER_OF.values():
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the programs of an environment that holds the wheel.

    The libraries come from the environment of the tests through a .pth file: nothing is downloaded, and since Python
    reads no .pth files inside such a folder, the editable install there stays invisible.
    """
    environment = tmp_path_factory.mktemp("elsewhere")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False, env=clean_environment())
    assert installed.returncode == 0, installed.stderr
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    here = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (packages / "libraries.pth").write_text("\n".join(here), encoding="utf-8")
    return python.parent


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(folder: Path, *command: str) -> str:
    """Run a program of the other environment from a folder that has nothing to do with the checkout."""
    done = subprocess.run(
        [str(folder / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder.parent,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_list_of_packages_is_the_tree() -> None:
    folders = {
        ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
        for package, folder in FOLDER_OF.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)
    for package, folder in FOLDER_OF.items():
        missing = [
            str(path)
            for path in {p.parent for p in (ROOT / folder).rglob("*.py")}
            if not (path / "__init__.py").exists()
        ]
        assert not missing, f"{package}: folders without __init__.py: {missing}"


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == shipped_files()


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = f"segcal-{segcal.__version__}.dist-info"
    metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert metadata["Version"] == segcal.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == {"dask", "dev", "nnunet", "service"}
    assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_the_installed_command_works_in_another_folder(elsewhere: Path) -> None:
    assert run(elsewhere, "segcal", "--version") == f"segcal {segcal.__version__}\n"
    shown = run(elsewhere, "segcal", "fit", "--help")
    assert "Usage: segcal fit" in shown
    assert "Example:" in shown


def test_the_installed_settings_are_found_and_are_not_those_of_the_checkout(elsewhere: Path) -> None:
    script = (
        "import segcal, segcal_cli, segcal_configs\n"
        "from segcal.settings import config_names, load_settings\n"
        "print(*(module.__file__ for module in (segcal, segcal_cli, segcal_configs)))\n"
        "print(*(load_settings(name).name for name in config_names()))"
    )
    places, names = run(elsewhere, "python", "-c", script).splitlines()
    assert all(Path(place).is_relative_to(elsewhere.parent) for place in places.split())
    assert names.split() == [load_settings(name).name for name in config_names()]
