"""The OpenDRIVE reader and writer: hand-written roads with known numbers, hostile files, real maps where at hand."""

from __future__ import annotations

import dataclasses
import math
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import shapely
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alpagym_runtime.errors import SceneError
from alpagym_runtime.simulators.embedded.lane_map import (
    Building,
    Lane,
    LaneMap,
    Marking,
    Signals,
)
from alpagym_runtime.simulators.embedded.opendrive import read_opendrive, read_opendrive_map
from alpagym_runtime.simulators.embedded.opendrive_line import poses
from alpagym_runtime.simulators.embedded.opendrive_writer import write_opendrive
from alpagym_runtime.simulators.embedded.opendrive_xml import Piece, Placement

DATA = Path(__file__).parents[3] / ".." / "shared" / "data" / "opendrive"
MAPS = ("curve_r100", "e6mini", "fabriksgatan", "multi_intersections", "soderleden", "straight_500m")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no folder of OpenDRIVE maps beside the repository")


def lane(number, kind="driving", width=3.5, before=None, after=None, extra=""):
    link = f'<predecessor id="{before}"/>' if before is not None else ""
    link += f'<successor id="{after}"/>' if after is not None else ""
    cross = f'<width sOffset="0" a="{width}" b="0" c="0" d="0"/>' if number else ""
    return f'<lane id="{number}" type="{kind}"><link>{link}</link>{cross}{extra}</lane>'


def section(lanes, s=0.0):
    left = "".join(text for number, text in lanes if number > 0)
    right = "".join(text for number, text in lanes if number < 0)
    centre = "".join(text for number, text in lanes if number == 0) or lane(0, "none")
    return f'<laneSection s="{s}"><left>{left}</left><center>{centre}</center><right>{right}</right></laneSection>'


def lanes(*numbers, **options):
    return [(n, lane(n, **options)) for n in sorted(numbers, reverse=True)]


def road(name, length, sections, geometry=None, links="", junction="-1", rule="", extra="", start=(0, 0, 0), offset=""):
    geometry = geometry or "<line/>"
    x, y, hdg = start
    said = f' rule="{rule}"' if rule else ""
    return (
        f'<road id="{name}" length="{length}" junction="{junction}"{said}><link>{links}</link>'
        f'<planView><geometry s="0" x="{x}" y="{y}" hdg="{hdg}" length="{length}">{geometry}</geometry></planView>'
        f"<lanes>{offset}{''.join(sections)}</lanes>{extra}</road>"
    )


def xodr(*parts, minor=7, header=""):
    head = f'<header revMajor="1" revMinor="{minor}" name="test">{header}</header>'
    return f"<OpenDRIVE>{head}{''.join(parts)}</OpenDRIVE>".encode()


STRAIGHT = xodr(road("1", 100, [section(lanes(1, -1, -2))]))


def joined(kind, target, contact=""):
    at = f' contactPoint="{contact}"' if contact else ""
    return f'elementType="{kind}" elementId="{target}"{at}/>'


# ---------------------------------------------------------------- lines


def at_end(kind, length, numbers, **options):
    return poses((Piece(0.0, 0.0, 0.0, 0.0, length, kind, numbers, **options),), np.array([length]))[0]


def test_a_quarter_circle_to_the_left_ends_ahead_and_left():
    # Curvature 1/10 over 10 pi/2 m: x = y = 10, heading pi/2.
    np.testing.assert_allclose(at_end("arc", 5.0 * math.pi, (0.1,)), [10.0, 10.0, math.pi / 2.0], atol=1e-12)


def test_a_clothoid_ends_where_fresnel_says():
    # Curvature 0 to pi over 1 m: the heading is pi s2/2, so C(1) = 0.7798934 and S(1) = 0.4382591 (Fresnel integrals).
    expected = [0.7798934003768228, 0.4382591473903548, math.pi / 2.0]
    np.testing.assert_allclose(at_end("spiral", 1.0, (0.0, math.pi)), expected, atol=1e-12)


