"""The corruptions of SEG App. H: five photometric shifts of 2-D images that leave every label where it is.

An image is (y, x) or (y, x, channel), uint8, uint16, or float32 / float64 with values 0 to 1. All functions compute in
float64 on values 0 to 1, clip the result to 0 to 1 and give it back in the type of the input, integers rounded. They
are pure: what is random is a function of the words handed in, the same with every version of numpy.

Which corruption an image gets is a hash of its name and a seed, without its severity: at both severities an image is
shifted the same way, by the same noise or haze, only more or less.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import correlate1d

from segcal.errors import ParameterError

Pixels: TypeAlias = NDArray[Any]
Corruption: TypeAlias = Literal["noise", "blur", "brightness", "jpeg", "fog"]
Severity: TypeAlias = Literal["mild", "strong"]

CORRUPTIONS: tuple[Corruption, ...] = get_args(Corruption)
HAZE_DARKEST = 0.8
"""The haze lies between this and white."""
HAZE_KNOTS = 4
"""Knots of the haze along each side of the image: clouds a third of the image wide."""
_JPEG_LONGEST_SIDE = 65_500


@dataclass(frozen=True, slots=True)
class Strength:
    """The parameters of one severity."""

    noise_sigma: float
    blur_size: int
    blur_sigma: float
    brightness_factor: float
    jpeg_quality: int
    fog_alpha: float


STRENGTHS: dict[Severity, Strength] = {
    "mild": Strength(0.03, 5, 1.0, 1.2, 60, 0.1),
    "strong": Strength(0.10, 13, 3.0, 1.8, 10, 0.5),
}
"""SEG Table 6."""


def choose_corruption(name: str, seed: int) -> Corruption:
    """Which corruption the image `name` gets: each of the five for one name in five, whatever else there is."""
    return CORRUPTIONS[int.from_bytes(_digest("corruption", name, seed)[:8], "big") % len(CORRUPTIONS)]


def random_words(name: str, seed: int) -> tuple[int, ...]:
    """Eight 32-bit numbers that start the random numbers of the image `name`."""
    return tuple(int(word) for word in np.frombuffer(_digest("values", name, seed), dtype=">u4"))


def corrupt(image: Pixels, corruption: Corruption, severity: Severity, words: Sequence[int]) -> Pixels:
    """One corruption at one severity; `words` (from `random_words`) matter for noise and fog only."""
    strength = STRENGTHS[severity]
    match corruption:
        case "noise":
            return noise(image, strength.noise_sigma, words)
        case "blur":
            return blur(image, strength.blur_size, strength.blur_sigma)
        case "brightness":
            return brightness(image, strength.brightness_factor)
        case "jpeg":
            return jpeg(image, strength.jpeg_quality)
        case "fog":
            return fog(image, strength.fog_alpha, words)


def parameters(corruption: Corruption, severity: Severity) -> str:
    """The parameters `corrupt` uses, in words: `k=5 sigma=1`."""
    strength = STRENGTHS[severity]
    return {
        "noise": f"sigma={strength.noise_sigma:g}",
        "blur": f"k={strength.blur_size} sigma={strength.blur_sigma:g}",
        "brightness": f"factor={strength.brightness_factor:g}",
        "jpeg": f"quality={strength.jpeg_quality}",
        "fog": f"alpha={strength.fog_alpha:g}",
    }[corruption]


def noise(image: Pixels, sigma: float, words: Sequence[int]) -> Pixels:
    """x + sigma n with n standard normal, independent for every pixel and channel."""
    values = _unit_values(image)
    return _like(image, values + sigma * _generator(words).standard_normal(values.shape))


def blur(image: Pixels, size: int, sigma: float) -> Pixels:
    """Convolution with a Gaussian cut to `size` x `size` pixels and normalised to sum 1.

    Pixels beyond the border are mirrored at the outermost pixel, which is not repeated (d c b | a b c d).
    """
    if size < 1 or size % 2 == 0 or sigma <= 0:
        raise ParameterError(f"blur: needs an odd kernel size and a sigma above 0, got {size} and {sigma}")
    offsets = np.arange(size) - size // 2
    weights = np.exp(-(offsets**2) / (2 * sigma**2))
    weights /= weights.sum()
    values = _unit_values(image)
    for axis in (0, 1):
        values = correlate1d(values, weights, axis=axis, mode="mirror")
    return _like(image, values)


def brightness(image: Pixels, factor: float) -> Pixels:
    """factor x, clipped at white."""
    return _like(image, factor * _unit_values(image))


def jpeg(image: Pixels, quality: int) -> Pixels:
    """The image after JPEG compression of the given quality (libjpeg's scale), 8 bit a channel.

    Three channels are red, green and blue, with colour at half resolution (4:2:0) as most encoders store it; any
    other number of channels is compressed channel by channel as gray.
    """
    values = _unit_values(image)
    if max(values.shape[:2]) > _JPEG_LONGEST_SIDE:
        raise ParameterError(f"jpeg: {values.shape[0]} x {values.shape[1]} pixels are more than a JPEG can hold")
    eight_bit = np.rint(255 * values).astype(np.uint8)
    if eight_bit.ndim == 2 or eight_bit.shape[2] == 3:
        return _like(image, _through_jpeg(eight_bit, quality) / 255)
    channels = [_through_jpeg(eight_bit[:, :, channel], quality) for channel in range(eight_bit.shape[2])]
    return _like(image, np.stack(channels, axis=2) / 255)


def fog(image: Pixels, alpha: float, words: Sequence[int]) -> Pixels:
    """(1 - alpha) x + alpha h, with a bright gray haze h that changes smoothly over the image.

    SEG gives alpha only; the haze is ours: h = 0.8 + 0.2 u, the same for all channels. u has uniform random values
    in [0, 1) at 4 x 4 knots spread evenly from corner to corner; between two neighbouring knots it goes from one to
    the other as s = 3 t^2 - 2 t^3, t being the relative distance, along y and along x.
    """
    values = _unit_values(image)
    knots = _generator(words).random_sample((HAZE_KNOTS, HAZE_KNOTS))
    height, width = values.shape[:2]
    u = _knot_weights(height) @ knots @ _knot_weights(width).T
    haze = HAZE_DARKEST + (1 - HAZE_DARKEST) * u
    if values.ndim == 3:
        haze = haze[:, :, np.newaxis]
    return _like(image, (1 - alpha) * values + alpha * haze)


def _digest(purpose: str, name: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}/{purpose}/{name}".encode()).digest()


def _generator(words: Sequence[int]) -> np.random.RandomState:
    # The old generator because numpy has promised never to change what it draws; the new one may.
    return np.random.RandomState(np.array(words, dtype=np.uint32))


def _knot_weights(length: int) -> NDArray[np.float64]:
    """(length, knots): how much each pixel takes from each knot."""
    position = np.linspace(0, HAZE_KNOTS - 1, length)
    before = np.minimum(position.astype(np.intp), HAZE_KNOTS - 2)
    t = position - before
    smooth = t * t * (3 - 2 * t)
    weights = np.zeros((length, HAZE_KNOTS))
    pixels = np.arange(length)
    weights[pixels, before] = 1 - smooth
    weights[pixels, before + 1] = smooth
    return weights


def _through_jpeg(eight_bit: NDArray[np.uint8], quality: int) -> NDArray[np.uint8]:
    buffer = io.BytesIO()
    Image.fromarray(eight_bit).save(buffer, format="JPEG", quality=quality, subsampling="4:2:0")
    buffer.seek(0)
    with Image.open(buffer, formats=["JPEG"]) as image:
        return np.array(image)


def _unit_values(image: Pixels) -> NDArray[np.float64]:
    """The image as float64 from 0 (black) to 1 (white)."""
    if image.ndim not in (2, 3) or image.size == 0:
        raise ParameterError(f"an image is (y, x) or (y, x, channel) with at least one pixel, got {image.shape}")
    if image.dtype in (np.uint8, np.uint16):
        return image / float(np.iinfo(image.dtype).max)
    if image.dtype not in (np.float32, np.float64):
        raise ParameterError(f"images are uint8, uint16, float32 or float64, got {image.dtype}")
    if not (image.min() >= 0 and image.max() <= 1):
        raise ParameterError(
            f"floating-point images run from 0 (black) to 1 (white), got {image.min():g} to {image.max():g}; "
            "scale it, or save it as 8 or 16 bit"
        )
    return image.astype(np.float64)


def _like(image: Pixels, values: NDArray[np.float64]) -> Pixels:
    """Values clipped to what an image can hold, in the type of `image`."""
    clipped = np.clip(values, 0.0, 1.0)
    if image.dtype.kind == "u":
        clipped = np.rint(clipped * np.iinfo(image.dtype).max)
    return clipped.astype(image.dtype)
