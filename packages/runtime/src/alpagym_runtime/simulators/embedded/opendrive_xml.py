"""What an OpenDRIVE file says: roads, junctions, signals and controllers as plain data, not yet evaluated.

Names and rules follow ASAM OpenDRIVE 1.7 (sections in brackets); files of revision 1.1 to 1.8 are read. Units are m,
rad and m/s; the frame is the file's inertial one, or a frame that it is moved into (`placement`). Heights are
read to be remarked on; superelevation, shapes and rail are not read: this world is flat.

Files come from strangers: entities, DTDs and the network stay closed, sizes are bounded, and a wrong value is an error
that names its line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lxml import etree

from alpagym_runtime.errors import SceneError

FILE_BYTES_MAX = 50_000_000
ELEMENTS_MAX = 2_000_000
NEWEST_MINOR = 8
LANE_M_MAX = 500_000.0
CURVATURE_MAX_PM = 10.0
JUNCTION_CONNECTIONS_MAX = 2_000

Polynomial = tuple[float, float, float, float, float]
"""Where it starts (s or sOffset, m) and a, b, c, d of a + b·ds + c·ds² + d·ds³."""

MPS = {"": 1.0, "m/s": 1.0, "km/h": 1.0 / 3.6, "mph": 0.44704}
LIMIT_OF_TYPE_MPS = {"motorway": 36.1, "rural": 27.8, "lowSpeed": 8.3, "pedestrian": 2.8, "bicycle": 5.6}
DEFAULT_LIMIT_MPS = 13.9


@dataclass(frozen=True)
class Placement:
    """Where the file's frame lies in the frame that is read into: `x, y` m, `yaw` rad."""

    x: float = 0.0
    y: float = 0.0
    yaw: float = 0.0


@dataclass(frozen=True)
class Piece:
    """One geometry of a plan view [9.3 to 9.7]: `kind` line | arc | spiral | poly3 | paramPoly3.

    `numbers`: arc: curvature; spiral: curvatures at start and end, 1/m; poly3: a, b, c, d; paramPoly3: aU to dU, aV to
    dV. `normalized`: paramPoly3's p runs from 0 to 1 instead of 0 to the length.
    """

    s: float
    x: float
    y: float
    yaw: float
    length: float
    kind: str
    numbers: tuple[float, ...] = ()
    normalized: bool = True


@dataclass(frozen=True)
class Mark:
    """A road mark of a lane's outer border [11.9]; it begins `start` m into the section."""

    start: float
    kind: str
    colour: str
    lane_change: str  # both | increase | decrease | none


@dataclass(frozen=True)
class RoadLane:
    """A lane of a section [11.3]."""

    number: int
    kind: str
    widths: tuple[Polynomial, ...]
    borders: tuple[Polynomial, ...]
    predecessors: tuple[int, ...]
    successors: tuple[int, ...]
    marks: tuple[Mark, ...]
    limit_mps: float | None
    direction: str  # standard | reversed | both
    notes: dict[str, str]


@dataclass(frozen=True)
class Section:
    """A lane section [11.4]: lanes by number, from `start` to `end` m along the road."""

    start: float
    end: float
    lanes: dict[int, RoadLane]


@dataclass(frozen=True)
class Link:
    """What a road's end meets [10.3]: `kind` road | junction; `contact` start | end of a road."""

    kind: str
    target: str
    contact: str


@dataclass(frozen=True)
class Signal:
    """A signal, or a reference to one [14]: station and offset, m; `orientation` + | - | none."""

    signal_id: str
    s: float
    t: float
    orientation: str
    kind: str
    dynamic: bool
    lanes: tuple[tuple[int, int], ...]  # validity, from and to; empty: all
    width_m: float
    value: float


@dataclass(frozen=True)
class RoadObject:
    """An object [13] with its outlines: `local` corners u, v in its own frame, or `road` corners s, t."""

    kind: str
    name: str
    s: float
    t: float
    yaw: float
    length_m: float
    width_m: float
    height_m: float
    radius_m: float
    outlines: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]


