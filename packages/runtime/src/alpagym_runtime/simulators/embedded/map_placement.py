"""Maps on the Earth: where one with a geo reference lies in a scene's local frame."""

from __future__ import annotations

import math
import re

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.errors import SceneError
from alpagym_runtime.simulators.embedded.opendrive_xml import Placement
from alpagym_runtime.simulators.embedded.scene_layout import MAP, PLACE_MAX_M
from alpagym_runtime.simulators.embedded.scene_values import Value

Float = NDArray[np.float64]

TILT_MAX_RAD = 0.1


def map_placement(geo_reference: str | None, base: Value | None) -> Placement | None:
    """Where a map with `lat_0` and `lon_0` lies in the local frame; None: the frames are one.

    AlpaSim's rule: map coordinates are east and north of that point; `T_world_base` is the local frame's pose in ECEF.
    """
    found = [re.search(rf"\+{name}=(-?[0-9.]+)", geo_reference or "") for name in ("lat_0", "lon_0")]
    if base is None or None in found:
        return None
    matrix = base.array(4, 4)
    if np.allclose(matrix, np.eye(4)):
        return None  # not said
    try:
        latitude, longitude = (math.radians(float(match[1])) for match in found if match is not None)
    except ValueError as err:
        raise SceneError(f"{MAP}: geoReference {geo_reference!r}: {err}") from err
    local = np.linalg.inv(matrix) @ east_north_up(latitude, longitude) if np.linalg.det(matrix) else None
    if local is None or not np.isfinite(local).all() or abs(local[2, 2] - 1.0) > TILT_MAX_RAD**2 / 2.0:
        raise SceneError(f"{MAP}: its geoReference and T_world_base are planes that tilt against each other")
    if max(abs(local[0, 3]), abs(local[1, 3])) > PLACE_MAX_M:
        raise SceneError(f"{MAP}: its geoReference lies beyond {PLACE_MAX_M / 1000.0:g} km of T_world_base")
    return Placement(float(local[0, 3]), float(local[1, 3]), math.atan2(local[1, 0], local[0, 0]))


def east_north_up(latitude_rad: float, longitude_rad: float) -> Float:
    """[4,4] pose in ECEF (WGS 84, height 0) of the frame whose x is east, y north and z up at a place."""
    a, e2 = 6_378_137.0, 6.694379990141316e-3
    sin_lat, cos_lat = math.sin(latitude_rad), math.cos(latitude_rad)
    sin_lon, cos_lon = math.sin(longitude_rad), math.cos(longitude_rad)
    n = a / math.sqrt(1.0 - e2 * sin_lat * sin_lat)
    return np.array(
        [
            [-sin_lon, -sin_lat * cos_lon, cos_lat * cos_lon, n * cos_lat * cos_lon],
            [cos_lon, -sin_lat * sin_lon, cos_lat * sin_lon, n * cos_lat * sin_lon],
            [0.0, cos_lat, sin_lat, n * (1.0 - e2) * sin_lat],
            [0.0, 0.0, 0.0, 1.0],
        ]
    )
