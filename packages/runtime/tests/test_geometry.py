from __future__ import annotations

import math

import numpy as np
import pytest
import shapely
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from alpagym_runtime.errors import OutOfRangeError
from alpagym_runtime.geometry import (
    HOLE_M2,
    SEAM_M,
    Pose,
    angle_difference,
    area_from_polygons,
    boxes_overlap,
    check_times,
    interpolate,
    interpolate_angle,
    interpolate_pose,
    local_to_rig,
    motion,
    quaternion_from_xyzw,
    quaternion_from_yaw,
    quaternion_product,
    quaternion_to_xyzw,
    rig_to_local,
    rotate,
    slerp,
    unit_quaternion,
    wrap_angle,
    yaw_from_quaternion,
)
from alpagym_runtime.geometry_kernels import EDGE_TOLERANCE_M
from alpagym_runtime.random import generator

patient = settings(deadline=None)  # the first call compiles

angles = st.floats(-1e4, 1e4)
metres = st.floats(-1e3, 1e3)
fractions = st.floats(0.0, 1.0)


@st.composite
def quaternions(draw):
    q = np.array(draw(st.tuples(*[st.floats(-1.0, 1.0)] * 4)))
    assume(np.linalg.norm(q) > 0.1)
    return q


@st.composite
def poses(draw):
    return Pose(np.array(draw(st.tuples(metres, metres, metres))), draw(quaternions()))


def boxes(reach=10.0):
    return st.tuples(
        st.floats(-reach, reach),
        st.floats(-reach, reach),
        st.floats(-7.0, 7.0),
        st.floats(0.5, 12.0),
        st.floats(0.5, 4.0),
    )


def rotation_angle(a, b):
    """Angle rad between two rotations; well conditioned near 0."""
    a, b = unit_quaternion(a), unit_quaternion(b)
    w, *v = quaternion_product(a * [1, -1, -1, -1], b)
    return 2.0 * math.atan2(math.hypot(*v), abs(w))


def polygon(box, grow=0.0):
    """A box as a shapely polygon, each side moved out by `grow`."""
    x, y, yaw, length, width = box
    half_x, half_y = length / 2 + grow, width / 2 + grow
    corners = rig_to_local([[half_x, half_y], [-half_x, half_y], [-half_x, -half_y], [half_x, -half_y]], [x, y, yaw])
    return shapely.Polygon(corners)


# ---------------------------------------------------------------- angles


def test_wrapped_angles_lie_in_the_half_open_interval():
    for angle in (3 * np.pi, np.pi, -np.pi):
        assert wrap_angle(angle) == -np.pi
    assert wrap_angle(0.0) == 0.0
    below = np.nextafter(-np.pi, -4.0)
    assert -np.pi <= wrap_angle(below) < np.pi
    assert -np.pi <= wrap_angle(-1e-17) < np.pi
    np.testing.assert_array_equal(wrap_angle([[np.pi, 0.5], [-0.5, 7.0]]), [[-np.pi, 0.5], [-0.5, 7.0 - 2 * np.pi]])


@given(angles)
def test_wrapping_keeps_the_direction(angle):
    wrapped = wrap_angle(angle)
    assert -np.pi <= wrapped < np.pi
    # 1e4 rad carry a rounding of 2e-12.
    assert math.cos(wrapped) == pytest.approx(math.cos(angle), abs=1e-11)
    assert math.sin(wrapped) == pytest.approx(math.sin(angle), abs=1e-11)
    assert wrap_angle(wrapped) == pytest.approx(wrapped, abs=1e-15)


def test_differences_take_the_shorter_way():
    # 3.1 - (-3.1) = 6.2; 6.2 - 2 pi = -0.0831853
    assert angle_difference(3.1, -3.1) == pytest.approx(-0.0831853, abs=1e-7)
    assert angle_difference(-3.1, 3.1) == pytest.approx(0.0831853, abs=1e-7)