@dataclass(frozen=True)
class Road:
    """A road [10]."""

    road_id: str
    length: float
    junction: str  # "-1": none
    left_hand: bool
    pieces: tuple[Piece, ...]
    elevation: tuple[Polynomial, ...]
    lane_offsets: tuple[Polynomial, ...]
    sections: tuple[Section, ...]
    predecessor: Link | None
    successor: Link | None
    limit_mps: float
    signals: tuple[Signal, ...]
    objects: tuple[RoadObject, ...]


@dataclass(frozen=True)
class Connection:
    """A way through a junction [12.2]: from lanes of `incoming` to lanes of `road` at its `contact`."""

    incoming: str
    road: str
    contact: str
    lanes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Junction:
    """A junction [12]; `priorities` are pairs (goes first, waits) of road ids."""

    junction_id: str
    connections: tuple[Connection, ...]
    priorities: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class OpenDrive:
    """A file's contents.

    Attributes:
        name: from the header.
        geo_reference: PROJ string of the inertial frame; None if the file has none.
        offset: x, y, z m and hdg rad that were taken off the projected coordinates [8.3]; kept, never applied.
        roads, junctions: by id.
        controllers: signal id to controller id.
        notes: values of `userData` at the top whose code starts with `alpagym.`.

    """

    name: str
    geo_reference: str | None
    offset: tuple[float, float, float, float]
    roads: dict[str, Road]
    junctions: dict[str, Junction]
    controllers: dict[str, str]
    notes: dict[str, str] = field(default_factory=dict)


# ---------------------------------------------------------------- values


def _at(element: Any) -> str:
    return f"line {element.sourceline} <{element.tag}>"


def _number(element: Any, name: str, default: float | None = None) -> float:
    """A finite attribute up to 1e9 in size."""
    text = element.get(name)
    if text is None or text.strip() == "":
        if default is None:
            raise SceneError(f"{_at(element)}: no attribute {name!r}")
        return default
    try:
        value = float(text)
    except ValueError:
        raise SceneError(f"{_at(element)}: {name}={text[:40]!r}, expected a number") from None
    if not abs(value) <= 1e9:
        raise SceneError(f"{_at(element)}: {name}={text[:40]}, expected a finite number up to 1e9")
    return value


def _whole(element: Any, name: str) -> int:
    text = element.get(name, "").strip()
    try:
        value = int(text)
    except ValueError:
        raise SceneError(f"{_at(element)}: {name}={text[:40]!r}, expected a whole number") from None
    if abs(value) > 1_000_000:
        raise SceneError(f"{_at(element)}: {name}={value} is beyond a million")
    return value


def _text(element: Any, name: str, choices: tuple[str, ...], default: str | None = None) -> str:
    value = element.get(name, default)
    if value not in choices:
        raise SceneError(f"{_at(element)}: {name}={value!r}, expected {' | '.join(choices)}")
    assert isinstance(value, str)
    return value


def _polynomials(parent: Any, tag: str, start: str) -> tuple[Polynomial, ...]:
    rows = [
        (
            _number(child, start),
            _number(child, "a", 0.0),
            _number(child, "b", 0.0),
            _number(child, "c", 0.0),
            _number(child, "d", 0.0),
        )
        for child in parent.iterfind(tag)
    ]
    return tuple(sorted(rows))


def _notes(element: Any) -> dict[str, str]:
    return {
        code: child.get("value", "")
        for child in element.iterfind("userData")
        if (code := child.get("code", "")).startswith("alpagym.")
    }


def _speed(element: Any) -> float | None:
    """A speed limit, m/s; None where it has no number ("no limit", "undefined")."""
    if element.get("max") in (None, "no limit", "undefined"):
        return None
    unit = element.get("unit", "")
    if unit not in MPS:
        raise SceneError(f"{_at(element)}: unit {unit!r}, expected m/s, km/h or mph")
    value = _number(element, "max") * MPS[unit]
    return value if value > 0.0 else None


# ---------------------------------------------------------------- roads