def test_a_clothoid_of_constant_curvature_is_an_arc():
    np.testing.assert_allclose(at_end("spiral", 30.0, (0.05, 0.05)), at_end("arc", 30.0, (0.05,)), atol=1e-10)


def test_poly3_is_measured_along_the_curve():
    # v = u: a straight line at 45 degrees; 10 m along it is u = v = 10/sqrt(2).
    side = 10.0 / math.sqrt(2.0)
    np.testing.assert_allclose(at_end("poly3", 10.0, (0.0, 1.0, 0.0, 0.0)), [side, side, math.pi / 4.0], atol=1e-9)


@pytest.mark.parametrize(("normalized", "scale"), [(True, 20.0), (False, 1.0)])
def test_param_poly3_runs_over_one_or_over_its_length(normalized, scale):
    # u = 20 p (or p), v = 0.05 u2 = 20 at the end; heading atan(2 · 0.05 · 20) = atan 2.
    numbers = (0.0, scale, 0.0, 0.0, 0.0, 0.0, 0.05 * scale**2, 0.0)
    end = at_end("paramPoly3", 20.0, numbers, normalized=normalized)
    np.testing.assert_allclose(end, [20.0, 20.0, math.atan(2.0)], atol=1e-12)


def test_pieces_follow_each_other_in_the_frame_of_their_start():
    pieces = (Piece(0.0, 5.0, 5.0, math.pi / 2.0, 10.0, "line"), Piece(10.0, 5.0, 15.0, math.pi, 10.0, "line"))
    np.testing.assert_allclose(
        poses(pieces, np.array([4.0, 13.0])), [[5, 9, math.pi / 2], [2, 15, math.pi]], atol=1e-12
    )


# ---------------------------------------------------------------- lanes


def test_right_lanes_run_along_the_road_and_left_ones_against_it():
    found = read_opendrive(STRAIGHT, "straight").lanes
    # In order of the file's numbers, from the left: 1, -1, -2, each 3.5 m wide.
    assert [(ln.centre[0, 0], ln.centre[-1, 0], ln.centre[0, 1]) for ln in found] == [
        (100.0, 0.0, 1.75),
        (0.0, 100.0, -1.75),
        (0.0, 100.0, -5.25),
    ]
    assert [(ln.left, ln.right) for ln in found] == [(-1, -1), (-1, 2), (1, -1)]


def test_left_hand_traffic_runs_the_other_way():
    found = read_opendrive(xodr(road("1", 50, [section(lanes(2, 1, -1))], rule="LHT")), "left").lanes
    # Lanes 2, 1 (left, along the road), -1 (against it). Seen from lane 1, lane 2 is on its left.
    assert [ln.centre[0, 0] for ln in found] == [0.0, 0.0, 50.0]
    assert [(ln.left, ln.right) for ln in found] == [(-1, 1), (0, -1), (-1, -1)]


def test_a_solid_line_forbids_a_change_and_a_one_sided_one_allows_it_once():
    def between(change):
        mark = f'<roadMark sOffset="0" type="solid" {change}/>'
        numbers = [(-1, lane(-1, extra=mark)), (-2, lane(-2))]
        return [(ln.left, ln.right) for ln in read_opendrive(xodr(road("1", 50, [section(numbers)])), "m").lanes]

    assert between("") == [(-1, -1), (-1, -1)]
    # "increase" is towards larger numbers: from -2 to -1, to the left.
    assert between('laneChange="increase"') == [(-1, -1), (0, -1)]


