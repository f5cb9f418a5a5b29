"""The renderer against a ray caster that shares only the rays and the tables of what things look like."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import cv2
import numpy as np
import pytest

from alpagym_runtime.errors import ConfigError
from alpagym_runtime.simulators.embedded.camera_config import PAI_CAMERAS, CamerasConfig, MountConfig, presets
from alpagym_runtime.simulators.embedded.dataset import Roads
from alpagym_runtime.simulators.embedded.lane_map import Marking
from alpagym_runtime.simulators.embedded.rendering import models, textures
from alpagym_runtime.simulators.embedded.rendering.ground import EDGE, TILE, cut_tiles
from alpagym_runtime.simulators.embedded.rendering.looks import looks_of
from alpagym_runtime.simulators.embedded.rendering.quads import FAR_HOUSE_M, FAR_THING_M
from alpagym_runtime.simulators.embedded.rendering.rays import build_table, mounted, ray_table
from alpagym_runtime.simulators.embedded.rendering.renderer import Jobs, Renderer, _split
from alpagym_runtime.simulators.embedded.rendering.scenery import CLASSES, STORE, SceneryStore, make_scenery
from alpagym_runtime.simulators.embedded.scene import KINDS
from alpagym_runtime.simulators.embedded.views import Moment, draw_plan, look, recorded_moment
from alpagym_runtime.testing.scenes import RoadUser, standing, straight_drive

pytestmark = pytest.mark.timeout(600)  # the first test may have to compile the renderer

SIZE = (90, 144)
PINHOLE = MountConfig(fov_deg=90.0, pitch_deg=-4.0)
CAMERAS = {
    "pinhole": PINHOLE,
    "tele": MountConfig(fov_deg=30.0),
    "opencv": MountConfig("opencv", 80.0, roll_deg=3.0, distortion=[-0.28, 0.09, 0.001, -0.002, -0.01]),
    "fisheye": MountConfig("fisheye", 190.0, yaw_deg=60.0, distortion=[0.02, -0.003], max_angle_deg=95.0),
    "ftheta": MountConfig(
        "ftheta", x_m=1.9, y_m=0.9, z_m=1.1, yaw_deg=40.0, width=1920, height=1080, distortion=[0.0, 900.0, 6.0, -30.0]
    ),
    "rear": MountConfig("ftheta", 120.0, yaw_deg=180.0, x_m=-0.8, max_angle_deg=75.0),
}
PLACES = {
    "car": (14.0, -4.0, 0.3, 4.5, 1.9),
    "truck": (24.0, 5.5, 3.0, 9.0, 2.5),
    "bus": (34.0, -7.0, 0.1, 11.0, 2.6),
    "motorcycle": (9.0, 3.5, 0.8, 2.1, 0.8),
    "bicycle": (11.0, 1.2, 1.4, 1.8, 0.6),
    "pedestrian": (7.0, -1.5, 2.0, 0.6, 0.6),
    "static": (17.0, 1.5, 0.5, 2.0, 1.0),
}
assert set(PLACES) == set(KINDS)


def everybody() -> Moment:
    """A straight road with one road user of each kind, and a car behind."""
    users = [
        RoadUser(standing(x, y, yaw, 40), (length, width), kind=k) for k, (x, y, yaw, length, width) in PLACES.items()
    ]
    users.append(RoadUser(standing(-14.0, 2.0, 0.1, 40), (4.4, 1.8)))
    return recorded_moment(straight_drive(users=users).build(), 10)


def crossing() -> Moment:
    """A crossing with signals; the recording's own traffic."""
    return recorded_moment(Roads({"test": 4}).load("road-test-000003"), 30)


# ---------------------------------------------------------------- the second renderer