def _piece(element: Any, placement: Placement) -> Piece:
    shape = next((child for child in element if child.tag != "userData"), None)
    length = _number(element, "length")
    x, y, yaw = (_number(element, name) for name in ("x", "y", "hdg"))
    cos, sin = math.cos(placement.yaw), math.sin(placement.yaw)
    pose = (placement.x + cos * x - sin * y, placement.y + sin * x + cos * y, yaw + placement.yaw)
    kind = shape.tag if shape is not None else "nothing"
    numbers: tuple[float, ...] = ()
    normalized = True
    if kind == "arc":
        numbers = (_number(shape, "curvature"),)
    elif kind == "spiral":
        numbers = (_number(shape, "curvStart"), _number(shape, "curvEnd"))
    elif kind == "poly3":
        numbers = tuple(_number(shape, name) for name in "abcd")
    elif kind == "paramPoly3":
        numbers = tuple(_number(shape, name + axis) for axis in "UV" for name in "abcd")
        # Absent in files of 1.4, where it means normalized [9.7].
        normalized = _text(shape, "pRange", ("arcLength", "normalized"), "normalized") == "normalized"
    elif kind != "line":
        raise SceneError(f"{_at(element)}: geometry <{kind}>; this reader knows line, arc, spiral, poly3, paramPoly3")
    if kind in ("arc", "spiral") and max(map(abs, numbers)) > CURVATURE_MAX_PM:
        raise SceneError(f"{_at(shape)}: a curvature beyond {CURVATURE_MAX_PM:g} 1/m")
    return Piece(_number(element, "s"), *pose, length, kind, numbers, normalized)


def _plan(element: Any, length: float, placement: Placement) -> tuple[Piece, ...]:
    view = element.find("planView")
    pieces = [_piece(g, placement) for g in view.iterfind("geometry")] if view is not None else []
    # Writers leave pieces of no length where two lanes begin at one place.
    pieces = [piece for piece in pieces if piece.length > 1e-9]
    if not pieces:
        raise SceneError("no geometry in its planView")
    starts = [piece.s for piece in pieces]
    if any(b <= a for a, b in itertools.pairwise(starts)):
        raise SceneError("its geometries do not ascend in s")
    if abs(starts[0]) > 1e-3 or abs(starts[-1] + pieces[-1].length - length) > 1.0:
        raise SceneError(f"its geometries cover {starts[0]:g} to {starts[-1] + pieces[-1].length:g} m of {length:g} m")
    return tuple(pieces)


def _mark(element: Any) -> Mark:
    kind = element.get("type", "none")
    default = "none" if "solid" in kind else "both"
    lane_change = element.get("laneChange", default)
    return Mark(_number(element, "sOffset", 0.0), kind, element.get("color", "standard"), lane_change)


def _lane(element: Any) -> RoadLane:
    link = element.find("link")
    ways: dict[str, tuple[int, ...]] = {"predecessor": (), "successor": ()}
    if link is not None:
        ways = {name: tuple(_whole(child, "id") for child in link.iterfind(name)) for name in ways}
    speeds = [speed for child in element.iterfind("speed") if (speed := _speed(child)) is not None]
    marks = sorted((_mark(child) for child in element.iterfind("roadMark")), key=lambda mark: mark.start)
    return RoadLane(
        number=_whole(element, "id"),
        kind=element.get("type", "none"),
        widths=_polynomials(element, "width", "sOffset"),
        borders=_polynomials(element, "border", "sOffset"),
        predecessors=ways["predecessor"],
        successors=ways["successor"],
        marks=tuple(marks),
        limit_mps=min(speeds, default=None),
        direction=element.get("direction", "standard"),
        notes=_notes(element),
    )


def _sections(element: Any, length: float) -> tuple[Section, ...]:
    found = list(element.iterfind("lanes/laneSection"))
    starts = [_number(section, "s") for section in found]
    if not found or abs(starts[0]) > 1e-3:
        raise SceneError(f"its lane sections begin at {starts[:1]}, expected 0")
    ends = [*starts[1:], length]
    if any(b - a <= 1e-9 for a, b in zip(starts, ends, strict=True)):
        raise SceneError(f"its lane sections do not ascend within its {length:g} m")
    sections = []
    for section, start, end in zip(found, starts, ends, strict=True):
        lanes: dict[int, RoadLane] = {}
        for child in section.iterfind("*/lane"):
            lane = _lane(child)
            if lane.number in lanes:
                raise SceneError(f"{_at(child)}: lane {lane.number} occurs twice in a section")
            lanes[lane.number] = lane
        for side in (1, -1):
            numbers = sorted(number * side for number in lanes if number * side > 0)
            if numbers != list(range(1, len(numbers) + 1)):
                raise SceneError(f"{_at(section)}: lanes {[n * side for n in numbers]} are not numbered without gaps")
        sections.append(Section(start, end, lanes))
    return tuple(sections)


