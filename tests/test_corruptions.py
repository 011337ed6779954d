"""The corruptions of SEG App. H: stated parameters, exact formulas, images that depend on nothing but their name."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner, Result

from segcal.corrupted_folder import RECORD_FILE, corrupt_folder, group_channels
from segcal.corruptions import (
    CORRUPTIONS,
    Corruption,
    Severity,
    blur,
    brightness,
    choose_corruption,
    corrupt,
    fog,
    jpeg,
    noise,
    parameters,
    random_words,
)
from segcal.errors import DataError, FileFormatError, ParameterError, UsageError
from segcal_cli.main import app

WORDS = random_words("some image", 0)
PINNED_CHOICE = ["noise", "brightness", "jpeg", "jpeg"]
PINNED_WORDS = (2503827923, 1237959505)
PINNED_NOISE = [0.5473565880670568, 0.4902367092581907, 0.4894811363143676]
SEVERITIES: tuple[Severity, ...] = ("mild", "strong")


def photo(seed: int = 0, shape: tuple[int, ...] = (24, 30, 3)) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def name_with(corruption: Corruption, seed: int = 0, prefix: str = "case") -> str:
    """A name that gets the wanted corruption."""
    return next(name for k in itertools.count() if choose_corruption(name := f"{prefix}{k}", seed) == corruption)


def save(path: Path, values: NDArray[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return path


def load(path: Path) -> NDArray[Any]:
    with Image.open(path) as image:
        return np.array(image)


# Parameters and choice


def test_parameters_are_those_of_table_6() -> None:
    table = {name: tuple(parameters(name, severity) for severity in SEVERITIES) for name in CORRUPTIONS}
    assert table == {
        "noise": ("sigma=0.03", "sigma=0.1"),
        "blur": ("k=5 sigma=1", "k=13 sigma=3"),
        "brightness": ("factor=1.2", "factor=1.8"),
        "jpeg": ("quality=60", "quality=10"),
        "fog": ("alpha=0.1", "alpha=0.5"),
    }


def test_corrupt_uses_the_parameters_it_states() -> None:
    image = photo(1)
    expected = {
        ("noise", "mild"): noise(image, 0.03, WORDS),
        ("noise", "strong"): noise(image, 0.10, WORDS),
        ("blur", "mild"): blur(image, 5, 1.0),
        ("blur", "strong"): blur(image, 13, 3.0),
        ("brightness", "mild"): brightness(image, 1.2),
        ("brightness", "strong"): brightness(image, 1.8),
        ("jpeg", "mild"): jpeg(image, 60),
        ("jpeg", "strong"): jpeg(image, 10),
        ("fog", "mild"): fog(image, 0.1, WORDS),
        ("fog", "strong"): fog(image, 0.5, WORDS),
    }
    for name, severity in itertools.product(CORRUPTIONS, SEVERITIES):
        np.testing.assert_array_equal(corrupt(image, name, severity, WORDS), expected[name, severity])


def test_all_five_are_chosen_about_equally_often_and_another_seed_chooses_anew() -> None:
    names = [f"frankfurt_{k:06d}_leftImg8bit" for k in range(5000)]
    first = [choose_corruption(name, 0) for name in names]
    counts = Counter(first)
    # Standard deviation of a count: sqrt(5000 * 0.2 * 0.8) = 28.
    assert set(counts) == set(CORRUPTIONS)
    assert all(abs(count - 1000) < 4 * 28.3 for count in counts.values())
    same = sum(a == choose_corruption(name, 1) for a, name in zip(first, names, strict=True))
    assert abs(same - 1000) < 4 * 28.3


def test_the_choice_is_fixed_for_all_versions_to_come() -> None:
    """Published corrupted test sets must be reproducible: these values may never change."""
    assert [choose_corruption(name, 0) for name in ("a", "b", "c", "case_001")] == PINNED_CHOICE
    assert random_words("a", 0)[:2] == PINNED_WORDS
    grey = np.full((1, 3), 0.5)
    np.testing.assert_allclose(noise(grey, 0.1, random_words("a", 0))[0], PINNED_NOISE, rtol=1e-12)


# What every corruption keeps


@given(
    hnp.arrays(
        st.sampled_from([np.dtype(np.uint8), np.dtype(np.uint16)]),
        st.one_of(
            st.tuples(st.integers(1, 9), st.integers(1, 9)),
            st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)),
        ),
    ),
    st.sampled_from(CORRUPTIONS),
    st.sampled_from(SEVERITIES),
)
def test_shape_and_type_stay_and_the_input_is_not_touched(
    image: NDArray[Any], corruption: Corruption, severity: Severity
) -> None:
    before = image.copy()
    result = corrupt(image, corruption, severity, WORDS)
    assert (result.shape, result.dtype) == (image.shape, image.dtype)
    np.testing.assert_array_equal(image, before)
    np.testing.assert_array_equal(result, corrupt(image, corruption, severity, WORDS))


@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floating_point_images_run_from_0_to_1_and_agree_with_8_bit(corruption: Corruption, dtype: type) -> None:
    image = photo(2)
    as_float = corrupt((image / 255).astype(dtype), corruption, "strong", WORDS)
    assert as_float.dtype == dtype
    assert as_float.min() >= 0
    assert as_float.max() <= 1
    assert np.abs(as_float * 255 - corrupt(image, corruption, "strong", WORDS)).max() <= 0.5 + 1e-4


@pytest.mark.parametrize("bad", [np.full((2, 2), 1.5), np.full((2, 2), -0.1), np.full((2, 2), np.nan)])
def test_values_beyond_0_and_1_are_refused(bad: NDArray[np.float64]) -> None:
    with pytest.raises(ParameterError, match="from 0 \\(black\\) to 1 \\(white\\)"):
        brightness(bad, 1.2)


@pytest.mark.parametrize("bad", [np.zeros((2, 2), dtype=np.int64), np.zeros((2, 2), dtype=bool)])
def test_other_types_are_refused(bad: NDArray[Any]) -> None:
    with pytest.raises(ParameterError, match=f"got {bad.dtype}"):
        blur(bad, 5, 1.0)


def test_volumes_are_no_images() -> None:
    with pytest.raises(ParameterError, match="an image is"):
        brightness(np.zeros((2, 2, 2, 3)), 1.2)


# Each corruption against its formula


@pytest.mark.parametrize("sigma", [0.03, 0.10])
def test_noise_is_normal_with_the_stated_sigma_and_independent_between_channels(sigma: float) -> None:
    image = np.full((300, 300, 3), 0.5)
    added = noise(image, sigma, WORDS) - image
    n = added.size
    assert abs(added.mean()) < 4 * sigma / math.sqrt(n)
    assert added.std() == pytest.approx(sigma, rel=4 / math.sqrt(2 * n))
    assert (np.abs(added) > 1.96 * sigma).mean() == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / n))
    pairs = np.corrcoef(added.reshape(-1, 3).T)
    assert np.abs(pairs - np.eye(3)).max() < 4 / math.sqrt(n / 3)
    neighbours = np.corrcoef(added[:, :-1].ravel(), added[:, 1:].ravel())[0, 1]
    assert abs(neighbours) < 4 / math.sqrt(n)


def test_two_images_get_different_noise() -> None:
    image = np.full((50, 50), 0.5)
    one, two = (noise(image, 0.1, random_words(name, 0)) for name in ("a", "b"))
    assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 4 / 50


@pytest.mark.parametrize(("size", "sigma"), [(5, 1.0), (13, 3.0)])
@pytest.mark.parametrize("shape", [(20, 17), (20, 17, 3), (4, 9)])
def test_blur_is_an_explicit_convolution(size: int, sigma: float, shape: tuple[int, ...]) -> None:
    image = np.random.default_rng(3).random(shape)
    half = size // 2
    window = np.array(
        [[math.exp(-(i * i + j * j) / (2 * sigma**2)) for j in range(-half, half + 1)] for i in range(-half, half + 1)]
    )
    window /= window.sum()

    def mirrored(position: int, length: int) -> int:
        period = 2 * (length - 1)
        position %= period
        return min(position, period - position)

    expected = np.zeros_like(image)
    for y, x in np.ndindex(*shape[:2]):
        for i, j in itertools.product(range(-half, half + 1), repeat=2):
            expected[y, x] += window[i + half, j + half] * image[mirrored(y + i, shape[0]), mirrored(x + j, shape[1])]
    np.testing.assert_allclose(blur(image, size, sigma), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "sigma"), [(4, 1.0), (0, 1.0), (5, 0.0)])
def test_blur_refuses_kernels_without_a_middle(size: int, sigma: float) -> None:
    with pytest.raises(ParameterError, match="odd kernel size"):
        blur(photo(), size, sigma)


def test_brightness_multiplies_and_clips_at_white() -> None:
    image = np.array([[0, 10, 100, 141, 142, 200, 255]], dtype=np.uint8)
    np.testing.assert_array_equal(brightness(image, 1.8), [[0, 18, 180, 254, 255, 255, 255]])
    np.testing.assert_array_equal(brightness(image, 1.2), [[0, 12, 120, 169, 170, 240, 255]])


def test_jpeg_loses_more_at_lower_quality_and_is_what_a_file_would_be(tmp_path: Path) -> None:
    y, x = np.mgrid[0:64, 0:80]
    smooth = np.stack([127 + 100 * np.sin(x / 9 + k) * np.cos(y / 7) for k in range(3)], axis=2)
    image = np.rint(smooth).astype(np.uint8)
    errors = {quality: np.abs(jpeg(image, quality).astype(float) - image).mean() for quality in (60, 10)}
    assert 0 < errors[60] < errors[10]
    for quality in errors:
        Image.fromarray(image).save(tmp_path / "x.jpg", quality=quality)
        np.testing.assert_array_equal(jpeg(image, quality), load(tmp_path / "x.jpg"))


def test_jpeg_of_other_than_three_channels_is_gray_by_gray() -> None:
    image = photo(4, (16, 16, 2))
    together = jpeg(image, 10)
    for channel in range(2):
        np.testing.assert_array_equal(together[:, :, channel], jpeg(image[:, :, channel], 10))


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_fog_is_the_stated_blend(alpha: float) -> None:
    height, width = 11, 14
    image = np.random.default_rng(5).random((height, width, 3))
    knots = np.random.RandomState(np.array(WORDS, dtype=np.uint32)).random_sample((4, 4))

    def between(length: int, position: int) -> tuple[int, float]:
        place = 3 * position / (length - 1)
        knot = min(int(place), 2)
        t = place - knot
        return knot, 3 * t**2 - 2 * t**3

    expected = np.empty_like(image)
    for y, x in np.ndindex(height, width):
        (i, sy), (j, sx) = between(height, y), between(width, x)
        upper = (1 - sx) * knots[i, j] + sx * knots[i, j + 1]
        lower = (1 - sx) * knots[i + 1, j] + sx * knots[i + 1, j + 1]
        haze = 0.8 + 0.2 * ((1 - sy) * upper + sy * lower)
        expected[y, x] = (1 - alpha) * image[y, x] + alpha * haze
    np.testing.assert_allclose(fog(image, alpha, WORDS), expected, rtol=0, atol=1e-12)


def test_fog_brightens_the_dark_and_fades_contrast() -> None:
    image = np.zeros((40, 40))
    image[:, 20:] = 1.0
    foggy = fog(image, 0.5, WORDS)
    assert foggy[:, :20].min() >= 0.5 * 0.8
    assert np.ptp(foggy) < 0.61
    # Smooth: neighbours inside one half hardly differ.
    assert np.abs(np.diff(foggy[:, :20], axis=0)).max() < 0.02


# Folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for k in range(6):
        save(tmp_path / "images" / f"scene{k}.png", photo(k))
    return tmp_path / "images"


def record(out: Path) -> dict[str, dict[str, str]]:
    with (out / RECORD_FILE).open(newline="", encoding="utf-8") as file:
        return {row["file"]: row for row in csv.DictReader(file)}


def test_every_image_keeps_its_name_and_the_record_says_what_was_done(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    corrupt_folder(folder, out, severity="strong", seed=3)
    rows = record(out)
    assert {path.name for path in out.iterdir()} == {*(path.name for path in folder.iterdir()), RECORD_FILE}
    assert list(rows) == sorted(rows)
    for name, row in rows.items():
        image = Path(name).stem
        corruption = choose_corruption(image, 3)
        assert row == {
            "file": name,
            "image": image,
            "corruption": corruption,
            "parameters": parameters(corruption, "strong"),
            "severity": "strong",
            "seed": "3",
        }
        with Image.open(out / name) as written:
            assert written.format == "PNG"
        expected = corrupt(load(folder / name), corruption, "strong", random_words(image, 3))
        np.testing.assert_array_equal(load(out / name), expected)


def test_an_image_is_the_same_bytes_whatever_lies_beside_it(folder: Path, tmp_path: Path) -> None:
    corrupt_folder(folder, tmp_path / "all", severity="mild")
    corrupt_folder(folder, tmp_path / "again", severity="mild")
    for path in sorted(folder.iterdir()):
        alone = tmp_path / f"alone_{path.stem}"
        save(alone / path.name, load(path))
        corrupt_folder(alone, tmp_path / f"out_{path.stem}", severity="mild")
        written = (tmp_path / "all" / path.name).read_bytes()
        assert (tmp_path / "again" / path.name).read_bytes() == written
        assert (tmp_path / f"out_{path.stem}" / path.name).read_bytes() == written


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_colours_split_into_channel_files_get_what_the_colour_image_gets(
    corruption: Corruption, tmp_path: Path
) -> None:
    name, image = name_with(corruption), photo(7)
    save(tmp_path / "one" / f"{name}_0000.png", image)
    for channel in range(3):
        save(tmp_path / "split" / f"{name}_{channel:04d}.png", image[:, :, channel])
    corrupt_folder(tmp_path / "one", tmp_path / "one_out", severity="strong")
    corrupt_folder(tmp_path / "split", tmp_path / "split_out", severity="strong")

    whole = load(tmp_path / "one_out" / f"{name}_0000.png")
    assert (whole != image).any()
    for channel in range(3):
        np.testing.assert_array_equal(load(tmp_path / "split_out" / f"{name}_{channel:04d}.png"), whole[:, :, channel])
    assert {row["corruption"] for row in record(tmp_path / "split_out").values()} == {corruption}


def names(*stems: str) -> dict[str, Path]:
    return {stem: Path("images") / f"{stem}.png" for stem in stems}


def test_channel_numbers_are_recognised_and_other_numbers_are_not() -> None:
    split = group_channels(names("a_0000", "a_0001", "b_0000", "b_0001"), channels=None)
    assert {name: [path.stem for path in paths] for name, paths in split.items()} == {
        "a": ["a_0000", "a_0001"],
        "b": ["b_0000", "b_0001"],
    }
    assert set(group_channels(names("scan_2019", "scan_2020"), channels=None)) == {"scan_2019", "scan_2020"}
    frames = names(*(f"film_{k:04d}" for k in range(9)))
    assert set(group_channels(frames, channels=False)) == set(frames)
    assert set(group_channels(frames, channels=True)) == {"film"}


@pytest.mark.parametrize(
    ("stems", "message"),
    [
        ([f"film_{k:04d}" for k in range(9)], "film has 9 numbered files"),
        (["a_0000", "b"], "b.png does not"),
        (["a_0000", "a_0001", "b_0000"], "b has the channels 0000"),
        (["a_0000", "a_0002"], "a has the channels 0000, 0002"),
    ],
)
def test_doubtful_numbers_are_asked_about(stems: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        group_channels(names(*stems), channels=None)
    assert "--no-channels" in str(caught.value)


def test_channels_of_different_size_are_an_error(tmp_path: Path) -> None:
    save(tmp_path / "in" / "a_0000.png", photo(0, (8, 8)))
    save(tmp_path / "in" / "a_0001.png", photo(1, (8, 9)))
    with pytest.raises(DataError, match=r"a_0001\.png: \(8, 9\) uint8, but a_0000\.png"):
        corrupt_folder(tmp_path / "in", tmp_path / "out", severity="mild")


def test_sixteen_bit_gray_and_transparency_survive(tmp_path: Path) -> None:
    deep = np.random.default_rng(0).integers(0, 65536, (8, 8), dtype=np.uint16)
    clear = photo(1, (8, 8, 4))
    dark, bright = name_with("brightness", prefix="deep"), name_with("brightness", prefix="clear")
    save(tmp_path / "in" / f"{dark}.png", deep)
    save(tmp_path / "in" / f"{bright}.png", clear)
    corrupt_folder(tmp_path / "in", tmp_path / "out", severity="strong")
    np.testing.assert_array_equal(load(tmp_path / "out" / f"{dark}.png"), brightness(deep, 1.8))
    changed = load(tmp_path / "out" / f"{bright}.png")
    np.testing.assert_array_equal(changed[:, :, :3], brightness(clear[:, :, :3], 1.8))
    np.testing.assert_array_equal(changed[:, :, 3], clear[:, :, 3])


def test_a_palette_becomes_the_colours_it_stands_for(tmp_path: Path) -> None:
    name = name_with("brightness")
    indexed = Image.fromarray(photo(2, (8, 8))).convert("P")
    indexed.putpalette([value for k in range(256) for value in (k, 255 - k, 7)])
    (tmp_path / "in").mkdir()
    indexed.save(tmp_path / "in" / f"{name}.png")
    corrupt_folder(tmp_path / "in", tmp_path / "out", severity="mild")
    expected = brightness(np.array(indexed.convert("RGB")), 1.2)
    np.testing.assert_array_equal(load(tmp_path / "out" / f"{name}.png"), expected)


def test_volumes_stacks_and_lossy_files_are_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    nib.save(nib.Nifti1Image(np.zeros((4, 4, 4), dtype=np.uint8), np.eye(4)), folder / "brain.nii.gz")
    with pytest.raises(DataError, match=r"brain\.nii\.gz: is a volume.*2-D images"):
        corrupt_folder(folder, out, severity="mild")
    (folder / "brain.nii.gz").unlink()
    save(folder / "photo.jpg", photo())
    with pytest.raises(DataError, match=r"photo\.jpg: is a JPEG.*convert it to PNG"):
        corrupt_folder(folder, out, severity="mild")
    assert not out.exists()


def test_a_stack_of_pages_is_a_volume(tmp_path: Path) -> None:
    pages = [Image.fromarray(photo(k, (8, 8))) for k in range(3)]
    pages[0].save(tmp_path / "stack.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(DataError, match=r"stack\.tif: holds 3 pages or frames, a volume"):
        corrupt_folder(tmp_path, tmp_path / "out", severity="mild")


def test_broken_files_and_colours_pillow_would_flatten_are_errors(tmp_path: Path) -> None:
    path = save(tmp_path / "in" / "a.png", photo())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(FileFormatError, match=r"a\.png: not a readable image"):
        corrupt_folder(tmp_path / "in", tmp_path / "out", severity="mild")
    path.write_bytes(content[:24] + b"\x10" + content[25:])
    with pytest.raises(DataError, match=r"a\.png: 16 bits a colour"):
        corrupt_folder(tmp_path / "in", tmp_path / "out", severity="mild")
    assert not (tmp_path / "out" / RECORD_FILE).exists()


def test_neither_the_images_themselves_nor_an_earlier_run_are_overwritten(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the folder of the images themselves"):
        corrupt_folder(folder, folder / ".." / "images", severity="mild")
    corrupt_folder(folder, tmp_path / "out", severity="mild")
    with pytest.raises(UsageError, match="holds corrupted images already"):
        corrupt_folder(folder, tmp_path / "out", severity="strong")


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "city").mkdir()
    with pytest.raises(DataError, match=r"holds no image.*subfolders are not searched"):
        corrupt_folder(tmp_path, tmp_path / "out", severity="mild")


# The command


def segcal(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_writes_the_images_and_counts_what_it_did(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = segcal("corrupt", folder, "--severity", "strong", "--seed", 3, "--out", out)
    assert result.exit_code == 0, result.output
    assert f"6 images in 6 files written to {out}" in result.stdout
    counts = Counter(row["corruption"] for row in record(out).values())
    shown = {line.split()[0]: int(line.split()[-1]) for line in result.stdout.splitlines()[1:-1]}
    assert shown == counts

    again = json.loads(segcal("corrupt", folder, "--severity", "strong", "--out", tmp_path / "b", "--json").stdout)
    assert sum(again["counts"].values()) == len(again["files"]) == 6


def test_the_command_asks_for_a_severity_and_names_volumes(folder: Path, tmp_path: Path) -> None:
    assert segcal("corrupt", folder, "--out", tmp_path / "out").exit_code == 2
    nib.save(nib.Nifti1Image(np.zeros((4, 4, 4), dtype=np.uint8), np.eye(4)), folder / "brain.nii.gz")
    result = segcal("corrupt", folder, "--severity", "mild", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "is a volume" in result.stderr