def test_yaw_is_interpolated_across_the_branch_cut():
    times, yaw = [0, 100_000], np.radians([179.0, -179.0])
    middle = interpolate_angle(times, yaw, 50_000)
    assert abs(middle) == pytest.approx(np.pi, abs=1e-12)
    # 2° in 0.1 s = 0.349066 rad/s
    rate = angle_difference(yaw[1], yaw[0]) / 0.1
    assert rate == pytest.approx(0.349066, abs=1e-6)
    np.testing.assert_allclose(np.degrees(interpolate_angle(times, yaw, [25_000, 75_000])), [179.5, -179.5])
    # and the other way round
    np.testing.assert_allclose(np.degrees(interpolate_angle(times, yaw[::-1], [25_000, 75_000])), [-179.5, 179.5])


def test_angles_are_interpolated_at_constant_rate():
    # 170° · 0.25 = 42.5°; averaging sines and cosines would give 4.925°
    assert np.degrees(interpolate_angle([0, 4], np.radians([0.0, 170.0]), 1)) == pytest.approx(42.5)


@given(angles, angles, st.integers(0, 1000))
def test_interpolated_angles_lie_on_the_shorter_way(a, b, query):
    middle = interpolate_angle([0, 1000], [a, b], query)
    assert -np.pi <= middle < np.pi
    turn = angle_difference(b, a)
    assert abs(angle_difference(middle, a + turn * query / 1000)) < 1e-9


# ---------------------------------------------------------------- motion


def circle(radius_m, speed_mps, laps=2.0, period_us=100_000):
    times = np.arange(0, int(laps * 2 * np.pi * radius_m / speed_mps * 1e6), period_us)
    angle = speed_mps / radius_m * times * 1e-6
    xy = radius_m * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return times, xy, wrap_angle(angle + np.pi / 2)


def test_two_laps_of_a_circle_have_no_spikes():
    # R = 20 m, v = 10 m/s: yaw rate v / R = 0.5 rad/s, lateral v² / R = 5 m/s², jerk v³ / R² = 2.5 m/s³
    result = motion(*circle(20.0, 10.0))
    np.testing.assert_allclose(result["speed_mps"], 10.0, rtol=0.01)
    np.testing.assert_allclose(result["yaw_rate_radps"], 0.5, rtol=0.01)
    np.testing.assert_allclose(result["lateral_acceleration_mps2"], 5.0, rtol=0.02)
    assert np.abs(result["acceleration_mps2"][2:-2]).max() < 1e-9
    assert np.abs(result["acceleration_mps2"]).max() < 0.25  # one-sided differences at the ends
    assert result["jerk_mps3"].max() <= 2.6
    # nuPlan's comfort limits: only the lateral one, 4.89, is exceeded.
    assert (result["lateral_acceleration_mps2"] > 4.89).all()
    assert (np.abs(result["acceleration_mps2"]) < 2.4).all()
    assert (result["jerk_mps3"] < 8.37).all()
    assert (np.abs(result["yaw_rate_radps"]) < 0.95).all()


def test_a_circle_to_the_right_has_negative_yaw_rate():
    times, xy, yaw = circle(20.0, 10.0)
    mirrored = motion(times, xy * [1.0, -1.0], -yaw)
    np.testing.assert_allclose(mirrored["yaw_rate_radps"], -0.5, rtol=0.01)
    np.testing.assert_allclose(mirrored["lateral_acceleration_mps2"], -5.0, rtol=0.02)


def test_motion_of_constant_acceleration():
    times = np.arange(0, 2_000_001, 100_000)
    t = times * 1e-6
    # s = 3 t + t²: v = 3 + 2 t, a = 2; heading 30°
    s = 3.0 * t + t * t
    heading = np.radians(30.0)
    result = motion(times, np.stack([s * np.cos(heading), s * np.sin(heading)], axis=-1), np.full(len(t), heading))
    np.testing.assert_allclose(result["speed_mps"], 3.0 + 2.0 * t, atol=1e-9)
    np.testing.assert_allclose(result["acceleration_mps2"], 2.0, atol=1e-9)
    np.testing.assert_allclose(result["jerk_mps3"], 0.0, atol=1e-7)