def quads_of(moment: Moment, camera_local: np.ndarray):
    """Corner, right and down edge [Q,3] local, taper [Q,2], texture, its repeats [Q,2] and instance [Q], in float64."""
    scene, found = moment.scene, []
    table, bounds = models.models()
    scenery = STORE.get(scene, 0.05, "clear", 1 << 30)
    things = []
    for a in np.flatnonzero(moment.present):
        kind = int(scene.actors.kind[a])
        tall = models.HEIGHTS[kind] + (
            models.TALLER_CARS_M * looks_of(scene.scene_id, len(moment.present))[a, 9] if not kind else 0.0
        )
        x, y, yaw, speed, _ = moment.actors[a]
        swing = 0.24 * np.sin((x * np.cos(yaw) + y * np.sin(yaw)) * 2.0 * np.pi / 1.5) if speed > 0.15 else 0.0
        things.append((kind, (x, y, yaw), (*scene.actors.size[a], tall), a + 1, swing))
    # Beyond these distances nothing is drawn.
    eye = camera_local[:2]
    things = [thing for thing in things if np.hypot(*(np.array(thing[1][:2]) - eye)) < FAR_THING_M]
    things += [(len(KINDS), head[:3], (1.0, 1.0, 1.0), int(head[4]), 0.0) for head in scenery.heads]
    for kind, (x, y, yaw), size, name, swing in things:
        turn = np.array([[np.cos(yaw), -np.sin(yaw), 0.0], [np.sin(yaw), np.cos(yaw), 0.0], [0.0, 0.0, 1.0]])
        for row in table[bounds[kind, 0] : bounds[kind, 1]]:
            corner, right, down = (row[i : i + 6 : 2] * size + row[i + 1 : i + 6 : 2] for i in (0, 6, 12))
            corner[0] += row[models.SWING] * swing
            texture = max(int(row[models.TEXTURE]), 0)
            found.append(
                (
                    turn @ corner + [x, y, 0.0],
                    turn @ right,
                    turn @ down,
                    row[18:20],
                    texture,
                    (row[models.FLIP], 1.0),
                    name,
                )
            )
    for x, y, wide, tall, _, texture, name in scenery.trees:
        away = np.array([x, y]) - eye
        if np.hypot(*away) > FAR_HOUSE_M:
            continue
        side = np.array([away[1], -away[0], 0.0]) / np.hypot(*away)
        corner = np.array([x, y, tall]) - side * wide / 2.0
        found.append(
            (corner, side * wide, np.array([0.0, 0.0, -tall]), (0.0, 0.0), int(texture), (1.0, 1.0), int(name))
        )
    for wall in scenery.walls[np.hypot(*(scenery.walls[:, 17:19] - eye).T) < FAR_HOUSE_M]:
        found.append((wall[:3], wall[3:6], wall[6:9], (0.0, 0.0), int(wall[12]), wall[13:15], int(wall[15])))
    return found


def cast(moment: Moment, mount: MountConfig):
    """Depth [h,w] m along the rays and instance [h,w], ray by ray."""
    camera = mounted("view", mount, SIZE)
    rays, valid = ray_table(camera, *SIZE, 1)
    x, y, yaw = moment.pose
    turn = np.array([[np.cos(yaw), -np.sin(yaw), 0.0], [np.sin(yaw), np.cos(yaw), 0.0], [0.0, 0.0, 1.0]])
    rays = rays @ turn.T
    eye = turn @ camera.pose_rig_to_optical.position + [x, y, 0.0]
    with np.errstate(divide="ignore"):
        depth = np.where(rays[..., 2] < -0.0035, -eye[2] / rays[..., 2], np.inf)
    instance = np.zeros(SIZE, int)
    codes = textures.textures()[:, : 64 * 64, 3].reshape(-1, 64, 64)
    for corner, right, down, (low, high), texture, repeats, name in quads_of(moment, eye):
        normal = np.cross(down, right)
        if normal @ (eye - corner) <= 0.0:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            t = normal @ (corner - eye) / (rays @ normal)
            t = np.where(rays @ normal < 0.0, t, np.inf)
            at = eye + rays * t[..., None] - corner
            u, v = at @ right / (right @ right), at @ down / (down @ down)
            hit = (
                (t > 0.0)
                & (t < depth)
                & (v >= 0.0)
                & (v <= 1.0)
                & (u >= low * (1.0 - v))
                & (u <= 1.0 - high * (1.0 - v))
            )
        column, row = (
            np.floor(np.where(hit, p, 0.0) * n * 64).astype(int) % 64 for p, n in ((u, repeats[0]), (v, repeats[1]))
        )
        hit &= codes[texture, row, column] != textures.NOTHING
        depth, instance = np.where(hit, t, depth), np.where(hit, name, instance)
    return np.where(valid, depth, np.inf), np.where(valid, instance, 0)


