"""The CommonRoad reader: hand-written files with known numbers, hostile ones, and recordings where they are at hand."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alpagym_runtime.envs.core import DrivingCore
from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import boxes_overlap
from alpagym_runtime.policies.config import LogReplayConfig
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded.commonroad import CommonRoadScenes
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.scene import KINDS, Scene
from alpagym_runtime.types import EpisodeRequest, Sampling

DATA = Path(__file__).parents[3] / ".." / "shared" / "data" / "commonroad"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no folder of CommonRoad recordings beside the repository")


def lanelet(name, left, right, successor=None, kind=None):
    def bound(side, points):
        inner = "".join(f"<point><x>{x}</x><y>{y}</y></point>" for x, y in points)
        return f"<{side}Bound>{inner}</{side}Bound>"

    follow = f'<successor ref="{successor}"/>' if successor else ""
    kinds = f"<laneletType>{kind}</laneletType>" if kind else ""
    return f'<lanelet id="{name}">{bound("left", left)}{bound("right", right)}{follow}{kinds}</lanelet>\n'


def state(step, x, y, yaw=0.0, speed=None, tag="state"):
    velocity = "" if speed is None else f"<velocity><exact>{speed}</exact></velocity>"
    return (
        f"<{tag}><position><point><x>{x}</x><y>{y}</y></point></position><orientation><exact>{yaw}</exact></orientation>"
        f"<time><exact>{step}</exact></time>{velocity}</{tag}>\n"
    )


CAR = "<rectangle><length>5.393</length><width>2.0</width></rectangle>"


def obstacle(name, states, kind="car", shape=CAR, version="2018b"):
    """`states` are tuples for `state`; one alone is a static obstacle."""
    role = "dynamic" if len(states) > 1 else "static"
    later = "".join(state(*s) for s in states[1:])
    motion = f"<trajectory>{later}</trajectory>" if later else ""
    tag, said = ("obstacle", f"<role>{role}</role>") if version == "2018b" else (f"{role}Obstacle", "")
    first = state(*states[0], tag="initialState")
    return f'<{tag} id="{name}">{said}<type>{kind}</type><shape>{shape}</shape>{first}{motion}</{tag}>\n'


ROAD = lanelet(1, [(0, 2), (200, 2)], [(0, -2), (200, -2)])
# 10 m/s along y = 0 from x = 20, every 0.2 s for 4 s.
EGO = [(k, 20 + 2 * k, 0.0, 0.0, 10.0) for k in range(21)]


def document(body, version="2018b", step=0.2):
    return f'<commonRoad commonRoadVersion="{version}" timeStepSize="{step}" benchmarkID="X">\n{body}</commonRoad>\n'


def write(path, body, **how):
    path.write_text(document(body, **how), encoding="utf-8")
    return path


def ego_boxes(scene: Scene) -> np.ndarray:
    """[K,5] boxes of the recorded ego."""
    x, y, yaw, _ = scene.ego_log.T
    forward = scene.vehicle.centre_offset_m
    size = np.tile([scene.vehicle.length_m, scene.vehicle.width_m], (len(x), 1))
    return np.column_stack([x + forward * np.cos(yaw), y + forward * np.sin(yaw), yaw, size])


def only(path) -> Scene:
    scenes = CommonRoadScenes(path)
    assert len(scenes.ids) == 1
    return scenes.load(scenes.ids[0])


# ---------------------------------------------------------------- what is read


def test_log_is_the_rear_axle_every_100_ms(tmp_path):
    scenes = CommonRoadScenes(write(tmp_path / "A-1.xml", ROAD + obstacle(7, EGO)))
    assert scenes.ids == ("A-1.ego-7",)
    scene = scenes.load("A-1.ego-7")
    # 4 s: 41 samples, 1 m apart. Length 5.393: the axle is 5.393 / 2 - 1.3 = 1.3965 m behind the centre.
    np.testing.assert_allclose(scene.ego_log[:, 0], 20 + np.arange(41) - 1.3965, atol=1e-9)
    np.testing.assert_allclose(scene.ego_log[:, 1:], np.tile([0.0, 0.0, 10.0], (41, 1)), atol=1e-9)
    # A quarter of 40 steps is less than 1.5 s; 10 m/s x 1.05.
    assert scene.handover == 10
    assert scene.speed_limit_mps == pytest.approx(10.5)
    assert scene.family == "commonroad.straight"


def test_traffic_is_there_in_its_interval_only(tmp_path):
    # Ego from step 2 (0.5 s) on; the other from step 6 to 8: 1.5 to 2 s, so 1.0 to 1.5 s of the log.
    ego = [(k, 20 + 2 * k, 0.0, 0.0, 8.0) for k in range(2, 23)]
    other = [(6, 100.0, 0.0), (7, 101.0, 0.0), (8, 103.0, 0.0)]
    body = ROAD + obstacle(7, ego) + obstacle(8, other, kind="truck")
    actors = only(write(tmp_path / "a.xml", body, step=0.25)).actors
    assert (actors.first[0], actors.last[0]) == (10, 15)
    # 0.1 s and 0.4 s into it: 100 + 1 * 0.1 / 0.25, 101 + 2 * 0.15 / 0.25
    np.testing.assert_allclose(actors.tracks[0, [10, 11, 14, 15], 0], [100.0, 100.4, 102.2, 103.0], atol=1e-9)
    assert KINDS[actors.kind[0]] == "truck"
    # No speeds recorded: the slope of the parabola through 0, 1, 3 m at 0, 0.25, 0.5 s is 2 m/s at its start.
    assert actors.tracks[0, 10, 3] == pytest.approx(2.0)


def test_newer_format_with_static_obstacles_of_each_shape(tmp_path):
    circle = "<circle><radius>0.5</radius></circle>"
    # A 4 m x 2 m rectangle turned by 45 degrees, as a polygon about (1, 0).
    ring = [(4, 2), (4, -2), (-4, -2), (-4, 2)]
    turned = [(1 + (x - y) / 2 / math.sqrt(2), (x + y) / 2 / math.sqrt(2)) for x, y in ring]
    polygon = "<polygon>" + "".join(f"<point><x>{x}</x><y>{y}</y></point>" for x, y in turned) + "</polygon>"
    body = ROAD + obstacle(7, EGO, version="2020a")
    body += obstacle(8, [(0, 50.0, 8.0)], "pillar", circle, "2020a")
    body += obstacle(9, [(0, 60.0, 9.0, math.pi / 2)], "building", polygon, "2020a")
    body += obstacle(10, [(0, 70.0, 9.0)], "parkedVehicle", CAR, "2020a")
    scene = only(write(tmp_path / "a.xml", body, version="2020a"))
    np.testing.assert_allclose(scene.actors.size, [[1.0, 1.0], [4.0, 2.0], [5.393, 2.0]], atol=1e-9)
    assert [KINDS[k] for k in scene.actors.kind] == ["static", "static", "car"]
    # Its frame is turned by 90 degrees: the offset (1, 0) points up, 45 degrees become 135.
    np.testing.assert_allclose(scene.actors.tracks[1, 0, :2], [60.0, 10.0], atol=1e-9)
    assert math.sin(2.0 * (scene.actors.tracks[1, 0, 2] - math.radians(135.0))) == pytest.approx(0.0, abs=1e-9)
    assert (scene.actors.first == 0).all()
    assert (scene.actors.last >= 40).all()


def test_intervals_become_their_middles(tmp_path):
    text = document(ROAD + obstacle(7, EGO))
    text = text.replace("<exact>10.0</exact>", "<intervalStart>9.9</intervalStart><intervalEnd>10.3</intervalEnd>")
    # Across the seam at 2 pi: from -0.1 to 0.1.
    text = text.replace("<exact>0.0</exact>", "<intervalStart>6.1831853</intervalStart><intervalEnd>0.1</intervalEnd>")
    (tmp_path / "a.xml").write_text(text)
    log = only(tmp_path / "a.xml").ego_log
    np.testing.assert_allclose(log[:, 2:], np.tile([0.0, 10.1], (41, 1)), atol=1e-7)


def test_heading_against_the_motion_is_not_believed(tmp_path):
    wrong = [(k, x, y, 0.5, v) for k, x, y, _, v in EGO]
    np.testing.assert_allclose(only(write(tmp_path / "a.xml", ROAD + obstacle(7, wrong))).ego_log[:, 2], 0.0, atol=1e-9)


def test_exact_occupancies_are_a_track_and_reachable_sets_are_not(tmp_path):
    def occupancy(step, x, length):
        rectangle = f"<length>{length}</length><width>2</width><center><x>{x}</x><y>6</y></center>"
        shape = f"<shape><rectangle>{rectangle}</rectangle></shape>"
        return f"<occupancy>{shape}<time><exact>{step}</exact></time></occupancy>"

    shape = "<rectangle><length>4</length><width>2</width></rectangle>"
    body = ROAD + obstacle(7, EGO)
    for name, growth in ((8, 0.0), (9, 0.5)):
        occupancies = "".join(occupancy(k, 50 + k, 4 + k * growth) for k in range(1, 4))
        whole = obstacle(name, [(0, 50, 6), (1, 0, 0)], "car", shape)
        head = whole[: whole.index("<trajectory>")]
        body += head + f"<occupancySet>{occupancies}</occupancySet></obstacle>"
    scenes = CommonRoadScenes(write(tmp_path / "a.xml", body))
    actors = scenes.load(scenes.ids[0]).actors
    # One m in 0.2 s each, from 0 to 0.6 s.
    np.testing.assert_allclose(actors.tracks[0, :7, 0], 50 + np.arange(7) / 2.0, atol=1e-9)
    assert actors.last.tolist() == [6]
    assert [d.reason.split(":")[0] for d in scenes.dropped] == ["obstacle 9"]


def test_route_follows_the_lanes_beyond_the_log(tmp_path):
    # The lane 0..70 leads into one that bends to the left, centre from (70, 0) to (170, 50).
    first = lanelet(1, [(0, 2), (70, 2)], [(0, -2), (70, -2)], successor=2)
    second = lanelet(2, [(70, 2), (170, 52)], [(70, -2), (170, 48)])
    scene = only(write(tmp_path / "a.xml", first + second + obstacle(7, EGO)))
    start, end = scene.ego_log[0], scene.ego_log[-1]
    assert scene.route[0, 0] == pytest.approx(start[0] - 5.0, abs=1e-6)
    length = np.linalg.norm(np.diff(scene.route, axis=0), axis=1).sum()
    assert length >= end[0] - start[0] + 5.0 + 100.0
    ahead = scene.route[scene.route[:, 0] > 80.0]
    np.testing.assert_allclose(ahead[:, 1], (ahead[:, 0] - 70.0) / 2.0, atol=0.05)


def test_recorded_drive_beside_a_narrow_lane_widens_the_area(tmp_path):
    # Half a width of 1 m at y = 1.5: 0.5 m over the edge at y = 2.
    scene = only(write(tmp_path / "a.xml", ROAD + obstacle(7, [(k, x, 1.5, 0.0, 10.0) for k, x, *_ in EGO])))
    assert scene.family == "commonroad.straight.widened"
    assert scene.area.contains(ego_boxes(scene)).all()
    # 0.3 m around the path and no more, and not where it did not drive.
    beside = [[40.0, y, 0.0, 1.0, 1.0] for y in (2.25, 2.35)] + [[100.0, 1.6, 0.0, 1.0, 1.0]]
    assert scene.area.contains(beside).tolist() == [True, False, False]


def test_sidewalks_are_not_road_unless_driven_on(tmp_path):
    walk = lanelet(2, [(0, 4), (200, 4)], [(0, 2), (200, 2)], kind="sidewalk")
    on_it = [[40.0, 3.0, 0.0, 1.0, 1.0]]
    road_only = only(write(tmp_path / "a.xml", ROAD + walk + obstacle(7, EGO), version="2018b"))
    assert not road_only.area.contains(on_it).any()
    body = ROAD + walk + obstacle(7, [(k, x, 2.5, 0.0, 10.0) for k, x, *_ in EGO])
    assert only(write(tmp_path / "b.xml", body)).area.contains(on_it).all()


def test_longest_drives_first_and_at_most_six(tmp_path):
    # Car n drives n m/s for 4 s on its own lane: 4 and 8 m are too little, 12 m and more are egos.
    body = lanelet(1, [(0, 60), (200, 60)], [(0, -2), (200, -2)])
    for n in range(1, 11):
        body += obstacle(n, [(k, 20 + 0.2 * n * k, 5.0 * n, 0.0, n) for k in range(21)])
    scenes = CommonRoadScenes(write(tmp_path / "a.xml", body))
    assert scenes.ids == tuple(f"a.ego-{n}" for n in (10, 9, 8, 7, 6, 5))
    assert all(len(scenes.load(name).actors.first) == 9 for name in scenes.ids)


def test_of_too_many_road_users_the_nearest_stay(tmp_path):
    # 300 parked cars 10, 11, ... 309 m beside the middle of the drive: the world holds 256.
    body = ROAD + obstacle(7, EGO)
    body += "".join(obstacle(100 + n, [(0, 40.0, 10.0 + n)], "parkedVehicle") for n in range(300))
    actors = only(write(tmp_path / "a.xml", body)).actors
    assert actors.tracks[:, 0, 1].tolist() == [10.0 + n for n in range(256)]


def test_splits_are_by_file(tmp_path):
    for n in range(6):
        write(tmp_path / f"f{n}.xml", ROAD + obstacle(7, EGO))
    scenes = CommonRoadScenes(tmp_path)
    files = {name: [i[:2] for i in scenes.split(name)] for name in ("train", "val", "test")}
    assert files == {"train": ["f0", "f3", "f4", "f5"], "val": ["f1"], "test": ["f2"]}
    one = CommonRoadScenes(tmp_path / "f0.xml")
    assert one.split("train") == one.split("val") == one.split("test") == one.ids
    with pytest.raises(ValueError, match="expected train, val or test"):
        one.split("dev")


def test_same_file_gives_the_same_bytes(tmp_path):
    path = write(tmp_path / "a.xml", ROAD + obstacle(7, EGO) + obstacle(8, [(k, 50 + k, 6, 0.0, 5) for k in range(21)]))
    first, second = CommonRoadScenes(path), CommonRoadScenes(path)
    assert first.ids == second.ids
    assert [first.load(i).content_hash for i in first.ids] == [second.load(i).content_hash for i in second.ids]


# ---------------------------------------------------------------- what is refused

GOOD = document(ROAD + obstacle(7, EGO))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("\0", "line 1: not well-formed"),
        ("not xml at all", "line 1: not well-formed"),
        ("<OpenDRIVE/>", "root element <OpenDRIVE>"),
        (GOOD.replace("2018b", "2030a"), "format version '2030a'"),
        (GOOD.replace('timeStepSize="0.2"', 'timeStepSize="0"'), "timeStepSize is '0'"),
        ("<!DOCTYPE commonRoad [<!ENTITY a '1'>]>" + GOOD, "document type"),
        (document(obstacle(7, EGO)), "no lanelets"),
        (document(ROAD), "no moving obstacles"),
        (document(ROAD + ROAD + obstacle(7, EGO)), "line 3 <lanelet>: id '1' occurs twice"),
        (document(ROAD + obstacle(7, EGO) * 2), "<obstacle>: id '7' occurs twice"),
        (document(ROAD + obstacle("../7", EGO)), "id '../7'"),
        (document(ROAD + obstacle(7, EGO[:6])), "no usable ego among 1 obstacles: 1 recorded for less than 1.5 s"),
        (document(ROAD + obstacle(7, EGO, kind="bicycle")), "1 not a motor vehicle"),
        (document(ROAD + obstacle(7, [(k, 20, 0.0) for k in range(21)])), "1 drive less than 10 m"),
        (
            document(ROAD + obstacle(7, [(k, x, 3.5, 0, 10) for k, x, *_ in EGO])),
            "1 leave the lanelets by more than 1 m",
        ),
        (document(ROAD + obstacle(7, EGO) + obstacle(8, [(0, 40, 0)])), "1 overlap another recorded object"),
        (GOOD.replace("<x>24", "<x>nan"), "obstacle 7: line 5 <x>: nan, expected a finite number"),
        (GOOD.replace("<x>24", "<x>two"), "line 5 <x>: 'two', expected a number"),
        (GOOD.replace("<time><exact>3<", "<time><exact>2<"), "obstacle 7: its trajectory: time 400000 us at index 3"),
        (GOOD.replace("<time><exact>20<", "<time><exact>20000000<"), "obstacle 7: its recording lasts more than 600 s"),
        (GOOD.replace("5.393", "0"), "0 m x 2 m has no area"),
        (GOOD.replace(CAR, ""), "obstacle 7: no shape"),
        (GOOD.replace("initialState", "firstState"), "obstacle 7: no initialState"),
        (GOOD.replace("<x>200</x>", "<x>2e6</x>"), "spread over more than 100 km"),
        (GOOD.replace("<y>2</y>", ""), "lanelet 1: line 2 <point>: no <y>"),
        (GOOD.replace("leftBound", "leftSide"), "lanelet 1: its left bound has 0 points"),
    ],
)
def test_bad_file_names_file_place_and_reason(tmp_path, text, reason):
    path = tmp_path / "bad.xml"
    path.write_text(text)
    with pytest.raises(SceneError) as caught:
        CommonRoadScenes(path)
    assert "bad.xml" in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.8, 0.99])
def test_cut_file_names_the_line(tmp_path, share):
    path = tmp_path / "cut.xml"
    path.write_text(GOOD[: int(len(GOOD) * share)])
    with pytest.raises(SceneError, match=r"cut.xml: line \d+: not well-formed XML, perhaps cut"):
        CommonRoadScenes(path)


def test_folder_with_a_bad_file_gives_the_others(tmp_path):
    write(tmp_path / "a.xml", ROAD + obstacle(7, EGO))
    (tmp_path / "b.xml").write_text("<commonRoad")
    scenes = CommonRoadScenes(tmp_path)
    assert scenes.ids == ("a.ego-7",)
    assert [bad.file for bad in scenes.skipped] == ["b.xml"]
    with pytest.raises(SceneError, match="no scene 'b.ego-7'; there are 1"):
        scenes.load("b.ego-7")


def test_nothing_usable_is_an_error(tmp_path):
    with pytest.raises(SceneError, match="no \\*.xml in this folder"):
        CommonRoadScenes(tmp_path)
    with pytest.raises(SceneError, match="nowhere.xml: cannot be read"):
        CommonRoadScenes(tmp_path / "nowhere.xml")
    (tmp_path / "b.xml").write_text("<commonRoad")
    with pytest.raises(SceneError, match="none of 1 files can be used: b.xml: line 1"):
        CommonRoadScenes(tmp_path)


def test_outside_entity_is_not_read(tmp_path):
    (tmp_path / "secret.txt").write_text("24.0")
    entity = f'<!DOCTYPE commonRoad [<!ENTITY s SYSTEM "{(tmp_path / "secret.txt").as_uri()}">]>'
    (tmp_path / "a.xml").write_text(entity + GOOD.replace("<x>24</x>", "<x>&s;</x>"))
    with pytest.raises(SceneError, match="document type"):
        CommonRoadScenes(tmp_path / "a.xml")


@settings(
    max_examples=120,
    deadline=timedelta(seconds=5),
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    at=st.integers(0, len(GOOD)),
    length=st.integers(0, 40),
    new=st.sampled_from(["", "9", "-", "e5", "nan", "<x>", "</x>", "\0", "1e308", "é", "<point/>", "<shape/>", "&a;"]),
)
def test_mutated_file_is_read_or_refused(tmp_path, at, length, new):
    path = tmp_path / "a.xml"
    path.write_text(GOOD[:at] + new + GOOD[at + length :], encoding="utf-8")
    try:
        scenes = CommonRoadScenes(path)
    except SceneError as err:
        assert "a.xml" in str(err)  # noqa: PT017
    else:
        for name in scenes.ids:
            assert scenes.load(name).area.contains(ego_boxes(scenes.load(name))).all()


# ---------------------------------------------------------------- real recordings


@pytest.fixture(scope="module")
def recordings() -> CommonRoadScenes:
    return CommonRoadScenes(DATA)


@needs_data
def test_recordings_load(recordings):
    reasons = {bad.file.split("-")[0]: bad.reason for bad in recordings.skipped}
    assert set(reasons) == {"DEU_Starnberg", "OSC_PedestrianCollision"}
    assert "no moving obstacles" in reasons["DEU_Starnberg"]
    # The car hits the pedestrian in the recording.
    assert "1 overlap another recorded object" in reasons["OSC_PedestrianCollision"]
    assert len({name.split(".ego-")[0] for name in recordings.ids}) == 12
    assert len(recordings.ids) == 41


@needs_data
def test_recorded_egos_stay_on_the_road_and_clear(recordings):
    for name in recordings.ids:
        scene = recordings.load(name)
        boxes = ego_boxes(scene)
        assert scene.area.contains(boxes).all(), name
        actors = scene.actors
        for a in range(len(actors.first)):
            there = np.arange(actors.first[a], min(actors.last[a] + 1, len(boxes)))
            size = np.tile(actors.size[a], (len(there), 1))
            assert not boxes_overlap(boxes[there], np.column_stack([actors.tracks[a, there, :3], size])).any(), (
                name,
                a,
            )


@needs_data
def test_recorded_logs_are_sensible(recordings):
    for name in recordings.ids:
        scene = recordings.load(name)
        # Speeds agree with the distance driven, up to the noise of positions.
        driven = np.linalg.norm(np.diff(scene.ego_log[:, :2], axis=0), axis=1).sum()
        assert driven == pytest.approx(scene.ego_log[:-1, 3].sum() * 0.1, rel=0.06), name
        # The path stays within 0.6 m of a smooth route that goes on for 100 m.
        assert np.linalg.norm(scene.ego_log[:, None, :2] - scene.route, axis=2).min(axis=1).max() < 0.6, name
        rest = np.linalg.norm(scene.route - scene.ego_log[-1, :2], axis=1).argmin()
        assert np.linalg.norm(np.diff(scene.route[rest:], axis=0), axis=1).sum() > 100.0, name


@needs_data
def test_splits_of_recordings_share_no_file(recordings):
    files = [{i.split(".ego-")[0] for i in recordings.split(name)} for name in ("train", "val", "test")]
    assert all(files)
    assert sum(map(len, files)) == len(set.union(*files)) == 12


@needs_data
@pytest.mark.parametrize("control_period_us", [100_000, 200_000])
def test_log_replay_follows_its_track_and_touches_nobody(control_period_us):
    # The whole recordings, however long; the worst of 41 is 0.12 m.
    spec = LogReplayConfig().spec()
    for split in ("train", "val", "test"):
        dataset = DatasetSection("commonroad", str(DATA), split=split)
        simulator = EmbeddedConfig(control_period_us=control_period_us, end_on=[]).build(spec, dataset, 16, ())
        requests = [EpisodeRequest(scene_id, horizon_ticks=1000) for scene_id in simulator.spec.scenes]
        collector = Collector(DrivingCore(simulator, {}, spec), LogReplayConfig().build())
        for episode in collector.collect(requests, Sampling("mean")):
            measures, name = episode.measures, episode.request.scene_id
            distance = measures["distance_to_gt_m"]
            assert distance.value[distance.valid].max() < 0.2, name
            assert measures["collision_count"].aggregate() == 0.0, name
            assert measures["offroad_count"].aggregate() == 0.0, name
            assert not episode.initial_fault, name