def test_reversing_has_negative_speed():
    times = np.arange(0, 500_001, 100_000)
    xy = np.stack([-2.0 * times * 1e-6, np.zeros(len(times))], axis=-1)
    np.testing.assert_allclose(motion(times, xy, np.zeros(len(times)))["speed_mps"], -2.0, atol=1e-9)


def test_motion_needs_three_samples():
    with pytest.raises(ValueError, match="at least 3 samples, got 2"):
        motion([0, 1], np.zeros((2, 2)), [0.0, 0.0])


# ---------------------------------------------------------------- quaternions

Q45 = np.array([0.9238795325, 0.0, 0.0, 0.3826834324])


def test_scalar_first_quaternion_of_45_degrees():
    assert np.degrees(yaw_from_quaternion(Q45)) == pytest.approx(45.0, abs=1e-7)
    np.testing.assert_allclose(rotate(Q45, [1.0, 0.0, 0.0]), [0.707107, 0.707107, 0.0], atol=1e-6)
    np.testing.assert_allclose(quaternion_from_yaw(np.pi / 4), Q45, atol=1e-9)


def test_a_negated_quaternion_is_the_same_rotation():
    assert np.degrees(yaw_from_quaternion(-Q45)) == pytest.approx(45.0, abs=1e-7)
    np.testing.assert_allclose(rotate(-Q45, [1.0, 2.0, 3.0]), rotate(Q45, [1.0, 2.0, 3.0]), atol=1e-12)


def test_columns_of_a_dataset_are_scalar_last():
    stored = [[0.0, 0.0, 0.3826834324, 0.9238795325]]
    assert np.degrees(yaw_from_quaternion(quaternion_from_xyzw(stored)))[0] == pytest.approx(45.0, abs=1e-7)
    np.testing.assert_array_equal(quaternion_to_xyzw(quaternion_from_xyzw(stored)), stored)


@pytest.mark.parametrize("scale", [2.0, 0.5, 1e-3, 1e6])
def test_an_unnormalised_quaternion_does_not_shift_the_heading(scale):
    # The formula without a norm gives 93.4713° for a scale of 2.
    assert np.degrees(yaw_from_quaternion(scale * Q45)) == pytest.approx(45.0, abs=1e-7)
    np.testing.assert_allclose(rotate(scale * Q45, [1.0, 0.0, 0.0]), [0.707107, 0.707107, 0.0], atol=1e-6)


@pytest.mark.parametrize("bad", [[0.0] * 4, [math.nan, 0.0, 0.0, 1.0], [math.inf, 0.0, 0.0, 0.0], [1e-12, 0, 0, 0]])
def test_what_is_no_rotation_is_refused_and_named(bad):
    rows = np.array([Q45, Q45, bad])
    with pytest.raises(ValueError, match=r"ego at \(2,\)"):
        unit_quaternion(rows, "ego")
    with pytest.raises(ValueError, match=r"\(2,\)"):
        yaw_from_quaternion(rows)
    with pytest.raises(ValueError, match="rotation"):
        rotate(bad, [1.0, 0.0, 0.0])


def test_a_log_names_the_time_of_what_is_no_rotation():
    times = np.array([1_000_000, 1_100_000, 1_200_000])
    for bad in ([0.0] * 4, [math.nan] * 4):
        log = Pose(np.zeros((3, 3)), np.array([Q45, bad, Q45]))
        for query in (1_050_000, 1_100_000, 1_150_000):
            with pytest.raises(ValueError, match="1100000"):
                interpolate_pose(times, log, query)


def test_a_wrong_width_is_refused():
    with pytest.raises(ValueError, match=r"\[\.\.\., 4\]"):
        unit_quaternion(np.zeros((2, 3)))


