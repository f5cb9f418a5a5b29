"""Everything that stands, as textured quads around the camera: built anew for each picture by compiled code.

Positions are in rig axes relative to the camera. Quads that look away or lie outside the camera's cone are dropped.
"""

from __future__ import annotations

import math

import numpy as np

from alpagym_runtime.simulators.embedded.rendering import models, textures
from alpagym_runtime.simulators.embedded.rendering.compiled import picture_kernel, strict
from alpagym_runtime.simulators.embedded.rendering.models import HEIGHTS, SIGNAL_HEAD, TALLER_CARS_M
from alpagym_runtime.simulators.embedded.rendering.scenery import HEAD_M, POLE_M, VEGETATION
from alpagym_runtime.simulators.embedded.rendering.weather import AMBIENT, NIGHT, SUN

MOST = 6144
"""Quads that one picture can hold; road users come first, so what is left out stands far away."""

# Columns of a quad: corner, right edge, down edge, normal.
P, E, F, N = 0, 3, 6, 9
DISTANCE, PER_E, PER_F, LOW, HIGH, TEXTURE, REPEAT_E, REPEAT_F = range(12, 20)
TINT, LIGHT = 20, 23
NAME, CLASS, TEXELS, FLAGS, SEE_THROUGH, VARIED = range(26, 32)
COLUMNS = 32

BRAKING, BURNING = 1, 2
"""Bits of FLAGS: brake lamps shine; it is dark enough for lamps."""

FAR_HOUSE_M, FAR_THING_M = 260.0, 150.0
STRIDE_M, SWING_M = 1.5, 0.24

LAMP_RED, LAMP_YELLOW, LAMP_GREEN = (textures.index(f"lamp_{name}") for name in ("red", "yellow", "green"))
CODES = [set(np.unique(texture[: textures.SIZE**2, 3])) for texture in textures.textures()]
OPEN_TEXTURES = np.array([textures.NOTHING in codes for codes in CODES])
VARIED_TEXTURES = np.array([not codes <= {textures.NOTHING, textures.TINTED, textures.OWN} for codes in CODES])
ROWS, BOUNDS = models.models()
TALL = np.array(HEIGHTS)


@strict
def add(quads, n, low, high, texture, repeat_e, repeat_f, tint, name, kind, flags, sun, air):
    """Finish quad n, whose corner and edges are written, if it faces the camera; returns the new count."""
    q = quads[n]
    nx, ny = q[F + 1] * q[E + 2] - q[F + 2] * q[E + 1], q[F + 2] * q[E] - q[F] * q[E + 2]
    nz = q[F] * q[E + 1] - q[F + 1] * q[E]
    distance = nx * q[P] + ny * q[P + 1] + nz * q[P + 2]
    if distance >= 0.0:
        return n
    q[N], q[N + 1], q[N + 2], q[DISTANCE] = nx, ny, nz, distance
    ee, ff = q[E] ** 2 + q[E + 1] ** 2 + q[E + 2] ** 2, q[F] ** 2 + q[F + 1] ** 2 + q[F + 2] ** 2
    q[PER_E], q[PER_F], q[LOW], q[HIGH] = 1.0 / ee, 1.0 / ff, low, high
    q[TEXTURE], q[REPEAT_E], q[REPEAT_F] = texture, repeat_e, repeat_f
    length = math.sqrt(nx * nx + ny * ny + nz * nz)
    facing = max((nx * sun[0] + ny * sun[1] + nz * sun[2]) / length, 0.0)
    # A little more from above keeps faces apart where the sun does not shine.
    around = 0.9 + 0.1 * nz / length
    for k in range(3):
        light = air[AMBIENT + k] * around + air[SUN + k] * facing
        q[LIGHT + k] = light
        q[TINT + k] = light * tint[k]
    q[NAME], q[CLASS], q[FLAGS] = name, kind, flags
    # Texels a metre, by the finer direction.
    q[TEXELS] = 64.0 * max(abs(repeat_e) / math.sqrt(ee), abs(repeat_f) / math.sqrt(ff))
    q[SEE_THROUGH] = 1.0 if OPEN_TEXTURES[texture] else 0.0
    q[VARIED] = 1.0 if VARIED_TEXTURES[texture] or low != 0.0 or high != 0.0 else 0.0
    return n + 1


