"""The streaming video writer: read back with PyAV."""

import av
import numpy as np
import pytest

from alpagym_runtime.errors import ConfigError
from alpagym_runtime.video import VideoWriter


def shades(count, height=32, width=48):
    for k in range(count):
        yield np.full((height, width, 3), 20 + 20 * k, np.uint8)


@pytest.mark.parametrize("name", ["drive.mp4", "drive.mkv", "drive.webm"])
def test_what_is_written_is_read_back(tmp_path, name):
    with VideoWriter(tmp_path / name, 10.0) as video:
        for frame in shades(6):
            video.write(frame)
    with av.open(str(tmp_path / name)) as file:
        assert file.streams.video[0].average_rate == 10
        read = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    assert len(read) == 6
    for k, frame in enumerate(read):
        assert frame.shape == (32, 48, 3)
        assert abs(float(frame.mean()) - (20 + 20 * k)) < 4.0


def test_animated_webp_is_written(tmp_path):
    with VideoWriter(tmp_path / "drive.webp", 5) as video:
        for frame in shades(3):
            video.write(frame)
    data = (tmp_path / "drive.webp").read_bytes()
    assert data[:4] == b"RIFF"
    assert data[8:12] == b"WEBP"
    assert data.count(b"ANMF") == 3


def test_odd_sizes_keep_their_pixels(tmp_path):
    # 31 x 47 is stored as 32 x 48.
    with VideoWriter(tmp_path / "odd.mp4", 10) as video:
        video.write(np.full((31, 47, 3), 90, np.uint8))
    with av.open(str(tmp_path / "odd.mp4")) as file:
        assert next(file.decode(video=0)).to_ndarray(format="rgb24").shape == (32, 48, 3)


def test_the_same_pictures_give_the_same_bytes(tmp_path):
    for name in ("a.mp4", "b.mp4"):
        with VideoWriter(tmp_path / name, 10) as video:
            for frame in shades(5):
                video.write(frame)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


@pytest.mark.parametrize("pictures", [0, 2])
def test_an_error_inside_the_block_leaves_no_file(tmp_path, pictures):
    def interrupted():
        with VideoWriter(tmp_path / "drive.mp4", 10) as video:
            for frame in shades(pictures):
                video.write(frame)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_an_older_video_stays_when_a_new_one_fails(tmp_path):
    (tmp_path / "drive.mp4").write_bytes(b"older")
    with pytest.raises(ValueError, match="no picture"), VideoWriter(tmp_path / "drive.mp4", 10):
        pass
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("drive.mp4", b"older")]


def test_another_shape_is_refused(tmp_path):
    with VideoWriter(tmp_path / "drive.mp4", 10) as video:
        video.write(np.zeros((32, 48, 3), np.uint8))
        with pytest.raises(ValueError, match=r"\(16, 48\) in a video of \(32, 48\)"):
            video.write(np.zeros((16, 48, 3), np.uint8))
    with pytest.raises(ValueError, match="float64"), VideoWriter(tmp_path / "drive.mp4", 10) as video:
        video.write(np.zeros((32, 48, 3)))


@pytest.mark.parametrize(
    ("name", "rate", "codec", "says"),
    [("a.gif", 5, None, "endings"), ("a.webm", 5, "h264", "vp9"), ("a.mp4", 0, None, "fps")],
)
def test_wrong_arguments_are_named(tmp_path, name, rate, codec, says):
    with pytest.raises(ConfigError, match=says):
        VideoWriter(tmp_path / name, rate, codec)