def test_slerp_between_a_rotation_and_its_negative_stays():
    assert rotation_angle(slerp(Q45, -Q45, 0.5), Q45) < 1e-9


def test_slerp_crosses_the_branch_cut_the_short_way():
    a, b = quaternion_from_yaw(np.radians(179.0)), quaternion_from_yaw(np.radians(-179.0))
    assert abs(np.degrees(yaw_from_quaternion(slerp(a, b, 0.5)))) == pytest.approx(180.0, abs=1e-9)


@given(quaternions(), quaternions(), fractions, st.booleans(), st.booleans())
def test_slerp_turns_at_constant_rate_whatever_the_signs(a, b, fraction, negate_a, negate_b):
    whole = rotation_angle(a, b)
    assume(whole < np.pi - 1e-3)  # at half a turn both ways are short
    between = slerp(-a if negate_a else a, -b if negate_b else b, fraction)
    assert np.linalg.norm(between) == pytest.approx(1.0, abs=1e-12)
    assert rotation_angle(a, between) == pytest.approx(fraction * whole, abs=1e-7)
    assert rotation_angle(between, b) == pytest.approx((1.0 - fraction) * whole, abs=1e-7)


@given(st.floats(-np.pi, np.pi, exclude_max=True))
def test_yaw_survives_a_quaternion(yaw):
    assert abs(angle_difference(yaw_from_quaternion(quaternion_from_yaw(yaw)), yaw)) < 1e-12


@given(quaternions(), quaternions(), st.tuples(metres, metres, metres))
def test_products_rotate_by_the_right_factor_first(a, b, vector):
    expected = rotate(a, rotate(b, vector))
    np.testing.assert_allclose(rotate(quaternion_product(a, b), vector), expected, atol=1e-9 * 1e3)


# ---------------------------------------------------------------- poses