def _link(element: Any, name: str) -> Link | None:
    child = element.find(f"link/{name}")
    if child is None or child.get("elementId") is None:
        return None
    kind = _text(child, "elementType", ("road", "junction"))
    contact = _text(child, "contactPoint", ("start", "end"), "start") if kind == "road" else ""
    return Link(kind, child.get("elementId"), contact)


def _signals(element: Any) -> Iterator[Signal]:
    for child in element.iterfind("signals/*"):
        if child.tag not in ("signal", "signalReference"):
            continue
        lanes = tuple((_whole(v, "fromLane"), _whole(v, "toLane")) for v in child.iterfind("validity"))
        yield Signal(
            child.get("id", ""),
            _number(child, "s"),
            _number(child, "t"),
            child.get("orientation", "none"),
            child.get("type", ""),
            child.get("dynamic") == "yes",
            lanes,
            _number(child, "width", 0.0),
            _number(child, "value", 0.0) if child.get("value", "").replace(".", "").isdigit() else 0.0,
        )


def _objects(element: Any) -> Iterator[RoadObject]:
    for child in element.iterfind("objects/object"):
        outlines = []
        for outline in child.iterfind(".//outline"):
            road = tuple((_number(c, "s"), _number(c, "t")) for c in outline.iterfind("cornerRoad"))
            local = tuple((_number(c, "u"), _number(c, "v")) for c in outline.iterfind("cornerLocal"))
            if len(road) > 1 or len(local) > 1:
                outlines.append(("road", road) if len(road) > 1 else ("local", local))
        if child.get("s") is None:
            continue
        yield RoadObject(
            kind=child.get("type", "none"),
            name=child.get("name", ""),
            s=_number(child, "s"),
            t=_number(child, "t", 0.0),
            yaw=_number(child, "hdg", 0.0),
            length_m=_number(child, "length", 0.0),
            width_m=_number(child, "width", 0.0),
            height_m=_number(child, "height", 0.0),
            radius_m=_number(child, "radius", 0.0),
            outlines=tuple(outlines),
        )


def _road(element: Any, placement: Placement) -> Road:
    length = _number(element, "length")
    if not length > 0.0:
        raise SceneError(f"its length is {length:g} m")
    sections = _sections(element, length)
    kinds = list(element.iterfind("type"))
    limit = LIMIT_OF_TYPE_MPS.get(kinds[0].get("type", ""), DEFAULT_LIMIT_MPS) if kinds else DEFAULT_LIMIT_MPS
    said = [speed for kind in kinds for child in kind.iterfind("speed") if (speed := _speed(child)) is not None]
    lanes = element.find("lanes")
    return Road(
        road_id=element.get("id"),
        length=length,
        junction=element.get("junction", "-1"),
        left_hand=_text(element, "rule", ("RHT", "LHT"), "RHT") == "LHT",
        pieces=_plan(element, length, placement),
        elevation=_polynomials(element, "elevationProfile/elevation", "s"),
        lane_offsets=_polynomials(lanes, "laneOffset", "s"),
        sections=sections,
        predecessor=_link(element, "predecessor"),
        successor=_link(element, "successor"),
        limit_mps=min(said, default=limit),
        signals=tuple(_signals(element)),
        objects=tuple(_objects(element)),
    )


# ---------------------------------------------------------------- junctions and the file


