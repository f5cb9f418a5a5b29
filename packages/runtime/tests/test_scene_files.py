"""Scene files: what is written reads as the same, strangers' files are read or refused, bare maps can be driven."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import stat
import subprocess
import sys
import time
import zipfile
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alpagym_runtime.envs.core import DrivingCore
from alpagym_runtime.errors import SceneError
from alpagym_runtime.geometry import area_from_polygons
from alpagym_runtime.policies.config import LogReplayConfig
from alpagym_runtime.rollouts.collector import Collector
from alpagym_runtime.run_config import DatasetSection
from alpagym_runtime.simulators.embedded.archive import JSON_BYTES_MAX
from alpagym_runtime.simulators.embedded.config import EmbeddedConfig
from alpagym_runtime.simulators.embedded.dataset import open_source
from alpagym_runtime.simulators.embedded.lane_map import MERGE, ZEBRA, Agent, Lane, LaneMap, Signals, Stop
from alpagym_runtime.simulators.embedded.map_placement import east_north_up
from alpagym_runtime.simulators.embedded.opendrive_writer import write_opendrive
from alpagym_runtime.simulators.embedded.scene import KINDS, Actors, Scene, Vehicle
from alpagym_runtime.simulators.embedded.scene_check import draw_scene, problems
from alpagym_runtime.simulators.embedded.scene_files import read_scene
from alpagym_runtime.simulators.embedded.scene_folder import SceneFolder
from alpagym_runtime.simulators.embedded.scene_writer import write_scene
from alpagym_runtime.types import EpisodeRequest, Sampling

SHARED = Path(__file__).parents[3] / ".." / "shared"
MAPS = SHARED / "data" / "opendrive"
EXAMPLE = SHARED / "examples" / "make_usdz_scene.py"
needs_maps = pytest.mark.skipif(not MAPS.is_dir(), reason="no folder of OpenDRIVE maps beside the repository")
needs_example = pytest.mark.skipif(not EXAMPLE.is_file(), reason="no example of an AlpaSim scene beside the repository")


def straight_map(length=300.0):
    x = np.arange(0.0, length + 1.0, 1.5)
    ahead = np.column_stack([x, np.full_like(x, -1.75)])
    lanes = (Lane(0, ahead), Lane(1, (ahead + np.array([0.0, 3.5]))[::-1].copy()))
    surface = (np.array([[0.0, -3.5], [length, -3.5], [length, 3.5], [0.0, 3.5]]),)
    return LaneMap(lanes, surface, Signals(60.0, np.array([[0.0, 25.0]]), 3.0, np.array([[200.0, -4.0, 0.0, 0.0]])))


def small_scene(scene_id="made", lane_map=None, steps=40, handover=16):
    """10 m/s along the right lane for 4 s, a car ahead, a person who is there for a second, a sign."""
    lane_map = straight_map() if lane_map is None else lane_map
    k = np.arange(steps + 1)
    log = np.column_stack([20.0 + k, np.full(len(k), -1.75), 0.001 * np.sin(k), np.full(len(k), 10.0)])
    tracks = np.zeros((3, steps + 11, 4))
    tracks[0] = np.column_stack([60.0 + 0.9 * np.arange(steps + 11), *np.tile([[-1.75], [6.28], [9.0]], steps + 11)])
    tracks[1, 5:16] = [50.0, 6.0, -1.5, 1.25]
    tracks[2] = [80.0, -6.0, 0.3, 0.0]
    path = np.column_stack([np.arange(200.0), np.full(200, -1.75)])
    stops = (
        Stop(150.0, 0),
        Stop(160.0, -1, (160.0, 1.0)),
        Stop(170.0, ZEBRA, (173.0, 0.0)),
        Stop(190.0, MERGE, (190.0, -1.75)),
    )
    agents = (
        Agent(path, 60.0, 9.0, 12.0, 0, 4.5, 1.8, 0.1, 1, 0, 3.25, stops),
        Agent(path[:50], 1.0, 1.25, 1.5, KINDS.index("pedestrian"), 0.6, 0.6, yields_to_cars=True),
        Agent(path[:2], 0.0, 0.0, 0.0, KINDS.index("static"), 0.4, 0.5),
    )
    return Scene(
        scene_id,
        "made.straight",
        log,
        handover,
        path[5:],
        area_from_polygons(list(lane_map.surface)),
        Actors(
            tracks,
            np.array([0, 5, 0]),
            np.array([steps + 10, 15, steps]),
            np.array([[4.5, 1.8], [0.6, 0.6], [0.4, 0.5]]),
            np.array([KINDS.index(kind) for kind in ("car", "pedestrian", "static")]),
        ),
        Vehicle(4.7, 1.9, 1.0, 2.8),
        12.5,
        agents,
        lane_map.signals,
        stops[:1],
        lane_map,
    )


def assert_same_scene(read, written):
    for name in ("scene_id", "family", "handover", "vehicle", "speed_limit_mps", "stops"):
        if name != "stops":
            assert getattr(read, name) == getattr(written, name)
    for name in ("ego_log", "route"):
        np.testing.assert_array_equal(getattr(read, name), getattr(written, name))
    for name in ("segments", "band_offsets", "band_segments", "band_low_m", "band_height_m"):
        np.testing.assert_array_equal(getattr(read.area, name), getattr(written.area, name))
    for name in ("first", "last", "size", "kind"):
        np.testing.assert_array_equal(getattr(read.actors, name), getattr(written.actors, name))
    assert read.actors.tracks.shape == written.actors.tracks.shape
    for a in range(len(written.actors.first)):
        part = slice(written.actors.first[a], written.actors.last[a] + 1)
        np.testing.assert_array_equal(read.actors.tracks[a, part], written.actors.tracks[a, part])
    # NaN is no conflict, and unequal to itself: compared as text.
    assert repr(read.stops) == repr(written.stops)
    assert len(read.agents) == len(written.agents)
    for a, b in zip(read.agents, written.agents, strict=True):
        np.testing.assert_array_equal(a.path, b.path)
        assert repr(dataclasses.replace(a, path=b.path)) == repr(b)
    for name in ("cycle_s", "yellow_s", "green_s", "heads"):
        np.testing.assert_array_equal(getattr(read.signals, name), getattr(written.signals, name))


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("name", ["scene.usdz", "folder"])
def test_a_written_scene_reads_as_the_same(tmp_path, name):
    written = small_scene()
    write_scene(written, tmp_path / name)
    read = read_scene(tmp_path / name)
    assert_same_scene(read, written)
    # Rows outside an actor's interval are zero here as there, so even the receipt's hash is the same.
    zeroed = written.actors.tracks.copy()
    zeroed[2, 41:] = 0.0
    same = dataclasses.replace(written, actors=dataclasses.replace(written.actors, tracks=zeroed))
    assert read.content_hash == same.content_hash
    assert read.lane_map is not None
    assert len(read.lane_map.lanes) == 2


def test_a_scene_without_a_map_or_traffic_survives(tmp_path):
    bare = dataclasses.replace(small_scene(), lane_map=None, actors=Actors.none(), agents=())
    write_scene(bare, tmp_path / "bare.usdz")
    read = read_scene(tmp_path / "bare.usdz")
    assert_same_scene(read, bare)
    assert read.lane_map is None
    assert read.content_hash == bare.content_hash


def test_the_same_scene_gives_the_same_bytes_in_stored_entries(tmp_path):
    write_scene(small_scene(), tmp_path / "a.usdz")
    write_scene(small_scene(), tmp_path / "b.usdz")
    assert (tmp_path / "a.usdz").read_bytes() == (tmp_path / "b.usdz").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.usdz") as file:
        assert {info.compress_type for info in file.infolist()} == {zipfile.ZIP_STORED}
        rig = json.loads(file.read("rig_trajectories.json"))
    assert np.array(rig["T_world_base"]).shape == (4, 4)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_existing_folder_is_not_written_into(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileExistsError, match="taken exists"):
        write_scene(small_scene(), tmp_path / "taken")


def test_procedural_scenes_survive(tmp_path):
    source = open_source(DatasetSection())
    for scene_id in source.ids("train")[:3]:
        written = source.load(scene_id)
        write_scene(written, tmp_path / "s.usdz")
        assert_same_scene(read_scene(tmp_path / "s.usdz"), written)


# ---------------------------------------------------------------- AlpaSim's layout


@needs_example
def test_a_scene_that_alpasim_loads_loads_here(tmp_path):
    path = tmp_path / "example.usdz"
    subprocess.run([sys.executable, EXAMPLE, path, "--duration", "8"], check=True, cwd=tmp_path)
    scene = read_scene(path)
    # 8 s at 8 m/s along y = -1.85, in the first of two lanes of 3.7 m; the lead starts 30 m ahead at 7.2 m/s.
    assert scene.scene_id == "synthetic-straight-0"
    np.testing.assert_allclose(scene.ego_log[[0, -1]], [[0, -1.85, 0, 8], [64, -1.85, 0, 8]], atol=1e-6)
    np.testing.assert_allclose(scene.actors.tracks[0, 10], [37.2, -1.85, 0.0, 7.2], atol=1e-6)
    assert scene.actors.last[0] == 80
    # Box 5.393 m around 1.4 m: it begins 1.2965 m behind the rear axle.
    assert scene.vehicle.rear_overhang_m == pytest.approx(1.2965)
    np.testing.assert_allclose(scene.route[:, 1], -1.85, atol=1e-6)
    assert scene.route[-1, 0] == pytest.approx(64.0 + 109.0)
    assert problems(scene) == []


def members_of(path):
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def pack(path, members, **options):
    with zipfile.ZipFile(path, "w", **options) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("written") / "scene.usdz"
    write_scene(small_scene(), path)
    return members_of(path)


def recorded(written):
    """The same scene without our member, as a recording of AlpaSim's would be."""
    return {name: data for name, data in written.items() if name != "alpagym.json"}