def test_lane_offset_and_width_polynomials_move_the_centre():
    # Offset 1 + 0.02 s; width 3 + 0.01 s. At 100 m: from 3 down to -1, so the centre is at 1; at 0: from 1 to -2, -0.5.
    width = '<width sOffset="0" a="3" b="0.01" c="0" d="0"/>'
    text = f'<lane id="-1" type="driving"><link/>{width}</lane>'
    offset = '<laneOffset s="0" a="1" b="0.02" c="0" d="0"/>'
    found = read_opendrive(xodr(road("1", 100, [section([(-1, text)])], offset=offset)), "m").lanes[0]
    assert found.centre[0].tolist() == [0.0, -0.5]
    np.testing.assert_allclose(found.centre[-1], [100.0, 1.0])
    np.testing.assert_allclose(found.width_m, 3.5)


def test_successors_cross_sections_roads_and_contact_points():
    first = road(
        "a",
        60,
        [section([(-1, lane(-1, after=-1))]), section([(-1, lane(-1, before=-1, after=1))], s=30.0)],
        links=f"<successor {joined('road', 'b', 'end')}",
    )
    # Road b comes the other way and ends where a ends: a's traffic goes on in its left lane.
    second = road(
        "b",
        40,
        [section([(1, lane(1, after=-1))])],
        links=f"<successor {joined('road', 'a', 'end')}",
        start=(100, 0, math.pi),
    )
    found = read_opendrive(xodr(first, second), "m").lanes
    assert [ln.successors for ln in found] == [(1,), (2,), ()]
    assert found[2].centre[0].tolist() == pytest.approx([60.0, -1.75])


def crossroads(priority="", signals=""):
    """Roads a (from the west), b (from the south) meet in junction 9 and leave on c (to the east)."""
    a = road("a", 50, [section(lanes(-1))], links=f"<successor {joined('junction', '9')}", extra=signals)
    b = road(
        "b",
        50,
        [section(lanes(-1))],
        links=f"<successor {joined('junction', '9')}",
        start=(61.75, -58.25, math.pi / 2),
    )
    c = road("c", 50, [section(lanes(-1))], links=f"<predecessor {joined('junction', '9')}", start=(70, 0, 0))
    ends = (
        '<predecessor elementType="road" elementId="{}" contactPoint="end"/>'
        + f"<successor {joined('road', 'c', 'start')}"
    )
    linked = [(-1, lane(-1, before=-1, after=-1))]
    straight = road("s", 20, [section(linked)], links=ends.format("a"), junction="9", start=(50, 0, 0))
    size = 8.25 * math.pi / 2
    turn = road(
        "t",
        size,
        [section(linked)],
        f'<arc curvature="{-1 / 8.25}"/>',
        links=ends.format("b"),
        junction="9",
        start=(61.75, -8.25, math.pi / 2),
    )
    connections = "".join(
        f'<connection id="{k}" incomingRoad="{incoming}" connectingRoad="{way}" contactPoint="start">'
        '<laneLink from="-1" to="-1"/></connection>'
        for k, (incoming, way) in enumerate((("a", "s"), ("b", "t")))
    )
    return xodr(a, b, c, straight, turn, f'<junction id="9">{connections}{priority}</junction>')


def test_a_junction_is_seen_through_and_turning_waits():
    found = read_opendrive(crossroads(), "m").lanes
    a, b, c, straight, turn = found
    assert (a.successors, b.successors, straight.successors, turn.successors) == ((3,), (4,), (2,), (2,))
    assert [ln.kind for ln in found] == ["driving", "driving", "driving", "turn", "turn"]
    assert (straight.yields_to, turn.yields_to, c.successors) == ((), (3,), ())


def test_the_files_priority_comes_before_ours():
    found = read_opendrive(crossroads(priority='<priority high="t" low="s"/>'), "m").lanes
    assert (found[3].yields_to, found[4].yields_to) == ((4,), ())