@picture_kernel
def add_model(quads, n, model, x, y, ground, cos, sin, length, width, height, swing, lamp, look, name, flags, sun, air):
    """A road user or signal: the rows of its model, its middle at (x, y)."""
    tint = np.empty(3)
    for r in range(BOUNDS[model, 0], BOUNDS[model, 1]):
        row = ROWS[r]
        if n >= MOST:
            return n
        for part, to in ((models.CORNER, P), (models.RIGHT, E), (models.DOWN, F)):
            ax = row[part] * length + row[part + 1]
            ay = row[part + 2] * width + row[part + 3]
            if to == P:
                ax += row[models.SWING] * swing
            quads[n, to] = cos * ax - sin * ay
            quads[n, to + 1] = sin * ax + cos * ay
            quads[n, to + 2] = row[part + 4] * height + row[part + 5]
        quads[n, P] += x
        quads[n, P + 1] += y
        quads[n, P + 2] += ground
        source = int(row[models.TINT])
        for k in range(3):
            tint[k] = row[models.RED + k] if source == models.FIXED else look[3 * source + k]
        texture = int(row[models.TEXTURE])
        if texture == models.LAMPS:
            texture = lamp
        n = add(quads, n, row[models.LOW], row[models.HIGH], texture, row[models.FLIP], 1.0, tint, name,
                int(row[models.CLASS]), flags, sun, air)  # fmt: skip
    return n


@picture_kernel
def in_sight(x, y, z, radius, rotation, cone):
    """Whether a sphere touches the camera's cone."""
    ahead = rotation[2, 0] * x + rotation[2, 1] * y + rotation[2, 2] * z
    square = x * x + y * y + z * z
    if square <= radius * radius:
        return True
    across = math.sqrt(max(square - ahead * ahead, 0.0))
    # Distance from the cone's surface; inside it is negative.
    return across * cone[0] - ahead * cone[1] <= radius