def test_without_our_member_it_is_a_recording(tmp_path, written):
    scene = read_scene(pack(tmp_path / "r.usdz", recorded(written)))
    assert scene.scene_id == "made"
    np.testing.assert_allclose(scene.ego_log[:, :2], small_scene().ego_log[:, :2], atol=1e-9)
    assert scene.agents == ()
    # The person stands at y = 6 from 0.5 to 1.5 s.
    assert (scene.actors.first[1], scene.actors.last[1], KINDS[scene.actors.kind[1]]) == (5, 15, "pedestrian")


def test_a_map_on_the_earth_is_moved_to_the_local_frame(tmp_path, written):
    # The local frame lies 30 m east and 40 m north of the map's origin, and is turned by 90 degrees.
    at = east_north_up(math.radians(48.0), math.radians(11.0))
    local = np.array([[0.0, -1.0, 0.0, 30.0], [1.0, 0.0, 0.0, 40.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    members = recorded(written)
    rig = json.loads(members["rig_trajectories.json"])
    rig["T_world_base"] = (at @ local).tolist()
    members["rig_trajectories.json"] = json.dumps(rig).encode()
    members["map.xodr"] = write_opendrive(straight_map(), geo_reference="+proj=tmerc +lat_0=48 +lon_0=11")
    scene = read_scene(pack(tmp_path / "m.usdz", members))
    # The map's (0, -1.75) is (-30, -41.75) from there; turned back by 90 degrees: (-41.75, 30).
    assert scene.lane_map is not None
    np.testing.assert_allclose(scene.lane_map.lanes[0].centre[0], [-41.75, 30.0], atol=1e-5)
    # So the drive is beside the road, and its strip was added to the area.
    assert scene.family == "recorded.straight.widened"


def test_samples_between_the_grid_are_interpolated(tmp_path, written):
    members = recorded(written)
    rig = json.loads(members["rig_trajectories.json"])
    times = rig["rig_trajectories"][0]["T_rig_world_timestamps_us"]
    # 25 samples a second: 40 ms apart instead of 100, so 41 samples last 1.6 s and the car drives at 25 m/s.
    rig["rig_trajectories"][0]["T_rig_world_timestamps_us"] = [times[0] + 40_000 * k for k in range(len(times))]
    members["rig_trajectories.json"] = json.dumps(rig).encode()
    scene = read_scene(pack(tmp_path / "g.usdz", members))
    assert len(scene.ego_log) == 17
    np.testing.assert_allclose(scene.ego_log[:2, 0], [20.0, 22.5], atol=1e-9)
    np.testing.assert_allclose(scene.ego_log[:, 3], 25.0, atol=0.01)


# ---------------------------------------------------------------- bad input


def edited(members, name, edit):
    data = json.loads(members[name])
    edit(data)
    return members | {name: json.dumps(data).encode()}


def first_track(data):
    return data["sequence"]["tracks_data"]


@pytest.mark.parametrize(
    ("name", "edit", "place"),
    [
        ("alpagym.json", lambda d: d.update(version=2), "alpagym.json.version: 2; this reader knows 1"),
        ("alpagym.json", lambda d: d.pop("route"), "alpagym.json: no 'route'"),
        ("alpagym.json", lambda d: d.update(handover=40), "alpagym.json.handover: 40"),
        ("alpagym.json", lambda d: d.update(handover=True), "alpagym.json.handover: True"),
        ("alpagym.json", lambda d: d["route"].__setitem__(3, [0.0]), "alpagym.json.route"),
        ("alpagym.json", lambda d: d["ego"].pop(), "alpagym.json.ego: numbers of shape [40, 2], expected [41, 2]"),
        ("alpagym.json", lambda d: d["ego"][5].__setitem__(0, 2.0), "alpagym.json.ego[5]: not the heading"),
        ("alpagym.json", lambda d: d["area"].update(segments=[]), "an empty area is an error"),
        ("alpagym.json", lambda d: d["area"]["segments"][0].__setitem__(1, 1e300), "area.segments[0, 1]: not a finite"),
        ("alpagym.json", lambda d: d["agents"].pop(), "2 agents for 3 actors"),
        ("alpagym.json", lambda d: d["agents"][0]["stops"][0].__setitem__(1, 7), "stops[0][1]: 7, expected a whole"),
        ("alpagym.json", lambda d: d["agents"][0]["stops"][0].__setitem__(1, -4), "stops[0][1]: -4, expected a whole"),
        ("alpagym.json", lambda d: d["signals"].update(cycle_s=0.0), "greens must start before they end"),
        ("alpagym.json", lambda d: d["tracks"]["kinds"].__setitem__(0, "tank"), "kinds[0]: 'tank', expected car |"),
        ("alpagym.json", lambda d: d["vehicle"].update(wings=2), "vehicle: 'wings' is not known"),
        ("rig_trajectories.json", lambda d: d.update(rig_trajectories=[]), "rig_trajectories: 0 entries, expected 1"),
        (
            "rig_trajectories.json",
            lambda d: d["rig_trajectories"][0]["T_rig_world_timestamps_us"].__setitem__(3, 0),
            "T_rig_world_timestamps_us",
        ),
        ("sequence_tracks.json", lambda d: d.update(other={}), "exactly one sequence"),
        (
            "sequence_tracks.json",
            lambda d: first_track(d)["tracks_id"].__setitem__(1, "0"),
            "tracks_id: id '0' occurs twice",
        ),
        (
            "sequence_tracks.json",
            lambda d: first_track(d)["tracks_poses"][0][0].__setitem__(slice(3, 7), [0, 0, 0, 0]),
            "neither zero nor NaN is a rotation",
        ),
    ],
)
def test_a_wrong_value_is_an_error_that_names_file_and_place(tmp_path, written, name, edit, place):
    path = pack(tmp_path / "bad.usdz", edited(written, name, edit))
    with pytest.raises(SceneError) as caught:
        read_scene(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert place in str(caught.value)


def replaced(old, new):
    return lambda members: members | {"rig_trajectories.json": members["rig_trajectories.json"].replace(old, new, 1)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced(b"20.0", b"NaN"), "NaN is not a number"),
        (replaced(b"20.0", b"-Infinity"), "-Infinity is not a number"),
        (lambda members: members | {"rig_trajectories.json": b"[" * 100_000}, "rig_trajectories.json: not whole"),
        (lambda members: members | {"rig_trajectories.json": b""}, "rig_trajectories.json: is empty"),
        (lambda members: {n: d for n, d in members.items() if n != "rig_trajectories.json"}, "no rig_trajectories"),
        (lambda members: recorded(members) | {"metadata.yaml": b"a: [b"}, "metadata.yaml: not YAML"),
        (
            lambda members: recorded(members) | {"metadata.yaml": b"!!python/object:os.system x"},
            "metadata.yaml: not YAML",
        ),
        (lambda members: recorded(members) | {"metadata.yaml": b"scene: x"}, "metadata.yaml: no 'scene_id'"),
        (lambda members: {n: d for n, d in recorded(members).items() if n != "map.xodr"}, "neither map.xodr nor"),
        (lambda members: members | {"map.xodr": b"<OpenDRIVE/>"}, "map.xodr: no <header>"),
    ],
)
def test_a_broken_member_is_an_error_that_names_it(tmp_path, written, change, reason):
    path = pack(tmp_path / "bad.usdz", change(written))
    with pytest.raises(SceneError) as caught:
        read_scene(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert reason in str(caught.value)


def test_a_log_that_is_too_short_is_an_error(tmp_path):
    write_scene(small_scene(steps=10, handover=3), tmp_path / "short.usdz")
    with pytest.raises(SceneError, match="a log of 1 s, expected 1.5 to 600"):
        read_scene(tmp_path / "short.usdz")


@pytest.mark.parametrize("cut", [0, 1, 30, 0.3, 0.7, 0.99])
def test_a_cut_file_is_an_error(tmp_path, written, cut):
    data = pack(tmp_path / "whole.usdz", written).read_bytes()
    path = tmp_path / "cut.usdz"
    path.write_bytes(data[: cut if isinstance(cut, int) else int(cut * len(data))])
    with pytest.raises(SceneError, match="cut.usdz: "):
        read_scene(path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../up.json", "a/../../b", "C:/x", "a\\..\\b"])
def test_a_member_that_leads_out_of_the_file_is_refused(tmp_path, written, name):
    path = tmp_path / "evil.usdz"
    pack(path, written)
    with zipfile.ZipFile(path, "a") as file:
        info = zipfile.ZipInfo("x")
        info.filename = name
        file.writestr(info, b"x")
    with pytest.raises(SceneError, match="leads out of the file; refused"):
        read_scene(path)


def test_a_link_in_a_zip_or_folder_is_refused(tmp_path, written):
    path = pack(tmp_path / "link.usdz", written)
    with zipfile.ZipFile(path, "a") as file:
        info = zipfile.ZipInfo("link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(info, "/etc/passwd")
    with pytest.raises(SceneError, match="'link' is a link or device; refused"):
        read_scene(path)
    folder = tmp_path / "folder"
    write_scene(small_scene(), folder)
    (folder / "sequence_tracks.json").unlink()
    (folder / "sequence_tracks.json").symlink_to("/etc/passwd")
    with pytest.raises(SceneError, match="sequence_tracks.json: a link"):
        read_scene(folder)


def test_a_bomb_is_refused_before_it_swells(tmp_path, written):
    start = time.monotonic()
    big = b"[" + b"0," * JSON_BYTES_MAX + b"0]"
    path = pack(tmp_path / "bomb.usdz", written | {"alpagym.json": big}, compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1_000_000
    with pytest.raises(SceneError, match="alpagym.json: 40000003 bytes are more than"):
        read_scene(path)
    # A directory that lies about the size: what is unpacked is counted, too.
    data = path.read_bytes().replace(len(big).to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    path.write_bytes(data)
    with pytest.raises(SceneError, match="alpagym.json: "):
        read_scene(path)
    assert time.monotonic() - start < 10.0


def test_a_directory_of_a_million_entries_is_refused(tmp_path):
    end = b"PK\x05\x06" + bytes(4) + b"\xff\xff\xff\xff" + (50_000_000).to_bytes(4, "little") + bytes(6)
    (tmp_path / "many.usdz").write_bytes(b"PK\x03\x04" + bytes(1000) + end)
    with pytest.raises(SceneError, match="a zip directory of 50000000 bytes"):
        read_scene(tmp_path / "many.usdz")


NUMBERS = [b"nan", b"1e308", b"-1", b"0", b"9" * 25, b"1e9", b"null", b"true", b'"x"', b"[]", b"{}", b"1.5"]


@st.composite
def mutated_members(draw, members):
    """One or two members with values or bytes replaced, cut or doubled."""
    changed = dict(members)
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(changed)))
        data = changed[name]
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.integers(0, 3))
        if kind <= 1:
            first = min((p for c in b",[:" if (p := data.find(bytes([c]), at)) >= 0), default=at) + 1
            last = min((p for c in b",]}" if (p := data.find(bytes([c]), first)) >= 0), default=first)
            data = data[:first] + draw(st.sampled_from(NUMBERS)) + data[last:]
        elif kind == 2:
            data = data[:at] + data[at + draw(st.integers(1, 300)) :]
        else:
            data = data[: at + draw(st.integers(1, 300))] + data[at:]
        changed[name] = data
    return changed


FUZZ = {
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
    "derandomize": True,
    "deadline": timedelta(seconds=10),
}


def survives(path):
    try:
        scene = read_scene(path)
    except SceneError as err:
        return str(err).startswith(str(path))
    return bool(np.isfinite(scene.ego_log).all() and len(scene.area.segments))


@settings(max_examples=300, **FUZZ)
@given(st.data())
def test_mutated_members_are_read_or_refused(tmp_path, written, data):
    original = written if data.draw(st.booleans()) else recorded(written)
    assert survives(pack(tmp_path / "fuzzed.usdz", data.draw(mutated_members(original))))


@settings(max_examples=200, **FUZZ)
@given(st.data())
def test_mutated_zips_are_read_or_refused(tmp_path, written, data):
    small = {name: text for name, text in written.items() if name != "map.xodr"}
    packed = io.BytesIO()
    pack(packed, small, compression=zipfile.ZIP_DEFLATED)
    content = bytearray(packed.getvalue())
    for _ in range(data.draw(st.integers(1, 8))):
        # The directory at the end and the headers are where a change tells.
        at = (
            data.draw(st.integers(1, min(600, len(content))))
            if data.draw(st.booleans())
            else data.draw(st.integers(1, len(content)))
        )
        content[-at] = data.draw(st.integers(0, 255))
    path = tmp_path / "fuzzed.usdz"
    path.write_bytes(content)
    assert survives(path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_mutated_members_are_read_or_refused(tmp_path, written):
    @settings(max_examples=5000, **FUZZ)
    @given(mutated_members(written))
    def check(members):
        assert survives(pack(tmp_path / "fuzzed.usdz", members))

    check()


# ---------------------------------------------------------------- folders


def test_the_rest_of_a_folder_loads_and_tells_what_was_skipped(tmp_path, written):
    for k in range(4):
        write_scene(small_scene(f"scene-{k}"), tmp_path / f"{k}.usdz")
    write_scene(small_scene("in-folder"), tmp_path / "a-folder")
    write_scene(small_scene("scene-1"), tmp_path / "twice.usdz")
    (tmp_path / "empty.usdz").write_bytes(b"")
    (tmp_path / "cut.usdz").write_bytes((tmp_path / "0.usdz").read_bytes()[:-500])
    (tmp_path / "short.xodr").write_bytes(write_opendrive(straight_map(60.0)))
    (tmp_path / "broken.xodr").write_bytes(b"<OpenDRIVE>")
    (tmp_path / "notes.txt").write_text("not a scene")
    with (tmp_path / "huge.xodr").open("wb") as file:
        os.truncate(file.fileno(), 200_000_000)
    start = time.monotonic()
    folder = SceneFolder(tmp_path)
    assert time.monotonic() - start < 10.0
    assert folder.ids == ("scene-0", "scene-1", "scene-2", "scene-3", "in-folder")
    reasons = {bad.file: bad.reason for bad in folder.skipped}
    assert set(reasons) == {"twice.usdz", "empty.usdz", "cut.usdz", "short.xodr", "broken.xodr", "huge.xodr"}
    assert reasons["empty.usdz"] == "the file is empty"
    assert reasons["twice.usdz"] == "scene id 'scene-1' is that of another file; change one"
    assert reasons["short.xodr"] == "too short: its longest way along the lanes has 60 m, 130 m are needed"
    assert "200000000 bytes are more than" in reasons["huge.xodr"]
    assert folder.split("train") == ("scene-0", "scene-3", "in-folder")
    assert (folder.split("val"), folder.split("test")) == (("scene-1",), ("scene-2",))
    assert folder.load("in-folder").scene_id == "in-folder"
    with pytest.raises(SceneError, match="no scene 'other'; there are 5, 'scene-0' first"):
        folder.load("other")


@pytest.mark.parametrize("name", ["absent", "notes.txt", "empty"])
def test_a_path_without_scenes_is_an_error(tmp_path, name):
    (tmp_path / "notes.txt").write_text("not a scene")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SceneError, match=name):
        SceneFolder(tmp_path / name)


# ---------------------------------------------------------------- maps and driving


def test_a_bare_map_can_be_driven(tmp_path):
    (tmp_path / "two way.xodr").write_bytes(write_opendrive(straight_map()))
    folder = SceneFolder(tmp_path / "two way.xodr")
    assert folder.ids[0] == "two_way.drive-000"
    scene = folder.load(folder.ids[0])
    assert scene.family == "map.straight"
    assert problems(scene) == []
    assert scene.content_hash == SceneFolder(tmp_path).load(scene.scene_id).content_hash
    assert draw_scene(scene, 200).shape == (200, 200, 3)


@needs_maps
def test_the_real_maps_load_and_drive():
    dataset = DatasetSection(source="files", path=str(MAPS))
    source = open_source(dataset)
    assert source.skipped == ()
    ids = [f"{path.stem}.drive-000" for path in sorted(MAPS.glob("*.xodr"))]
    for scene_id in ids:
        scene = source.load(scene_id)
        assert problems(scene) == []
        assert np.hypot(*np.diff(scene.route, axis=0).T).sum() >= 120.0
    spec = LogReplayConfig().spec()
    simulator = EmbeddedConfig().build(spec, dataclasses.replace(dataset, scene_ids=ids), len(ids), ())
    collector = Collector(DrivingCore(simulator, {}, spec), LogReplayConfig().build())
    episodes = list(collector.collect([EpisodeRequest(name, horizon_ticks=50) for name in ids], Sampling("mean")))
    assert len(episodes) == 6
    for episode in episodes:
        assert episode.measures["collision_count"].aggregate() == 0.0, episode.request.scene_id
        assert episode.measures["offroad_count"].aggregate() == 0.0, episode.request.scene_id
        assert not episode.initial_fault, episode.request.scene_id


@needs_maps
@pytest.mark.slow
def test_every_drive_on_the_real_maps_is_clean():
    folder = SceneFolder(MAPS)
    assert {scene_id: found for scene_id in folder.ids if (found := problems(folder.load(scene_id)))} == {}


def test_problems_are_told():
    scene = small_scene()
    tracks = scene.actors.tracks.copy()
    # The car stands in the way at 50 m: the ego's front, 3.7 m ahead of its axle, meets its rear at 2.5 s and more.
    tracks[0] = [50.0, -1.75, 0.0, 0.0]
    blocked = dataclasses.replace(scene, actors=dataclasses.replace(scene.actors, tracks=tracks))
    assert problems(scene) == []
    # 50 - 2.25 - 3.7 = 44.05 m; the ego is there 24.05 steps after 20 m: first inside at step 25.
    assert problems(blocked) == ["the recorded drive overlaps actor 0 (car) at 2.5 s"]
    off = dataclasses.replace(scene, ego_log=scene.ego_log - np.array([0.0, 4.0, 0.0, 0.0]))
    assert problems(off)[0] == "initial fault: the ego leaves the drivable area at the handover"