def test_points_ahead_and_to_the_left_of_the_ego():
    ego = Pose.planar(10.0, 5.0, np.pi / 2)
    np.testing.assert_allclose(ego.inverse().transform([10.0, 8.0, 0.0]), [3.0, 0.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(ego.inverse().transform([7.0, 5.0, 0.0]), [0.0, 3.0, 0.0], atol=1e-12)
    rig = [10.0, 5.0, np.pi / 2]
    np.testing.assert_allclose(local_to_rig([[10.0, 8.0], [7.0, 5.0]], rig), [[3.0, 0.0], [0.0, 3.0]], atol=1e-12)
    np.testing.assert_allclose(rig_to_local([[3.0, 0.0], [0.0, 3.0]], rig), [[10.0, 8.0], [7.0, 5.0]], atol=1e-12)


@pytest.mark.parametrize(("reach", "tolerance"), [(100.0, 1e-9), (1e6, 1e-6)])
def test_round_trip_of_a_thousand_random_poses(reach, tolerance):
    random = generator(10, int(reach))
    pose = Pose(random.uniform(-reach, reach, (1000, 3)), random.normal(size=(1000, 4)))
    points = random.uniform(-reach, reach, (1000, 3))
    np.testing.assert_allclose(pose.inverse().transform(pose.transform(points)), points, atol=tolerance, rtol=0)
    np.testing.assert_allclose(pose.transform(pose.inverse().transform(points)), points, atol=tolerance, rtol=0)
    rig = random.uniform(-reach, reach, (1000, 3))
    flat = rig_to_local(local_to_rig(points[:, :2], rig), rig)
    np.testing.assert_allclose(flat, points[:, :2], atol=tolerance, rtol=0)


@given(poses(), poses(), st.tuples(metres, metres, metres))
def test_composition_transforms_by_the_right_factor_first(a, b, point):
    np.testing.assert_allclose((a @ b).transform(point), a.transform(b.transform(point)), atol=1e-8)


@given(poses())
def test_the_inverse_of_the_inverse_is_the_pose(pose):
    again = pose.inverse().inverse()
    np.testing.assert_allclose(again.position, pose.position, atol=1e-8)
    assert rotation_angle(again.quaternion_wxyz, pose.quaternion_wxyz) < 1e-7
    unit = pose @ pose.inverse()
    np.testing.assert_allclose(unit.position, 0.0, atol=1e-8)
    assert rotation_angle(unit.quaternion_wxyz, [1.0, 0.0, 0.0, 0.0]) < 1e-7


@given(metres, metres, angles, metres, metres)
def test_planar_poses_agree_with_planar_frames(x, y, yaw, px, py):
    expected = Pose.planar(x, y, yaw).transform([px, py, 0.0])[:2]
    np.testing.assert_allclose(rig_to_local([px, py], [x, y, yaw]), expected, atol=1e-8)


# ---------------------------------------------------------------- logs

TIMES = np.array([1_000_000, 2_000_000])
ENDS = np.array([[0.0, 0.0], [10.0, 0.0]])


def test_a_log_is_exact_at_its_ends_and_linear_between():
    np.testing.assert_array_equal(interpolate(TIMES, ENDS, TIMES), ENDS)
    np.testing.assert_array_equal(interpolate(TIMES, ENDS, 1_250_000), [2.5, 0.0])
    np.testing.assert_array_equal(interpolate(TIMES, ENDS, [[1_500_000], [2_000_000]]), [[[5.0, 0.0]], [[10.0, 0.0]]])


@pytest.mark.parametrize("query", [999_999, 2_000_001])
def test_outside_its_log_nothing_is_extrapolated(query):
    pose = Pose.planar(ENDS[:, 0], ENDS[:, 1], [0.0, 0.0])
    for read in (
        lambda q: interpolate(TIMES, ENDS, q),
        lambda q: interpolate_angle(TIMES, [0.0, 1.0], q),
        lambda q: interpolate_pose(TIMES, pose, q),
    ):
        for shaped in (query, [1_500_000, query]):
            with pytest.raises(OutOfRangeError) as error:
                read(shaped)
            found = (error.value.query_us, error.value.first_us, error.value.last_us)
            assert found == (query, 1_000_000, 2_000_000)
            assert all(type(value) is int for value in found)
            assert str(query) in str(error.value)


def test_a_log_of_one_pose():
    np.testing.assert_array_equal(interpolate([7], [[1.0, 2.0]], 7), [1.0, 2.0])
    assert interpolate_angle([7], [1.5], 7) == 1.5
    pose = interpolate_pose([7], Pose(np.ones((1, 3)), Q45[None]), 7)
    np.testing.assert_allclose(pose.quaternion_wxyz, Q45, atol=1e-9)
    for query in (6, 8):
        with pytest.raises(OutOfRangeError):
            interpolate([7], [[1.0, 2.0]], query)


def test_an_empty_log_is_an_error():
    with pytest.raises(ValueError, match="at least one time"):
        interpolate(np.zeros(0, np.int64), np.zeros((0, 2)), 5)


@pytest.mark.parametrize(("times", "index"), [([1, 2, 2, 3], 2), ([5, 4], 1), ([1, 3, 2, 4], 2)])
def test_times_that_do_not_increase_are_refused_by_index(times, index):
    # Unsorted input is refused, not sorted: rows in the wrong order are a fault of who wrote them.
    with pytest.raises(ValueError, match=f"log.*index {index} "):
        check_times(times, "log")
    with pytest.raises(ValueError, match=f"index {index} "):
        interpolate(times, np.zeros((len(times), 2)), times[0])


def test_times_are_whole_microseconds():
    with pytest.raises(ValueError, match="integer microseconds, got float64"):
        check_times([0.0, 1.0])
    with pytest.raises(ValueError, match="query times are integer"):
        interpolate(TIMES, ENDS, 1.5e6)


def test_times_of_a_unix_clock_keep_every_microsecond():
    start = 1_700_000_000_000_000
    assert interpolate([start, start + 10], [0.0, 10.0], start + 3) == 3.0


@given(st.lists(st.tuples(st.integers(1, 10**6), metres), min_size=2, max_size=8), fractions)
def test_linear_interpolation_agrees_with_numpy_inside(steps, share):
    times = np.cumsum([step for step, _ in steps])
    values = np.array([value for _, value in steps])
    query = int(times[0] + share * (times[-1] - times[0]))
    assert interpolate(times, values, query) == pytest.approx(np.interp(query, times, values), abs=1e-9)


def test_poses_between_recorded_ones():
    log = Pose(np.array([[0.0, 0, 0], [10.0, 0, 2.0]]), quaternion_from_yaw(np.radians([170.0, -170.0])))
    pose = interpolate_pose(TIMES, log, [1_250_000, 1_500_000])
    np.testing.assert_allclose(pose.position, [[2.5, 0, 0.5], [5.0, 0, 1.0]])
    np.testing.assert_allclose(np.degrees(yaw_from_quaternion(pose.quaternion_wxyz))[0], 175.0)
    assert abs(np.degrees(yaw_from_quaternion(pose.quaternion_wxyz))[1]) == pytest.approx(180.0)


# ---------------------------------------------------------------- boxes


EGO = (0.0, 0.0, 0.0, 4.0, 2.0)


@pytest.mark.parametrize(
    ("other", "overlaps"),
    [
        ((4.0, 0.0, 0.0, 4.0, 2.0), False),  # bumpers touch
        ((3.999999, 0.0, 0.0, 4.0, 2.0), True),
        ((4.000001, 0.0, 0.0, 4.0, 2.0), False),
        ((0.0, 2.0, 0.0, 4.0, 2.0), False),  # sides touch
        ((0.0, 1.999999, 0.0, 4.0, 2.0), True),
        ((4.0, 2.0, 0.0, 4.0, 2.0), False),  # corners touch
        ((3.0, 0.0, np.pi / 2, 4.0, 2.0), False),  # across: 2 + 1 = 3
        ((2.999999, 0.0, np.pi / 2, 4.0, 2.0), True),
        ((2.0 + math.sqrt(2.0), 0.0, np.pi / 4, 2.0, 2.0), False),  # a corner touches the bumper
        ((2.0 + math.sqrt(2.0) - 1e-6, 0.0, np.pi / 4, 2.0, 2.0), True),
        ((0.0, 0.0, 0.3, 1.0, 0.5), True),  # inside
        ((0.0, 0.0, np.pi, 4.0, 2.0), True),  # the same box backwards
        # The circles around both overlap, and so do the upright hulls, but not the boxes.
        ((2.9, 1.9, np.pi / 4, 4.0, 0.2), True),
        ((2.9, 1.9, -np.pi / 4, 4.0, 0.2), False),
    ],
)
def test_exact_boxes_overlap_and_touching_ones_do_not(other, overlaps):
    assert boxes_overlap(EGO, other) == overlaps
    assert boxes_overlap(other, EGO) == overlaps


def test_boxes_broadcast():
    others = np.array([[3.0, 0, 0, 4, 2], [5.0, 0, 0, 4, 2]])
    assert boxes_overlap(EGO, others).tolist() == [True, False]
    assert boxes_overlap(others[:, None], others[None]).tolist() == [[True, True], [True, True]]


@patient
@given(boxes(), boxes())
def test_overlap_is_symmetric(a, b):
    assert boxes_overlap(a, b) == boxes_overlap(b, a)


@patient
@given(boxes(), boxes())
def test_overlap_agrees_with_shapely(a, b):
    smaller, larger = (polygon(a, grow).intersects(polygon(b, grow)) for grow in (-1e-6, 1e-6))
    assume(smaller == larger)  # within a micrometre of touching, rounding decides
    assert boxes_overlap(a, b) == larger


@patient
@given(boxes(), boxes(), metres, metres, st.floats(-7.0, 7.0))
def test_overlap_does_not_depend_on_the_frame(a, b, x, y, yaw):
    def moved(box):
        return (*rig_to_local(box[:2], [x, y, yaw]), box[2] + yaw, *box[3:])

    smaller, larger = (polygon(a, grow).intersects(polygon(b, grow)) for grow in (-1e-6, 1e-6))
    assume(smaller == larger)
    assert boxes_overlap(moved(a), moved(b)) == boxes_overlap(a, b)


@patient
@given(st.floats(-7.0, 7.0), st.floats(1.0, 8.0), st.floats(1.0, 3.0), metres, metres)
def test_boxes_bumper_to_bumper_touch_in_every_direction(yaw, length, width, x, y):
    ahead = rig_to_local([length, 0.0], [x, y, yaw])
    assert not boxes_overlap((x, y, yaw, length, width), (*ahead, yaw, length, width))
    closer = rig_to_local([length - 1e-6, 0.0], [x, y, yaw])
    assert boxes_overlap((x, y, yaw, length, width), (*closer, yaw, length, width))


# ---------------------------------------------------------------- areas


def rectangle(x0, y0, x1, y1):
    return [[x0, y0], [x1, y0], [x1, y1], [x0, y1]]


@pytest.mark.parametrize(("gap", "inside"), [(0.0, True), (1e-6, True), (1e-3, True), (0.05, True), (0.5, False)])
def test_a_car_across_a_dashed_line_is_on_the_road(gap, inside):
    area = area_from_polygons([rectangle(0, 0, 20, 3.5), rectangle(0, 3.5 + gap, 20, 7 + gap)])
    assert area.contains((10.0, 3.5, 0.0, 4.0, 2.0)) == inside


def test_lanes_that_overlap_are_one_road():
    area = area_from_polygons([rectangle(0, 0, 20, 4), rectangle(0, 3, 20, 7)])
    assert area.contains((10.0, 3.5, 0.3, 4.0, 2.0))


@pytest.mark.parametrize(
    ("y", "inside"),
    [(1.01, True), (1.0, True), (0.9995, True), (0.9985, False), (0.99, False), (2.5, True), (2.51, False)],
)
def test_the_outer_edge_stays_where_it_is(y, inside):
    assert area_from_polygons([rectangle(0, 0, 20, 3.5)]).contains((10.0, y, 0.0, 4.0, 2.0)) == inside


@pytest.mark.parametrize("turn", [0.0, 0.3, 1.1, 2.6, -0.8])
def test_the_outer_edge_stays_where_it_is_in_every_direction(turn):
    road = rig_to_local(rectangle(0, 0, 20, 3.5), [5.0, -3.0, turn])
    area = area_from_polygons([road])
    for y, inside in ((1.01, True), (0.99, False), (2.49, True), (2.51, False)):
        centre = rig_to_local([10.0, y], [5.0, -3.0, turn])
        assert area.contains((*centre, turn, 4.0, 2.0)) == inside, y


L_SHAPE = [rectangle(0, 0, 20, 7), rectangle(13, 0, 20, 20)]


@pytest.mark.parametrize(("x", "y", "inside"), [(12, 6, False), (15, 5, True), (14.5, 6.5, True), (16.5, 5, True)])
def test_the_inner_corner_of_an_l_shaped_road(x, y, inside):
    assert area_from_polygons(L_SHAPE).contains((x, y, np.pi / 4, 4.0, 2.0)) == inside


def test_a_long_road_is_road_at_its_far_end():
    area = area_from_polygons([rectangle(0, 0, 100, 3.5)])
    assert area.contains((97.9, 1.75, 0.0, 4.0, 2.0))
    assert not area.contains((98.1, 1.75, 0.0, 4.0, 2.0))
    assert not area.contains((150.0, 1.75, 0.0, 4.0, 2.0))


def test_a_hole_in_the_road_is_not_road():
    ring = [rectangle(0, 0, 30, 10), rectangle(0, 20, 30, 30), rectangle(0, 0, 10, 30), rectangle(20, 0, 30, 30)]
    area = area_from_polygons(ring)
    assert not area.contains((15.0, 15.0, 0.0, 4.0, 2.0))
    assert not area.contains((10.0, 15.0, 0.0, 4.0, 2.0))
    assert area.contains((5.0, 15.0, 1.0, 4.0, 2.0))


def road_with_hole(length, width):
    """30 m × 30 m of road around a hole at (15, 15)."""
    x0, x1, y0, y1 = 15 - length / 2, 15 + length / 2, 15 - width / 2, 15 + width / 2
    parts = (rectangle(0, 0, 30, y0), rectangle(0, y1, 30, 30), rectangle(0, 0, x0, 30), rectangle(x1, 0, 30, 30))
    return area_from_polygons(list(parts))


def test_a_hole_wholly_under_the_car_is_off_the_road_unless_it_is_a_sliver_of_the_map():
    on_it = (15.0, 15.0, 0.0, 6.0, 3.0)
    assert not road_with_hole(4.0, 1.01).contains(on_it)  # 4.04 m²
    assert road_with_hole(4.0, 0.99).contains(on_it)  # 3.96 m²


def test_seams_are_closed_up_to_their_width():
    for gap, inside in ((SEAM_M - 1e-3, True), (SEAM_M + 1e-2, False)):
        area = area_from_polygons([rectangle(0, 0, 20, 3.5), rectangle(0, 3.5 + gap, 20, 7)])
        assert area.contains((10.0, 3.5, 0.0, 4.0, 2.0)) == inside


@pytest.mark.parametrize("polygons", [[], [[[0, 0], [1, 1]]], [[[0, 0], [1, 0], [2, 0]]]])
def test_an_empty_map_is_an_error_not_on_the_road(polygons):
    with pytest.raises(ValueError, match="no drivable area"):
        area_from_polygons(polygons)


def test_many_boxes_at_once():
    area = area_from_polygons([rectangle(0, 0, 20, 3.5)])
    inside = area.contains([[[10.0, 1.75, 0.0, 4.0, 2.0]], [[10.0, 0.5, 0.0, 4.0, 2.0]]])
    assert inside.tolist() == [[True], [False]]


@patient
@given(st.lists(boxes(20.0), min_size=1, max_size=5), boxes(25.0))
def test_area_agrees_with_shapely(roads, box):
    polygons = [polygon((x, y, yaw, 3.0 * length, 3.0 * width)) for x, y, yaw, length, width in roads]
    area = area_from_polygons([np.asarray(p.exterior.coords)[:-1] for p in polygons])
    grown = shapely.union_all([p.buffer(SEAM_M / 2, join_style="mitre") for p in polygons])
    union = grown.buffer(-SEAM_M / 2, join_style="mitre")
    holes = [shapely.Polygon(ring) for part in shapely.get_parts(union) for ring in part.interiors]
    assume(all(abs(hole.area - HOLE_M2) > 1e-6 for hole in holes))
    union = shapely.union_all([union, *(hole for hole in holes if hole.area < HOLE_M2)])
    # The tolerance takes 1 mm off each side of the box; a micrometre around that, rounding decides.
    inner, outer = (union.covers(polygon(box, -EDGE_TOLERANCE_M + slack)) for slack in (-1e-6, 1e-6))
    assume(inner == outer)
    assert area.contains(box) == outer


@patient
@given(st.lists(boxes(20.0), min_size=1, max_size=5), boxes(15.0), metres, metres)
def test_area_does_not_depend_on_the_origin(roads, box, x, y):
    def shifted(points):
        return np.asarray(points) + np.array([x, y])

    polygons = [np.asarray(polygon((*b[:3], 3.0 * b[3], 3.0 * b[4])).exterior.coords)[:-1] for b in roads]
    inside = [area_from_polygons(polygons).contains((*box[:3], box[3] + d, box[4] + d)) for d in (-1e-5, 1e-5)]
    assume(inside[0] == inside[1])
    assert area_from_polygons([shifted(p) for p in polygons]).contains((*shifted(box[:2]), *box[2:])) == inside[0]