def test_a_light_governs_the_lane_that_ends_at_it():
    signals = '<signals><signal id="1" s="49" t="-4" dynamic="yes" orientation="+" type="1000001"/></signals>'
    made = read_opendrive(crossroads(signals=signals), "m")
    assert [ln.signal_group for ln in made.lanes] == [0, -1, -1, -1, -1]
    np.testing.assert_allclose(made.signals.heads, [[49.0, -4.0, 0.0, 0.0]])
    assert [mark.points.tolist() for mark in made.markings] == [[[50.0, 0.0], [50.0, -3.5]]]


def test_a_taper_ends_on_the_lane_that_it_joins():
    # Two lanes become one over the last 40 m; lane -2 shrinks to nothing beside -1 and is linked to it.
    shrinking = '<lane id="-2" type="driving"><link><successor id="-1"/></link><width sOffset="0" a="3.5"/>'
    shrinking += '<width sOffset="60" a="3.5" b="-0.0875"/></lane>'
    first = section([(-1, lane(-1, after=-1)), (-2, shrinking)])
    data = xodr(road("1", 200, [first, section([(-1, lane(-1, before=-1))], s=100.0)]))
    made = read_opendrive(data, "m")
    assert [ln.successors for ln in made.lanes] == [(2,), (2,), ()]
    np.testing.assert_allclose(made.lanes[1].centre[-1], made.lanes[2].centre[0], atol=1e-9)
    assert made.lanes[1].centre[0].tolist() == [0.0, -5.25]


def test_kinds_surface_and_speed():
    speed = '<speed sOffset="0" max="36" unit="km/h"/>'
    numbers = [(-1, lane(-1, extra=speed)), (-2, lane(-2, "biking", 1.5)), (-3, lane(-3, "sidewalk", 2.0))]
    made = read_opendrive(xodr(road("1", 50, [section(numbers)])), "m")
    assert [(ln.kind, round(ln.speed_limit_mps, 9)) for ln in made.lanes] == [
        ("driving", 10.0),
        ("bicycle", 13.9),
        ("walkway", 13.9),
    ]
    # Only the driving lane may be driven on: 50 m x 3.5 m.
    assert sum(shapely.Polygon(ring).area for ring in made.surface) == pytest.approx(175.0)
    assert len(made.sidewalks) == 1


def test_header_and_placement():
    header = (
        '<geoReference><![CDATA[+proj=tmerc +lat_0=48 +lon_0=11]]></geoReference><offset x="5" y="6" z="7" hdg="0.5"/>'
    )
    data = xodr(road("1", 50, [section(lanes(-1))]), header=header)
    made = read_opendrive_map(data, "m", Placement(10.0, 20.0, math.pi / 2.0))
    assert made.geo_reference == "+proj=tmerc +lat_0=48 +lon_0=11"
    assert made.offset == (5.0, 6.0, 7.0, 0.5)
    # The lane runs 1.75 m right of the x axis: turned to the left, 1.75 m right of the y axis.
    np.testing.assert_allclose(made.lane_map.lanes[0].centre[[0, -1]], [[11.75, 20.0], [11.75, 70.0]], atol=1e-9)


def test_a_namespace_does_not_hide_the_roads():
    data = STRAIGHT.replace(
        b"<OpenDRIVE>", b'<OpenDRIVE xmlns="http://code.asam.net/simulation/standard/opendrive_schema">'
    )
    assert len(read_opendrive(data, "m").lanes) == 3


# ---------------------------------------------------------------- writing