def interior(*maps: np.ndarray) -> np.ndarray:
    """Pixels whose neighbours two pixels around all show the same thing, in each map."""
    good = np.ones(SIZE, bool)
    for m in maps:
        f = m.astype(np.float32)
        good &= cv2.dilate(f, np.ones((5, 5))) == cv2.erode(f, np.ones((5, 5)))
    return good


@pytest.mark.parametrize("camera", CAMERAS)
@pytest.mark.parametrize("make", [everybody, crossing])
def test_depth_and_instances_agree_with_the_ray_caster(make, camera):
    moment, mount = make(), CAMERAS[camera]
    view = look(moment, mount, SIZE, CamerasConfig(weather="clear"))
    depth, instance = cast(moment, mount)
    away = interior(view.instance, instance)
    # Silhouettes apart: holes in leaves and bicycles are blurred with distance in one of them only.
    assert (view.instance == instance).mean() > 0.97
    assert (view.instance == instance)[away].mean() > 0.9995
    same = away & (view.instance == instance)
    assert (np.isinf(view.depth_m) == np.isinf(depth))[same].all()
    finite = same & np.isfinite(depth)
    assert np.abs(view.depth_m[finite] / depth[finite] - 1.0).max() < 0.01
    assert len(np.unique(instance)) > (2 if camera in ("tele", "rear") else 4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_seen_as_its_class(kind):
    moment = everybody()
    view = look(moment, MountConfig(fov_deg=120.0), (180, 300), CamerasConfig(weather="clear"))
    mine = view.instance == KINDS.index(kind) + 1
    assert mine.sum() > 20
    named = {
        "car": "car",
        "truck": "large_vehicle",
        "bus": "large_vehicle",
        "pedestrian": "person",
        "static": "obstacle",
    }
    assert {CLASSES[c] for c in np.unique(view.semantic[mine])} == {named.get(kind, "two_wheeler")}


# ---------------------------------------------------------------- where things are


def test_a_point_ten_metres_ahead_lies_where_arithmetic_puts_it():
    # 1.5 m below the axis at 10 m: 540 + 1000 * 1.5 / 10 = 690.
    mount = MountConfig(
        x_m=0.0, z_m=1.5, width=1920, height=1080, focal_px=[1000.0, 1000.0], principal_px=[960.0, 540.0]
    )
    camera = mounted("front", mount, (1080, 1920))
    pixels, valid = camera.project_rig([[10.0, 0.0, 0.0], [10.0, 3.0, 0.0], [-10.0, 0.0, 0.0]])
    np.testing.assert_allclose(pixels[0], [960.0, 690.0], atol=1e-6)
    # 3 m to the left: 960 - 1000 * 3 / 10.
    np.testing.assert_allclose(pixels[1], [660.0, 690.0], atol=1e-6)
    assert valid.tolist() == [True, True, False]


def test_yaw_turns_left_pitch_up_and_roll_clockwise():
    def pixel(point, **turn):
        mount = MountConfig(x_m=0.0, z_m=1.5, width=200, height=100, focal_px=[100.0, 100.0], **turn)
        return mounted("c", mount, (100, 200)).project_rig(point)[0]

    ahead = [10.0, 0.0, 1.5]
    # tan 10 deg = 0.1763: what is ahead moves 17.6 px right when the camera turns left, down when it looks up.
    np.testing.assert_allclose(pixel(ahead, yaw_deg=10.0), [117.63, 50.0], atol=0.01)
    np.testing.assert_allclose(pixel(ahead, pitch_deg=10.0), [100.0, 67.63], atol=0.01)
    # A point to the right stands higher in the picture of a camera that leans to the right.
    assert pixel([10.0, -3.0, 1.5], roll_deg=10.0)[1] < 50.0


@pytest.mark.parametrize("camera", ["front", "front_wide", *PAI_CAMERAS])
def test_a_line_painted_along_the_recording_is_seen_where_the_path_projects(camera):
    bend = np.linspace(-40.0, 120.0, 161)
    path = np.stack([bend, 0.0016 * bend**2], axis=1)
    draft = straight_drive(half_width_m=40.0)
    log = draft.log.copy()
    scene = replace(draft.build(), ego_log=log, markings=(Marking(path, "solid"),))
    moment = recorded_moment(scene, 10)
    view = look(moment, camera, (320, 512), CamerasConfig(weather="clear"))
    line = np.argwhere((view.semantic == CLASSES.index("marking")) & (view.depth_m < 30.0))[:, ::-1] + 0.5
    near = path[(path[:, 0] > 5.0) & (path[:, 0] < 25.0)]
    pixels, valid = view.camera.project_rig(np.column_stack([near, np.zeros(len(near))]))
    seen = valid & (pixels >= 4.0).all(axis=1) & (pixels < [508.0, 316.0]).all(axis=1)
    if camera in ("camera_cross_left_120fov", "camera_cross_right_120fov"):
        assert seen.any() == (len(line) > 0)
    else:
        assert seen.sum() > 8
    for pixel in pixels[seen]:
        assert np.hypot(*(line - pixel).T).min() < 3.0


def test_the_plan_is_drawn_on_the_road_ahead_and_not_over_cars():
    moment = everybody()
    view = look(moment, MountConfig(fov_deg=90.0), (200, 320), CamerasConfig(weather="clear"))
    plan = np.stack([np.arange(1, 65) * 0.4, np.zeros(64)], axis=1)
    changed = (draw_plan(view, plan) != view.rgb).any(axis=-1)
    assert changed[150:, 130:190].mean() > 0.2
    assert not changed[:90].any()
    assert not changed[view.instance > 0].any()


# ---------------------------------------------------------------- looks


def test_no_picture_is_constant_and_weathers_differ():
    for moment in (everybody(), crossing()):
        pictures = {}
        for weather in ("clear", "low_sun", "dusk", "fog"):
            pictures[weather] = look(moment, "front", (96, 160), CamerasConfig(weather=weather)).rgb
            assert pictures[weather].std() > 12.0
        names = list(pictures)
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                assert np.abs(pictures[a].astype(int) - pictures[b]).mean() > 8.0, (a, b)


def test_fog_hides_what_is_far():
    clear, fog = (look(crossing(), "front", (96, 160), CamerasConfig(weather=w)).rgb[30:46] for w in ("clear", "fog"))
    assert fog.std() < 0.7 * clear.std()


def test_pictures_do_not_depend_on_the_number_of_threads():
    moment = crossing()
    camera = mounted("front", MountConfig(), (48, 96))
    from alpagym_runtime.simulators.embedded.rendering.renderer import Eye

    eye = Eye(camera, 48, 96)
    scenery = make_scenery(moment.scene, eye.texel_m, "scene")
    moments = [recorded_moment(moment.scene, step) for step in range(20, 27)]
    jobs = Jobs(
        np.arange(7),
        np.stack([m.pose for m in moments]),
        np.array([m.time_us * 1e-6 for m in moments]),
        np.stack([m.actors for m in moments]),
        np.stack([m.present for m in moments]),
    )
    found = []
    for threads in (1, 2, 5):
        out = np.zeros((7, 48, 96, 3), np.uint8)
        renderer = Renderer(threads)
        renderer.draw(eye, [(scenery, jobs)], out)
        renderer.close()
        found.append(out)
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()
    assert len({picture.tobytes() for picture in found[0]}) == 7
    assert [len(part.places) for part in _split(jobs, 3)] == [2, 2, 3]


def test_another_process_renders_the_same_bytes():
    code = (
        "import hashlib, json, numpy as np\n"
        "from alpagym_runtime.simulators.embedded.dataset import Roads\n"
        "from alpagym_runtime.simulators.embedded.views import look, recorded_moment\n"
        "v = look(recorded_moment(Roads({'test': 4}).load('road-test-000003'), 30), 'front', (64, 96))\n"
        "print(json.dumps([hashlib.sha256(a.tobytes()).hexdigest() for a in (v.rgb, v.depth_m, v.instance)]))"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in "ab"
    }
    assert len(outputs) == 1
    assert len(set(json.loads(outputs.pop()))) == 3


# ---------------------------------------------------------------- sceneries


@pytest.mark.parametrize("edge", [0, 15, 16, 17, 40])
def test_tiles_hold_the_ground_that_was_cut(edge):
    """One material up to column `edge`, another beyond: only tiles that see both are kept, the others are an entry."""
    entries = np.full((2 * TILE + 1, 3 * TILE + 1), 7, np.uint8)
    entries[:, edge:] = 9
    cells = np.zeros((2, 3), np.int32)
    tiles = cut_tiles(entries, cells, 5)
    # Tile t has the columns 16 t to 16 t + 16; its neighbour's first one belongs to it.
    mixed = [t for t in range(3) if TILE * t < edge <= TILE * t + TILE]
    assert sorted(cells[cells >= 256]) == list(range(256 + 5, 256 + 5 + 2 * len(mixed)))
    for row in range(2):
        for t in range(3):
            part = entries[TILE * row : TILE * row + EDGE, TILE * t : TILE * t + EDGE]
            cell = cells[row, t]
            np.testing.assert_array_equal(tiles[cell - 261] if cell >= 256 else np.full_like(part, cell), part)
            assert (cell >= 256) == (t in mixed)


@pytest.mark.parametrize("camera", ["pinhole", "ftheta", "rear"])
def test_runs_of_a_level_cover_the_samples_of_each_row(camera):
    table = build_table(mounted(camera, CAMERAS[camera], SIZE), *SIZE, 1, 0.1, 4)
    for row in range(SIZE[0]):
        runs = table.runs[table.run_starts[row] : table.run_starts[row + 1] + 1]
        counts = np.diff(runs[:, 0])
        assert counts.sum() == table.starts[row + 1, 1] - table.starts[row, 1]
        assert (counts > 0).all()
        # Each pixel's samples have the pixel's level.
        pixels = table.columns[table.starts[row, 0] : table.starts[row + 1, 0]]
        taps = table.taps[table.starts[row, 0] : table.starts[row + 1, 0]]
        wanted = np.repeat(table.level[row, pixels], taps)
        np.testing.assert_array_equal(np.repeat(runs[:-1, 1], counts), wanted)


def test_the_store_stays_within_its_bound_and_makes_a_scene_once():
    store = SceneryStore()
    scenes = [straight_drive().build(f"hand-made-{k}") for k in range(4)]
    first = store.get(scenes[0], 0.1, "clear", 1 << 30)
    assert store.get(scenes[0], 0.1, "clear", 1 << 30) is first
    assert store.get(scenes[0], 0.1, "fog", 1 << 30) is not first
    for scene in scenes:
        store.get(scene, 0.1, "clear", 3 * first.nbytes)
        assert store.nbytes <= 3.5 * first.nbytes


def test_a_scene_takes_little_memory():
    # 448 of them fit into 0.6 GB.
    scenery = make_scenery(straight_drive().build(), 0.1, "scene")
    assert scenery.nbytes < 1_300_000


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "pinhol"}, "pinhole"),
        ({"fov_deg": 180.0}, "fov_deg"),
        ({"period_us": 33_333}, "period_us"),
        ({"focal_px": [800.0, 800.0]}, "width"),
        ({"width": 640}, "height"),
        ({"model": "fisheye", "distortion": [0.1] * 5}, "at most 4"),
        ({"width": 640, "height": 480, "focal_px": [500.0]}, "focal_px"),
    ],
)
def test_wrong_mounts_are_refused_by_name(options, says):
    with pytest.raises(ConfigError, match=says):
        MountConfig(**options)


@pytest.mark.parametrize("name", presets())
def test_every_preset_renders(name):
    view = look(crossing(), name, (48, 80))
    assert view.rgb.shape == (48, 80, 3)
    assert view.rgb.dtype == np.uint8
    assert view.rgb.std() > 5.0