def _junction(element: Any) -> Junction:
    connections = []
    for child in element.iterfind("connection"):
        road = child.get("connectingRoad") or child.get("linkedRoad")
        incoming = child.get("incomingRoad")
        if road is None or incoming is None:
            continue  # virtual connections [12.4] lead to no road of their own
        lanes = tuple((_whole(link, "from"), _whole(link, "to")) for link in child.iterfind("laneLink"))
        connections.append(Connection(incoming, road, _text(child, "contactPoint", ("start", "end"), "start"), lanes))
    if len(connections) > JUNCTION_CONNECTIONS_MAX:
        raise SceneError(f"{len(connections)} connections are more than {JUNCTION_CONNECTIONS_MAX}")
    priorities = tuple((p.get("high", ""), p.get("low", "")) for p in element.iterfind("priority"))
    return Junction(element.get("id"), tuple(connections), priorities)


def _root(data: bytes) -> Any:
    if not data.strip():
        raise SceneError("the file is empty")
    if len(data) > FILE_BYTES_MAX:
        raise SceneError(f"{len(data)} bytes are more than {FILE_BYTES_MAX}; cut the map")
    closed = {"resolve_entities": False, "no_network": True, "load_dtd": False, "huge_tree": False}
    # An element takes about 300 bytes of memory whatever its text: counted before the tree is built.
    if data.count(b"<") > ELEMENTS_MAX:
        raise SceneError(f"more than {ELEMENTS_MAX} tags; cut the map")
    try:
        root = etree.fromstring(data, etree.XMLParser(**closed, remove_comments=True, remove_pis=True))
    except (etree.XMLSyntaxError, ValueError) as err:
        line = getattr(err, "lineno", None) or 1
        raise SceneError(f"line {line}: not well-formed XML, perhaps cut: {str(err)[:200]}") from err
    if root.getroottree().docinfo.doctype:
        raise SceneError("has a document type declaration; OpenDRIVE files need none")
    for element in root.iter(etree.Element):
        if "}" in element.tag:
            element.tag = element.tag.partition("}")[2]
    if root.tag != "OpenDRIVE":
        raise SceneError(f"root element <{root.tag}>, expected <OpenDRIVE>")
    return root


def _by_id(root: Any, tag: str) -> Iterator[tuple[str, Any]]:
    seen = set()
    for element in root.iterfind(tag):
        name = element.get("id")
        if not name:
            raise SceneError(f"{_at(element)}: no id")
        if name in seen:
            raise SceneError(f"{_at(element)}: id {name[:40]!r} occurs twice")
        seen.add(name)
        yield name, element


def parse(data: bytes, placement: Placement | None = None) -> OpenDrive:
    """The contents of an OpenDRIVE file, moved by `placement`.

    Raises:
        SceneError: naming place and reason; the caller adds the file.

    """
    root = _root(data)
    header = root.find("header")
    if header is None:
        raise SceneError("no <header>")
    major, minor = header.get("revMajor", ""), header.get("revMinor", "")
    if major != "1" or not minor.isdigit() or int(minor) > NEWEST_MINOR:
        raise SceneError(f"{_at(header)}: revision {major}.{minor}; this reader knows 1.1 to 1.{NEWEST_MINOR}")
    offset = header.find("offset")
    taken_off = tuple(_number(offset, n, 0.0) for n in ("x", "y", "z", "hdg")) if offset is not None else (0.0,) * 4
    roads: dict[str, Road] = {}
    lane_m = 0.0
    for name, element in _by_id(root, "road"):
        try:
            road = _road(element, placement or Placement())
        except SceneError as err:
            raise SceneError(f"road {name[:40]}: {err}") from None
        lane_m += sum((section.end - section.start) * max(len(section.lanes), 1) for section in road.sections)
        if lane_m > LANE_M_MAX:
            raise SceneError(f"road {name[:40]}: more than {LANE_M_MAX / 1000.0:g} km of lanes; cut the map")
        roads[name] = road
    junctions = {}
    for name, element in _by_id(root, "junction"):
        try:
            junctions[name] = _junction(element)
        except SceneError as err:
            raise SceneError(f"junction {name[:40]}: {err}") from None
    controllers = {
        control.get("signalId", ""): name
        for name, element in _by_id(root, "controller")
        for control in element.iterfind("control")
    }
    geo = (header.findtext("geoReference") or "").strip()
    assert len(taken_off) == 4
    return OpenDrive(header.get("name", ""), geo or None, taken_off, roads, junctions, controllers, _notes(root))