def grid_map():
    """Two lanes side by side, a fork into a turn and a lane straight on, and everything that a map may have."""
    x = np.arange(0.0, 41.0, 2.0)
    along = np.column_stack([x, np.zeros_like(x)])
    angle = np.linspace(0.0, math.pi / 2.0, 12)
    bend = np.column_stack([40.0 + 10.0 * np.sin(angle), 10.0 - 10.0 * np.cos(angle)])
    made = (
        Lane(0, along, 3.5, 8.0, successors=(2, 3), left=1, signal_group=0),
        Lane(1, along + np.array([0.0, 3.5]), 3.5, 8.0, right=0),
        Lane(2, bend, 3.2, 8.0, successors=(4,), kind="turn", yields_to=(3,)),
        Lane(3, along + np.array([40.0, 0.0]), 3.5, 8.0, kind="turn"),
        Lane(4, np.column_stack([np.full(6, 50.0), np.linspace(10.0, 30.0, 6)]), 3.2, 8.0),
        Lane(5, along - [0.0, 4.0], 2.0, 1.5, kind="walkway"),
        Lane(6, along - [0.0, 2.5], 1.0, 5.0, kind="bicycle"),
    )
    square = np.array([[0.0, 0.0], [4.0, 0.0], [4.0, 3.0], [0.0, 3.0]])
    return LaneMap(
        made,
        (square * 20.0, square + 100.0),
        Signals(60.0, np.array([[0.0, 20.0], [30.0, 45.5]]), 2.5, np.array([[41.0, -3.0, 0.1, 0.0]])),
        (Marking(along, "yellow"), Marking(square[:2], "stop")),
        (square,),
        (square - 7.0,),
        (Building(square + 50.0, 12.5),),
        np.array([[1.0, 2.0, 1.5], [3.0, 4.0, 2.5]]),
    )


def assert_same_map(read, written, tolerance_m):
    assert len(read.lanes) == len(written.lanes)
    for a, b in zip(read.lanes, written.lanes, strict=True):
        for field in dataclasses.fields(Lane):
            if field.name not in ("centre", "successors"):
                assert getattr(a, field.name) == getattr(b, field.name), (a.lane_id, field.name)
        assert a.successors == tuple(sorted(b.successors))
        np.testing.assert_allclose(a.centre[[0, -1]], b.centre[[0, -1]], atol=1e-6)
        assert shapely.LineString(a.centre).hausdorff_distance(shapely.LineString(b.centre)) < tolerance_m
    for name in ("surface", "crosswalks", "sidewalks"):
        for a, b in zip(getattr(read, name), getattr(written, name), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9)
    for a, b in zip(read.markings, written.markings, strict=True):
        assert a.kind == b.kind
        np.testing.assert_allclose(a.points, b.points, atol=1e-9)
    for a, b in zip(read.buildings, written.buildings, strict=True):
        assert a.height_m == b.height_m
        np.testing.assert_allclose(a.footprint, b.footprint, atol=1e-9)
    np.testing.assert_array_equal(read.trees, written.trees)
    for name in ("cycle_s", "green_s", "yellow_s", "heads"):
        np.testing.assert_array_equal(getattr(read.signals, name), getattr(written.signals, name))


def test_a_written_map_reads_as_the_same():
    made = grid_map()
    data = write_opendrive(made, 'a "name" & <more>', "+proj=tmerc +lat_0=1 +lon_0=2", (1.0, 2.0, 3.0, 0.25))
    found = read_opendrive_map(data, "m")
    # The bend has points 1.4 m apart on a radius of 10 m: the curve leaves their chords by up to 2.5 cm.
    assert_same_map(found.lane_map, made, 0.03)
    assert (found.name, found.geo_reference) == ('a "name" & <more>', "+proj=tmerc +lat_0=1 +lon_0=2")
    assert found.offset == (1.0, 2.0, 3.0, 0.25)


# ---------------------------------------------------------------- real maps


def test_heights_are_left_out_with_a_remark():
    # 0.5 m up, then 5 % up for 100 m: 5.5 m. The second says nothing above 0.1 %.
    def profile(*row):
        names = dict(zip("sabcd", row, strict=True))
        told = " ".join(f'{name}="{value}"' for name, value in names.items())
        return f"<elevationProfile><elevation {told}/></elevationProfile>"

    steep = xodr(road("1", 100, [section(lanes(1, -1))], extra=profile(0.0, 0.5, 0.05, 0.0, 0.0)))
    level = xodr(road("1", 100, [section(lanes(1, -1))], extra=profile(0.0, 30.0, 0.0005, 0.0, 0.0)))
    told = read_opendrive_map(steep, "steep")
    assert told.remarks == ("heights from 0.5 to 5.5 m and slopes up to 5.0 % are left out",)
    assert read_opendrive_map(level, "level").remarks == ()
    np.testing.assert_allclose(np.ptp(told.lane_map.lanes[0].centre[:, 0]), 100.0)