@picture_kernel
def build(quads, walls, trees, heads, green, cycle, yellow, time_s, pose, centre, rotation, cone,
          actors, present, sizes, kinds, looks, sun_local, air):  # fmt: skip
    """All quads of a picture; returns their number.

    `pose` is the rig's x, y, yaw (local); `actors` [A,5] x, y, yaw, speed, braking; `looks` [A,10] colours.
    """
    cos, sin = math.cos(pose[2]), math.sin(pose[2])
    sun = np.empty(3)
    sun[0], sun[1] = cos * sun_local[0] + sin * sun_local[1], cos * sun_local[1] - sin * sun_local[0]
    sun[2] = sun_local[2]
    tint = np.empty(3)
    ground = -centre[2]
    burning = BURNING if air[NIGHT] > 0.0 else 0
    n, count = 0, len(present)
    for a in range(count + len(heads)):
        # Road users, then signal heads.
        lamp, swing, length, width = LAMP_RED, 0.0, 1.0, 1.0
        if a < count:
            if not present[a]:
                continue
            px, py, yaw, model, name, look = actors[a, 0], actors[a, 1], actors[a, 2], kinds[a], a + 1, looks[a]
            length, width, height = sizes[a, 0], sizes[a, 1], TALL[kinds[a]]
            if model == 0:
                height += TALLER_CARS_M * looks[a, 9]
            radius = 0.5 * math.hypot(length, width) + height
            flags = burning | (BRAKING if actors[a, 4] > 0.0 else 0)
            if actors[a, 3] > 0.15:
                # The way gone along the heading moves the legs.
                gone = px * math.cos(yaw) + py * math.sin(yaw)
                swing = SWING_M * math.sin(gone * (2.0 * math.pi / STRIDE_M))
        else:
            h = a - count
            px, py, yaw, model, name, look = heads[h, 0], heads[h, 1], heads[h, 2], SIGNAL_HEAD, int(heads[h, 4]), tint
            height, radius, flags = POLE_M + HEAD_M, POLE_M + HEAD_M, burning
            group = int(heads[h, 3])
            since = (time_s - green[group, 0]) % cycle
            if since < green[group, 1] - green[group, 0]:
                lamp = LAMP_GREEN
            elif since < green[group, 1] - green[group, 0] + yellow:
                lamp = LAMP_YELLOW
        dx, dy = px - pose[0], py - pose[1]
        x, y = cos * dx + sin * dy - centre[0], cos * dy - sin * dx - centre[1]
        if x * x + y * y > FAR_THING_M * FAR_THING_M or not in_sight(x, y, ground, radius, rotation, cone):
            continue
        turn = yaw - pose[2]
        n = add_model(quads, n, model, x, y, ground, math.cos(turn), math.sin(turn), length, width, height, swing, lamp,
                      look, name, flags, sun, air)  # fmt: skip
    for t in range(len(trees)):
        dx, dy = trees[t, 0] - pose[0], trees[t, 1] - pose[1]
        x, y = cos * dx + sin * dy - centre[0], cos * dy - sin * dx - centre[1]
        half, tall, away = 0.5 * trees[t, 2], trees[t, 3], math.sqrt(x * x + y * y) + 1e-6
        if n >= MOST or away > FAR_HOUSE_M or not in_sight(x, y, ground, half + tall, rotation, cone):
            continue
        # A sheet that faces the camera.
        rx, ry = y / away, -x / away
        quads[n, P], quads[n, P + 1], quads[n, P + 2] = x - rx * half, y - ry * half, ground + tall
        quads[n, E], quads[n, E + 1], quads[n, E + 2] = 2.0 * half * rx, 2.0 * half * ry, 0.0
        quads[n, F], quads[n, F + 1], quads[n, F + 2] = 0.0, 0.0, -tall
        tint[:] = trees[t, 4]
        n = add(quads, n, 0.0, 0.0, int(trees[t, 5]), 1.0, 1.0, tint, int(trees[t, 6]), VEGETATION, 0, sun, air)
    for w in range(len(walls)):
        dx, dy = walls[w, 17] - pose[0], walls[w, 18] - pose[1]
        x, y = cos * dx + sin * dy - centre[0], cos * dy - sin * dx - centre[1]
        radius = math.hypot(walls[w, 19], walls[w, 20])
        if n >= MOST or x * x + y * y > FAR_HOUSE_M**2 or not in_sight(x, y, ground, radius, rotation, cone):
            continue
        dx, dy = walls[w, 0] - pose[0], walls[w, 1] - pose[1]
        quads[n, P] = cos * dx + sin * dy - centre[0]
        quads[n, P + 1] = cos * dy - sin * dx - centre[1]
        quads[n, P + 2] = walls[w, 2] + ground
        quads[n, E] = cos * walls[w, 3] + sin * walls[w, 4]
        quads[n, E + 1] = cos * walls[w, 4] - sin * walls[w, 3]
        quads[n, E + 2] = 0.0
        quads[n, F], quads[n, F + 1], quads[n, F + 2] = 0.0, 0.0, walls[w, 8]
        tint[0], tint[1], tint[2] = walls[w, 9], walls[w, 10], walls[w, 11]
        n = add(quads, n, 0.0, 0.0, int(walls[w, 12]), walls[w, 13], walls[w, 14], tint, int(walls[w, 15]),
                int(walls[w, 16]), burning, sun, air)  # fmt: skip
    return n
