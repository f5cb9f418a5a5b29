"""Camera models by hand, against OpenCV, and there and back."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpagym_runtime.cameras import (
    Ftheta,
    MountedCamera,
    OpenCVFisheye,
    OpenCVPinhole,
    Pinhole,
    inside,
    ray_grid,
    resized,
)
from alpagym_runtime.geometry import Pose
from alpagym_runtime.simulators.alpasim.calibration import read_camera, write_camera
from alpagym_runtime.simulators.alpasim.wire import sensorsim_pb2

FORWARD = np.array([0.5, -0.5, 0.5, -0.5])  # the optical frame of a camera that looks along the rig's x
PINHOLE = Pinhole(1920, 1080, 960.0, 540.0, focal_x=1000.0, focal_y=1000.0)
# A 120° wide camera of 1920 x 1080: about 917 px a radian, bending inwards at the edge.
WIDE = (0.0, 917.0, 3.0, -35.0, 4.0)


def test_a_point_on_the_ground_ahead():
    # 10 m ahead, 1.5 m below the camera: 1000 * 1.5 / 10 = 150 px below the centre.
    camera = MountedCamera("front", PINHOLE, Pose(np.array([0.0, 0.0, 1.5]), FORWARD))
    pixel, valid = camera.project_rig([10.0, 0.0, 0.0])
    np.testing.assert_allclose(pixel, (960.0, 690.0), atol=1e-9)
    assert valid
    # 1 m to the left is 100 px to the left.
    np.testing.assert_allclose(camera.project_rig([10.0, 1.0, 0.0])[0], (860.0, 690.0), atol=1e-9)


@pytest.mark.parametrize("camera", [PINHOLE, OpenCVPinhole(8, 8, 4.0, 4.0, focal_x=5.0, focal_y=5.0)])
def test_a_point_behind_is_not_drawn(camera):
    assert not camera.project([0.1, 0.1, -5.0])[1]
    assert not camera.project([0.1, 0.1, 0.0])[1]


def test_resizing_multiplies_pixels():
    small = resized(PINHOLE, 270, 480)
    point = np.array([1.0, 0.5, 10.0])
    np.testing.assert_allclose(small.project(point)[0], PINHOLE.project(point)[0] / 4.0)
    assert (small.width, small.height) == (480, 270)
    assert inside(small, [479.9, 269.9])
    assert not inside(small, [480.0, 100.0])


def test_the_grid_of_rays_looks_where_the_camera_looks():
    camera = MountedCamera("front", PINHOLE, Pose(np.array([1.5, 0.0, 1.2]), FORWARD))
    rays, valid = ray_grid(camera)
    assert rays.shape == (9, 16, 3)
    assert valid.all()
    # Cell (4, 0): its centre is (60, 540) px, so y = (60 - 960) / 1000 = -0.9 to the left, level.
    np.testing.assert_allclose(rays[4, 0], np.array([1.0, 0.9, 0.0]) / np.hypot(1.0, 0.9), atol=1e-6)
    # Cell (0, 15): (1860, 60) px, 0.9 to the right and 0.48 up.
    np.testing.assert_allclose(rays[0, 15], np.array([1.0, -0.9, 0.48]) / np.linalg.norm([1, 0.9, 0.48]), atol=1e-6)


def test_where_no_ray_is_the_grid_is_masked():
    narrow = Ftheta(1920, 1080, 960.0, 540.0, max_angle_rad=0.5, angle_to_radius=WIDE)
    rays, valid = ray_grid(MountedCamera("front", narrow, Pose(np.zeros(3), FORWARD)))
    # 0.5 rad are 455 px: the cell at (60, 540) px, 900 px from the axis, lies outside, the middle inside.
    assert not valid[4, 0]
    assert not rays[4, 0].any()
    assert valid[4, 7]


numbers = st.floats(-1.0, 1.0)
directions = st.tuples(numbers, numbers, st.floats(0.5, 1.5)).map(np.array)


@settings(deadline=None, max_examples=60)
@given(points=st.lists(directions, min_size=1, max_size=8).map(np.array))
def test_pinhole_there_and_back(points):
    check_round_trip(PINHOLE, points, must=True)


@settings(deadline=None, max_examples=60)
@given(
    points=st.lists(directions, min_size=1, max_size=8).map(np.array),
    radial=st.tuples(*[st.floats(-0.3, 0.3)] * 2, *[st.floats(-0.05, 0.05)] * 4),
    tangential=st.tuples(*[st.floats(-1e-3, 1e-3)] * 2),
    prism=st.tuples(*[st.floats(-1e-3, 1e-3)] * 4),
)
def test_opencv_pinhole_there_and_back(points, radial, tangential, prism):
    camera = OpenCVPinhole(
        1920, 1080, 955.0, 530.0, focal_x=1100.0, focal_y=1090.0, radial=radial, tangential=tangential, thin_prism=prism
    )
    check_round_trip(camera, points)


@settings(deadline=None, max_examples=60)
@given(
    points=st.lists(directions, min_size=1, max_size=8).map(np.array),
    radial=st.tuples(*[st.floats(-0.05, 0.05)] * 2, *[st.floats(-0.01, 0.01)] * 2),
)
def test_opencv_fisheye_there_and_back(points, radial):
    camera = OpenCVFisheye(1920, 1080, 955.0, 530.0, focal_x=600.0, focal_y=590.0, radial=radial, max_angle_rad=1.3)
    check_round_trip(camera, points)


@settings(deadline=None, max_examples=60)
@given(
    points=st.lists(directions, min_size=1, max_size=8).map(np.array),
    bend=st.tuples(st.floats(800, 1000), st.floats(-20, 20), st.floats(-60, 20), st.floats(-10, 10)),
    affine=st.tuples(st.floats(0.98, 1.02), st.floats(-0.01, 0.01), st.floats(-0.01, 0.01)),
)
def test_ftheta_there_and_back(points, bend, affine):
    forward = (0.0, *bend)
    camera = Ftheta(1920, 1080, 961.0, 545.0, max_angle_rad=1.3, angle_to_radius=forward, affine=affine)
    check_round_trip(camera, points)


@settings(deadline=None, max_examples=60)
@given(points=st.lists(directions, min_size=1, max_size=8).map(np.array))
def test_ftheta_with_an_exact_backward_polynomial_there_and_back(points):
    camera = Ftheta(
        1920, 1080, 961.0, 545.0, max_angle_rad=1.3, exact="radius_to_angle",
        radius_to_angle=(0.0, 1.1e-3, 0.0, 2e-11), angle_to_radius=WIDE,
    )  # fmt: skip
    check_round_trip(camera, points, must=True)


def check_round_trip(camera, points, must=False):
    pixels, valid = camera.project(points)
    if must:
        assert valid[np.arctan2(np.hypot(*points[:, :2].T), points[:, 2]) < 1.29].all()
    rays, back = camera.unproject(pixels)
    rays, points = rays[valid], points[valid]
    assert back[valid].all()
    np.testing.assert_allclose(rays, points / np.linalg.norm(points, axis=1, keepdims=True), atol=1e-7)
    np.testing.assert_allclose(np.linalg.norm(rays, axis=1), 1.0, atol=1e-12)
    again, _ = camera.project(3.0 * rays)
    np.testing.assert_allclose(again, pixels[valid], atol=1e-4)


def test_the_rational_model_is_opencvs():
    k, p, s = (-0.3, 0.1, 0.01, 0.02, -0.01, 0.003), (1e-3, -5e-4), (1e-3, 2e-4, -1e-3, 3e-4)
    camera = OpenCVPinhole(
        1920, 1080, 950.0, 540.0, focal_x=1000.0, focal_y=1010.0, radial=k, tangential=p, thin_prism=s
    )
    points = np.random.default_rng(0).uniform([-2, -1.5, 4], [2, 1.5, 6], (50, 3))
    matrix = np.array([[1000.0, 0, 950], [0, 1010, 540], [0, 0, 1]])
    expected, _ = cv2.projectPoints(points, np.zeros(3), np.zeros(3), matrix, np.array([k[0], k[1], *p, *k[2:], *s]))
    np.testing.assert_allclose(camera.project(points)[0], expected[:, 0], atol=1e-8)


def test_the_fisheye_model_is_opencvs():
    k = (0.03, -0.01, 0.002, -0.0005)
    camera = OpenCVFisheye(1920, 1080, 950.0, 540.0, focal_x=600.0, focal_y=610.0, radial=k)
    x, y = np.meshgrid(np.linspace(-2, 2, 9), np.linspace(-1, 1, 7))
    points = np.stack([x.ravel(), y.ravel(), np.ones(x.size)], -1)
    theta = np.arctan(np.hypot(x, y)).ravel()
    # By the definition: f (theta + k1 theta^3 + ...) / tan(theta) times (x, y).
    bent = theta * (1 + k[0] * theta**2 + k[1] * theta**4 + k[2] * theta**6 + k[3] * theta**8)
    scale = np.where(theta > 0, bent / np.maximum(np.tan(theta), 1e-12), 1.0)
    expected = np.stack([600 * scale * points[:, 0] + 950, 610 * scale * points[:, 1] + 540], -1)
    np.testing.assert_allclose(camera.project(points)[0], expected, atol=1e-9)


def test_ftheta_by_hand():
    # A point at 45° to the right: r = 917 t + 3 t² - 35 t³ + 4 t⁴ at t = pi/4 = 720.216 + 1.851 - 16.956 + 1.522.
    camera = Ftheta(1920, 1080, 960.0, 540.0, max_angle_rad=1.2, angle_to_radius=WIDE)
    pixel, valid = camera.project([3.0, 0.0, 3.0])
    np.testing.assert_allclose(pixel, (960.0 + 706.63, 540.0), atol=0.01)
    assert valid
    assert not camera.project([3.0, 0.0, 0.1])[1]  # 88° is beyond max_angle
    assert camera.project([0.0, 0.0, 5.0])[1]
    assert not camera.project([0.0, 0.0, -5.0])[1]


def test_where_a_model_folds_nothing_is_valid():
    # r (1 - r²/2): grows up to r = sqrt(2/3) = 0.816 only.
    camera = OpenCVPinhole(100, 100, 50.0, 50.0, focal_x=100.0, focal_y=100.0, radial=(-0.5,))
    assert camera.project([0.8, 0.0, 1.0])[1]
    assert not camera.project([0.9, 0.0, 1.0])[1]
    assert not camera.unproject([50.0 + 60.0, 50.0])[1]  # the largest radius is 0.544: 54.4 px


# ---------------------------------------------------------------- from AlpaSim's messages


def message(**params):
    camera = sensorsim_pb2.AvailableCamerasReturn.AvailableCamera(logical_id="front")
    camera.intrinsics.resolution_h, camera.intrinsics.resolution_w = 1080, 1920
    camera.rig_to_camera.vec.x, camera.rig_to_camera.vec.z = 1.5, 1.5
    quat = camera.rig_to_camera.quat
    quat.w, quat.x, quat.y, quat.z = FORWARD
    for name, values in params.items():
        target = getattr(camera.intrinsics, name)
        target.SetInParent()
        for key, value in values.items():
            if isinstance(value, (list, tuple)):
                getattr(target, key).extend(value)
            else:
                setattr(target, key, value)
    return camera


def test_every_calibration_is_read():
    centre = {"principal_point_x": 960.0, "principal_point_y": 540.0}
    focal = {"focal_length_x": 1000.0, "focal_length_y": 1000.0}
    pinhole = read_camera(message(opencv_pinhole_param={**centre, **focal, "radial_coeffs": [0.0] * 6}))
    assert type(pinhole.model) is Pinhole
    np.testing.assert_allclose(pinhole.project_rig([11.5, 0.0, 0.0])[0], (960.0, 690.0), atol=1e-5)
    bent = read_camera(message(opencv_pinhole_param={**centre, **focal, "radial_coeffs": [-0.1]}))
    assert bent.model.radial == (-0.1,)
    fisheye = read_camera(message(opencv_fisheye_param={**centre, **focal, "radial_coeffs": [0.01], "max_angle": 1.5}))
    assert isinstance(fisheye.model, OpenCVFisheye)
    ftheta = read_camera(
        message(ftheta_param={**centre, "angle_to_pixeldist_poly": WIDE, "reference_poly": 2, "max_angle": 1.2}),
        (320, 512),
    )
    assert (ftheta.model.width, ftheta.model.height) == (512, 320)
    # The point at 45° to the right again, in the rig and in the small picture: 1666.63 * 512 / 1920.
    pixel, _ = ftheta.project_rig([4.5, -3.0, 1.5])
    np.testing.assert_allclose(pixel, (1666.63 * 512 / 1920, 540 * 320 / 1080), atol=0.01)


def test_what_cannot_be_read_says_so():
    with pytest.raises(ValueError, match="'front' has no intrinsics"):
        read_camera(message())
    windshield = message(opencv_pinhole_param={"focal_length_x": 1.0}, bivariate_windshield_model_param={})
    with pytest.raises(ValueError, match="windshield"):
        read_camera(windshield)
    with pytest.raises(ValueError, match="polynomial"):
        read_camera(message(ftheta_param={"max_angle": 1.0}))


@pytest.mark.parametrize(
    "model",
    [
        PINHOLE,
        OpenCVPinhole(
            1920, 1080, 950.0, 545.0, focal_x=1000.0, focal_y=990.0, radial=(-0.1, 0.01), tangential=(1e-3, 0.0)
        ),
        OpenCVFisheye(1920, 1080, 960.0, 540.0, max_angle_rad=1.2, focal_x=600.0, focal_y=600.0, radial=(0.01,)),
        Ftheta(1920, 1080, 960.0, 540.0, max_angle_rad=1.2, angle_to_radius=WIDE),
    ],
    ids=["pinhole", "opencv", "fisheye", "ftheta"],
)
def test_a_calibration_is_written_as_it_is_read(model):
    camera = MountedCamera("front", resized(model, 320, 512), Pose(np.array([1.5, 0.25, 1.25]), FORWARD))
    back = read_camera(write_camera(camera), (320, 512))
    points = np.array([[10.0, 1.0, 0.5], [5.0, -2.0, 2.0], [30.0, 3.0, -1.0]])
    for before, after in zip(camera.project_rig(points), back.project_rig(points), strict=True):
        np.testing.assert_allclose(before, after, atol=1e-6)
    assert (back.model.width, back.model.height) == (512, 320)