@needs_data
@pytest.mark.parametrize("name", MAPS)
def test_real_maps_read_and_their_lanes_lie_on_the_road(name):
    path = DATA / f"{name}.xodr"
    made = read_opendrive(path.read_bytes(), path.name)
    # Gaps between road polygons up to 0.1 m are seams of the map.
    road = shapely.union_all([shapely.make_valid(shapely.Polygon(ring)) for ring in made.surface]).buffer(0.06)
    driven = [ln for ln in made.lanes if ln.kind in ("driving", "turn")]
    assert driven
    for ln in driven:
        assert shapely.contains_xy(road, ln.centre).all(), ln.lane_id
        assert (np.hypot(*np.diff(ln.centre, axis=0).T) < 2.5).all()
        for successor in ln.successors:
            np.testing.assert_allclose(made.lanes[successor].centre[0], ln.centre[-1], atol=0.02)
    assert not made.area().contains([[1e6, 1e6, 0.0, 4.0, 2.0]]).any()


@needs_data
def test_what_the_town_crossing_says():
    made = read_opendrive((DATA / "fabriksgatan.xodr").read_bytes(), "fabriksgatan")
    turns = [ln for ln in made.lanes if ln.kind == "turn"]
    # Four arms of one lane a direction: each leads to the three others.
    assert len(turns) == 12
    assert sorted(len(ln.successors) for ln in made.lanes if ln.kind == "driving") == [0, 0, 0, 0, 3, 3, 3, 3]


@needs_data
@pytest.mark.parametrize("name", MAPS)
def test_real_maps_survive_our_writer(name):
    made = read_opendrive((DATA / f"{name}.xodr").read_bytes(), name)
    # Turns of 6 m radius with points 1.5 m apart: chords leave the curve by up to 4.7 cm.
    assert_same_map(read_opendrive(write_opendrive(made), name), made, 0.05)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (STRAIGHT[: len(STRAIGHT) // 2], "not well-formed XML, perhaps cut"),
        (b"\x00\x01\x02PK", "not well-formed"),
        (b"<commonRoad/>", "root element <commonRoad>, expected <OpenDRIVE>"),
        (STRAIGHT.replace(b'revMinor="7"', b'revMinor="9"'), "revision 1.9; this reader knows 1.1 to 1.8"),
        (STRAIGHT.replace(b'revMajor="1"', b'revMajor="2"'), "revision 2.7"),
        (STRAIGHT.replace(b'x="0"', b'x="nan"'), "line 1 <geometry>: x=nan, expected a finite number"),
        (STRAIGHT.replace(b'x="0"', b'x="zero"'), "x='zero', expected a number"),
        (STRAIGHT.replace(b'"driving"', b'"none"'), "no lane that a car may drive on"),
        (STRAIGHT.replace(b'id="-2"', b'id="-1"'), "road 1: line 1 <lane>: lane -1 occurs twice"),
        (STRAIGHT.replace(b'id="-2"', b'id="-3"'), "not numbered without gaps"),
        (STRAIGHT.replace(b'length="100"', b'length="-1"', 1), "road 1: its length is -1 m"),
        (STRAIGHT.replace(b'length="100"', b'length="500"', 1), "cover 0 to 100 m of 500 m"),
        (STRAIGHT.replace(b"<line/>", b"<bezier/>"), "geometry <bezier>"),
        (STRAIGHT.replace(b"<line/>", b'<arc curvature="99"/>'), "a curvature beyond 10 1/m"),
        (xodr(road("1", 9, [section(lanes(-1))]), road("1", 9, [section(lanes(-1))])), "id '1' occurs twice"),
        (xodr(road("1", 9e8, [section(lanes(-1))])), "more than 500 km of lanes"),
        (xodr(road("1", 490, [section(lanes(-1))], '<spiral curvStart="-9" curvEnd="9"/>')), "no road does"),
        (STRAIGHT.replace(b'a="3.5"', b'a="900"'), "road 1: a lane reaches 1800 m to the side"),
        (xodr(), "no lane that a car may drive on"),
        (b'<!DOCTYPE a [<!ENTITY b "c">]>' + STRAIGHT, "document type declaration"),
        (b'<!DOCTYPE a SYSTEM "file:///etc/passwd">' + STRAIGHT, "document type declaration"),
    ],
)
def test_a_bad_file_is_an_error_that_names_file_place_and_reason(data, reason):
    with pytest.raises(SceneError) as caught:
        read_opendrive(data, "town.xodr")
    assert str(caught.value).startswith("town.xodr: ")
    assert reason in str(caught.value)


