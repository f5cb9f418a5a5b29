"""Files and pixels of our coder are simplejpeg's, bit for bit."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import simplejpeg

from alpagym_runtime.simulators.embedded.rendering.jpeg import LANES, QUALITY, ZIGZAG, Coder

pytestmark = pytest.mark.timeout(300)  # the first test may have to compile the coder

# One unit; less, as many and more blocks a row than lie beside each other; the benchmark's.
SIZES = ((16, 16), (48, 96), (32, 16 * LANES), (96, 160), (16, 8 * LANES + 16), (320, 512))


def theirs(picture):
    file = simplejpeg.encode_jpeg(picture, QUALITY, "RGB", "420")
    return file, simplejpeg.decode_jpeg(file, "RGB")


def pictures(height, width):
    """From flat to the most that a file can be asked for."""
    rng = np.random.default_rng(height * width)
    noise = rng.integers(0, 256, (height, width, 3)).astype(np.uint8)
    yield np.zeros_like(noise)
    yield np.full_like(noise, 255)
    yield noise
    yield np.where(noise > 127, 255, 0).astype(np.uint8)
    for sigma in (0.7, 1.5, 4.0):
        yield cv2.GaussianBlur(noise, (0, 0), sigma)
    # Colours at the corners of the cube, in stripes of one, two, … pixels.
    for wide in (1, 2, 5, 8, 16):
        stripes = (np.arange(width) // wide % 8)[:, None] >> np.arange(3) & 1
        yield np.ascontiguousarray(np.broadcast_to(255 * stripes, noise.shape), np.uint8)
    # Few waves far apart, so that runs of more than 16 zeros are coded.
    dots = np.full_like(noise, 128)
    dots[::7, ::11] += rng.integers(0, 12, dots[::7, ::11].shape).astype(np.uint8)
    yield dots


@pytest.mark.parametrize("size", SIZES)
def test_files_and_pixels_are_those_of_simplejpeg(size):
    coder = Coder(*size)
    assert coder.own
    for picture in pictures(*size):
        file, shown = theirs(picture)
        mine = np.array(picture)
        assert coder.code(mine) == file
        np.testing.assert_array_equal(mine, shown)


def test_what_a_coder_did_before_leaves_no_trace():
    coder, again = Coder(48, 96), Coder(48, 96)
    some = list(pictures(48, 96))
    for picture in some:
        coder.code(np.array(picture))
    assert coder.code(np.array(some[5])) == again.code(np.array(some[5]))


def test_other_sizes_are_left_to_simplejpeg():
    coder = Coder(24, 40)
    assert not coder.own
    picture = np.random.default_rng(0).integers(0, 256, (24, 40, 3)).astype(np.uint8)
    file, shown = theirs(picture)
    assert coder.code(picture) == file
    np.testing.assert_array_equal(picture, shown)


def test_the_order_of_a_file_begins_along_the_diagonals():
    # Right, down left, down, up right, up right, right, …
    assert ZIGZAG[:10].tolist() == [0, 1, 8, 16, 9, 2, 3, 10, 17, 24]
    assert ZIGZAG[-3:].tolist() == [55, 62, 63]