def test_entities_are_not_expanded():
    bomb = b'<!DOCTYPE a [<!ENTITY b "x"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;">]>'
    with pytest.raises(SceneError):
        read_opendrive(bomb + STRAIGHT.replace(b'name="test"', b'name="&c;"'), "m")


def test_a_huge_file_is_refused_at_once():
    start = time.monotonic()
    with pytest.raises(SceneError, match="200000000 bytes are more than"):
        read_opendrive(b"<" * 200_000_000, "m")
    with pytest.raises(SceneError, match="more than 2000000 tags"):
        read_opendrive(b"<OpenDRIVE>" + b"<a/>" * 3_000_000, "m")
    assert time.monotonic() - start < 5.0


TOKENS = [
    b"nan",
    b"-1",
    b"0",
    b"1e308",
    b"1e9",
    b"-1e9",
    b"1e-300",
    b"inf",
    b'"',
    b"<",
    b"/>",
    b"driving",
    b"-2",
    b"start",
    b"road",
]


@st.composite
def mutated(draw, originals):
    """A file with some bytes cut out, doubled, moved or replaced, numbers most of all."""
    data = draw(st.sampled_from(originals))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.integers(0, 4))
        if kind <= 1:
            # The value of the attribute that begins next.
            first = data.find(b'"', at) + 1
            end = data.find(b'"', first)
            if first > 0 and end > 0:
                data = data[:first] + draw(st.sampled_from(TOKENS)) + data[end:]
        elif kind == 2:
            data = data[:at] + draw(st.sampled_from(TOKENS)) + data[at + draw(st.integers(0, 3)) :]
        elif kind == 3:
            data = data[:at] + data[at + draw(st.integers(1, 400)) :]
        else:
            size = draw(st.integers(1, 400))
            data = data[: at + size] + data[at:]
    return data


def survives(data):
    try:
        made = read_opendrive(data, "fuzzed")
    except SceneError:
        return
    assert all(np.isfinite(ln.centre).all() for ln in made.lanes)
    assert all(0 <= other < len(made.lanes) for ln in made.lanes for other in (*ln.successors, *ln.yields_to))


ORIGINALS = [STRAIGHT, crossroads(), write_opendrive(grid_map())]
FUZZ = {"suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large], "derandomize": True}


@settings(max_examples=1000, deadline=timedelta(seconds=5), **FUZZ)
@given(mutated(ORIGINALS))
def test_mutated_files_are_read_or_refused(data):
    survives(data)


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_data
def test_mutated_real_files_are_read_or_refused():
    originals = [path.read_bytes() for path in sorted(DATA.glob("*.xodr"))]

    @settings(max_examples=1500, deadline=timedelta(seconds=20), **FUZZ)
    @given(mutated(originals))
    def check(data):
        survives(data)

    check()
