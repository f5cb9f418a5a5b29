"""What the open sessions have been told, as arrays [sessions, ...], and the observations made of it.

One compiled pass makes the observations of all rows that wait. Row i depends on session i only, so a session's numbers
do not change with what is served beside it. Poses are float64 here; the wire's are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.kernels import kernel
from alpagym_runtime.types import Labels, Observation, PolicySpec

POSES = 512
"""Poses kept a session: 1.6 s of history at 100 Hz thrice over."""

ROUTE_POINTS = 512
"""Longest route that is kept; further points are dropped."""

ROUTE_SPACING_M = 80.0 / 19.0
"""AlpaSim's own spacing; routes of another number of points than the policy reads are resampled to it."""

DIFFERENCE_US = 100_000
"""Velocities come from poses this far apart: at 1 km from the origin float32 poses then err by 1 mm/s."""

Float = NDArray[np.float64]


@dataclass(frozen=True)
class Ego:
    """Poses [K] of one message: time_us [K] i64, pose_local [K,7] (xyz m, quaternion wxyz), strictly increasing."""

    time_us: NDArray[np.int64]
    pose_local: Float


class SessionTable:
    """Arrays by session row; the owner sees to it that one thread at a time touches them.

    Args:
        rows: how many sessions.
        spec: what is observed.

    """

    def __init__(self, rows: int, spec: PolicySpec) -> None:
        self.spec = spec
        self.time_us = np.zeros((rows, POSES), np.int64)
        self.pose = np.zeros((rows, POSES, 7))
        self.count = np.zeros(rows, np.int64)
        self.messages = np.zeros(rows, np.int64)
        # Velocity xyz, acceleration xyz, yaw rate of the newest pose, and the time it belongs to (-1: none).
        self.reported = np.zeros((rows, 7))
        self.reported_us = np.full(rows, -1, np.int64)
        self.route = np.zeros((rows, ROUTE_POINTS, 2))
        self.route_sent = np.zeros(rows, np.int64)  # points that arrived, NaN included; 0: no route
        self.route_known = np.zeros(rows, np.int64)
        self.route_us = np.zeros(rows, np.int64)
        self.now_us = np.zeros(rows, np.int64)
        # The recording in local: x, y, yaw, arc length; None until it is placed.
        self.recording_us = np.zeros((rows, 1), np.int64)
        self.recording = np.zeros((rows, 1, 4))
        self.recording_count = np.zeros(rows, np.int64)
        self._unplaced: dict[int, tuple[int, Ego]] = {}

    def clear(self, row: int) -> None:
        """Forget a session."""
        self.count[row] = self.messages[row] = self.route_sent[row] = self.route_known[row] = 0
        self.reported_us[row], self.now_us[row] = -1, 0
        self.recording_count[row] = 0
        self._unplaced.pop(row, None)

    # ------------------------------------------------------------ what arrives

    def add_poses(self, row: int, ego: Ego, state: tuple[float, ...] | None) -> None:
        """Take poses in any order; a time that is known already is kept as it was.

        Args:
            row: the session.
            ego: the poses.
            state: velocity xyz, acceleration xyz, yaw rate of the last one, rig frame; None if it was not sent.

        """
        fresh = self.messages[row] == 0
        self.messages[row] += 1
        last = int(ego.time_us[-1])
        if state is not None and any(state) and (not fresh or len(ego.time_us) == 1) and last > self.reported_us[row]:
            # The first batch's velocities are in local axes, unless it is the single pose of a standing client.
            self.reported[row], self.reported_us[row] = state, last
        n, k = int(self.count[row]), len(ego.time_us)
        if n and ego.time_us[0] <= self.time_us[row, n - 1]:
            times = np.concatenate([self.time_us[row, :n], ego.time_us])
            poses = np.concatenate([self.pose[row, :n], ego.pose_local])
            times, first = np.unique(times, return_index=True)
            poses = poses[first][-POSES:]
            self.count[row] = n = len(poses)
            self.time_us[row, :n], self.pose[row, :n] = times[-POSES:], poses
            return
        if k > POSES // 2:
            ego, k = Ego(ego.time_us[-POSES // 2 :], ego.pose_local[-POSES // 2 :]), POSES // 2
        if n + k > POSES:
            kept = POSES // 2
            self.time_us[row, :kept] = self.time_us[row, n - kept : n].copy()
            self.pose[row, :kept] = self.pose[row, n - kept : n].copy()
            n = kept
        self.time_us[row, n : n + k], self.pose[row, n : n + k] = ego.time_us, ego.pose_local
        self.count[row] = n + k

    def set_route(self, row: int, points: Float, time_us: int) -> None:
        """Take a route [P,2] m in the rig frame at `time_us`; it ends where the first NaN stands."""
        if self.route_sent[row] and time_us < self.route_us[row]:
            return
        sent = len(points)
        points = points[:ROUTE_POINTS]
        bad = np.flatnonzero(~np.isfinite(points).all(axis=1))
        known = int(bad[0]) if len(bad) else len(points)
        self.route[row, :known] = points[:known]
        self.route_sent[row], self.route_known[row], self.route_us[row] = sent, known, time_us

    def set_recording(self, row: int, anchor_us: int, recording_rig: Ego) -> None:
        """Take the recorded drive in the rig frame at `anchor_us`; it is placed when that pose is known."""
        self._unplaced[row] = (anchor_us, recording_rig)

    def covers(self, row: int, time_us: int) -> bool:
        """Whether the ego's pose at a time is known."""
        n = int(self.count[row])
        return n > 0 and bool(self.time_us[row, 0] <= time_us <= self.time_us[row, n - 1])

    # ------------------------------------------------------------ what it gives

    def pose_at_now(self, rows: NDArray[np.int64]) -> Float:
        """[n,7] ego poses in local at each row's `now_us`."""
        out = np.empty((len(rows), 7))
        _poses_at(self.time_us, self.pose, self.count, rows, self.now_us[rows], out)
        return out

    def observe(self, rows: NDArray[np.int64]) -> Observation:
        """The observation's fields without cameras, rig frame at each row's `now_us`."""
        spec, n = self.spec, len(rows)
        out: Observation = {"time_us": self.now_us[rows]}
        pose = self.pose_at_now(rows)
        if "ego_history_rig" in spec.fields:
            history = np.zeros((n, spec.history_steps, 7), np.float32)
            mask = np.zeros((n, spec.history_steps), bool)
            _history(
                self.time_us, self.pose, self.count, rows, out["time_us"], pose, spec.history_step_us, history, mask
            )
            out["ego_history_rig"], out["ego_history_mask"] = history, mask
        if "ego_dynamics_rig" in spec.fields:
            out["ego_dynamics_rig"] = self.observe_dynamics(rows)
        if "route_rig" in spec.fields:
            route = np.zeros((n, spec.route_points, 2), np.float32)
            route_mask = np.zeros((n, spec.route_points), bool)
            sent = (self.route, self.route_sent, self.route_known, self.route_us)
            _route(self.time_us, self.pose, self.count, *sent, rows, out["time_us"], pose, route, route_mask)
            out["route_rig"], out["route_mask"] = route, route_mask
        if "actors_rig" in spec.fields:
            # AlpaSim tells a driver nothing of other road users but what its pictures show.
            out["actors_rig"] = np.zeros((n, spec.actors, 9), np.float32)
            out["actors_mask"] = np.zeros((n, spec.actors), bool)
        return out

    def observe_dynamics(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """[n,7] velocity xyz m/s, acceleration xyz m/s², yaw rate rad/s: as reported for now, else by differences."""
        out = np.zeros((len(rows), 7), np.float32)
        reported = (self.reported, self.reported_us)
        pose = self.pose_at_now(rows)
        _dynamics(self.time_us, self.pose, self.count, *reported, rows, self.now_us[rows], pose, out)
        return out

    def label(self, rows: NDArray[np.int64], names: tuple[str, ...]) -> Labels:
        """Plans [n,T,3] as recorded, from now on, in the rig frame; masked after the recording's end."""
        out: Labels = {}
        if not names:
            return out
        self.place(rows)
        pose = self.pose_at_now(rows)
        plan = np.zeros((len(rows), self.spec.plan_steps, 3), np.float32)
        mask = np.zeros((len(rows), self.spec.plan_steps), bool)
        recorded = (self.recording_us, self.recording, self.recording_count)
        _recorded_plan(*recorded, rows, self.now_us[rows], pose, self.spec.plan_step_us, plan, mask)
        for name in names:
            out[name], out[f"{name}_mask"] = plan.copy(), mask.copy()
        return out

    def along_recording(self, rows: NDArray[np.int64]) -> tuple[Float, NDArray[np.bool_]]:
        """How the ego stands to the recording now.

        Returns:
            [n,3]: arc length of the ego's projection on the recorded path, arc length of the recording at this time,
            distance to the recorded position at this time, all m; and valid [n,2], for the first and the other two.

        """
        self.place(rows)
        values, valid = np.zeros((len(rows), 3)), np.zeros((len(rows), 2), bool)
        recorded = (self.recording_us, self.recording, self.recording_count)
        _along(*recorded, rows, self.now_us[rows], self.pose_at_now(rows), values, valid)
        return values, valid

    def recorded_arc(self, row: int, time_us: int) -> float:
        """Arc length of the recording at a time, m; at its end for later times, NaN without one."""
        self.place(np.array([row]))
        n = int(self.recording_count[row])
        if not n:
            return float("nan")
        return float(np.interp(time_us, self.recording_us[row, :n], self.recording[row, :n, 3]))

    def place(self, rows: NDArray[np.int64]) -> None:
        """Bring recordings that came since into the local frame."""
        if not self._unplaced:
            return
        for row in rows.tolist():
            if row not in self._unplaced or not self.covers(row, self._unplaced[row][0]):
                continue
            anchor_us, ego = self._unplaced.pop(row)
            at = np.empty((1, 7))
            _poses_at(self.time_us, self.pose, self.count, np.array([row]), np.array([anchor_us]), at)
            count = len(ego.time_us)
            if count > self.recording.shape[1]:
                grown_us = np.zeros((len(self.count), 2 * count), np.int64)
                grown = np.zeros((len(self.count), 2 * count, 4))
                have = self.recording.shape[1]
                grown_us[:, :have], grown[:, :have] = self.recording_us, self.recording
                self.recording_us, self.recording = grown_us, grown
            self.recording_us[row, :count] = ego.time_us
            _to_local(ego.pose_local, at[0], self.recording[row, :count])
            self.recording_count[row] = count


# ---------------------------------------------------------------- kernels


@kernel
def _find(times, count, query):
    """Index of the last time at or before the query; the query lies inside."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high + 1) // 2
        if times[middle] <= query:
            low = middle
        else:
            high = middle - 1
    return low


@kernel
def _pose_at(times, poses, count, query, out):
    """Linear position, normalised linear rotation along the shorter way; the ends are held by the caller's check."""
    i = _find(times, count, query)
    j = min(i + 1, count - 1)
    f = 0.0
    if j > i and query > times[i]:
        f = min((query - times[i]) / (times[j] - times[i]), 1.0)
    if f == 0.0:
        for c in range(7):
            out[c] = poses[i, c]
        return
    for c in range(3):
        out[c] = poses[i, c] + f * (poses[j, c] - poses[i, c])
    dot = 0.0
    for c in range(3, 7):
        dot += poses[i, c] * poses[j, c]
    sign = 1.0 if dot >= 0.0 else -1.0
    # Slerp; below 1e-6 rad the sines cancel and linear is exact to 1e-12.
    angle = np.arccos(min(abs(dot), 1.0))
    a, b = 1.0 - f, f
    if angle > 1e-6:
        sine = np.sin(angle)
        a, b = np.sin((1.0 - f) * angle) / sine, np.sin(f * angle) / sine
    norm = 0.0
    for c in range(3, 7):
        out[c] = a * poses[i, c] + sign * b * poses[j, c]
        norm += out[c] * out[c]
    norm = max(np.sqrt(norm), 1e-12)
    for c in range(3, 7):
        out[c] /= norm


@kernel
def _poses_at(times, poses, count, rows, query, out):
    for n in range(len(rows)):
        _pose_at(times[rows[n]], poses[rows[n]], count[rows[n]], query[n], out[n])


@kernel
def _yaw(pose):
    w, x, y, z = pose[3], pose[4], pose[5], pose[6]
    return np.arctan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))


@kernel
def _into(pose, point, out):
    """Coordinates of a parent point in the pose's child frame; works in place."""
    w, x, y, z = pose[3], -pose[4], -pose[5], -pose[6]
    px, py, pz = point[0] - pose[0], point[1] - pose[1], point[2] - pose[2]
    tx, ty, tz = 2.0 * (y * pz - z * py), 2.0 * (z * px - x * pz), 2.0 * (x * py - y * px)
    out[0] = px + w * tx + (y * tz - z * ty)
    out[1] = py + w * ty + (z * tx - x * tz)
    out[2] = pz + w * tz + (x * ty - y * tx)


@kernel
def _history(times, poses, count, rows, now_us, now, step_us, out, mask):
    at = np.empty(7)
    for n in range(len(rows)):
        row, steps = rows[n], out.shape[1]
        for h in range(steps):
            out[n, h, 3] = 1.0
            query = now_us[n] - (steps - 1 - h) * step_us
            mask[n, h] = query >= times[row, 0]
            if not mask[n, h] or h == steps - 1:
                continue
            _pose_at(times[row], poses[row], count[row], query, at)
            aw, ax, ay, az = now[n, 3], -now[n, 4], -now[n, 5], -now[n, 6]
            bw, bx, by, bz = at[3], at[4], at[5], at[6]
            _into(now[n], at, at)
            w = aw * bw - ax * bx - ay * by - az * bz
            sign = 1.0 if w >= 0.0 else -1.0
            out[n, h, 0], out[n, h, 1], out[n, h, 2] = at[0], at[1], at[2]
            out[n, h, 3] = sign * w
            out[n, h, 4] = sign * (aw * bx + ax * bw + ay * bz - az * by)
            out[n, h, 5] = sign * (aw * by - ax * bz + ay * bw + az * bx)
            out[n, h, 6] = sign * (aw * bz + ax * by - ay * bx + az * bw)


@kernel
def _wrap(angle):
    return (angle + np.pi) % (2.0 * np.pi) - np.pi


@kernel
def _dynamics(times, poses, count, reported, reported_us, rows, now_us, now, out):
    before, earlier = np.empty(7), np.empty(7)
    for n in range(len(rows)):
        row = rows[n]
        if reported_us[row] == now_us[n]:
            for c in range(7):
                out[n, c] = reported[row, c]
            continue
        first = times[row, 0]
        t1 = max(now_us[n] - DIFFERENCE_US, first)
        if t1 >= now_us[n]:
            continue
        t0 = max(t1 - DIFFERENCE_US, first)
        _pose_at(times[row], poses[row], count[row], t1, before)
        _pose_at(times[row], poses[row], count[row], t0, earlier)
        s1, s0 = (now_us[n] - t1) * 1e-6, (t1 - t0) * 1e-6
        yaw_rate = _wrap(_yaw(now[n]) - _yaw(before)) / s1
        velocity, acceleration = np.zeros(3), np.zeros(3)
        for c in range(3):
            v1 = (now[n, c] - before[c]) / s1
            if s0 > 0.0:
                acceleration[c] = (v1 - (before[c] - earlier[c]) / s0) / (0.5 * (s0 + s1))
            # A difference is the mean over its interval, half of which lies behind.
            velocity[c] = v1 + 0.5 * s1 * acceleration[c]
        moved = np.zeros(3)
        origin = now[n].copy()
        origin[:3] = 0.0
        _into(origin, velocity, moved)
        out[n, 0], out[n, 1], out[n, 2] = moved[0], moved[1], moved[2]
        _into(origin, acceleration, moved)
        out[n, 3], out[n, 4], out[n, 5] = moved[0], moved[1], moved[2]
        out[n, 6] = yaw_rate


@kernel
def _route(times, poses, count, route, sent, known, route_us, rows, now_us, now, out, mask):
    at = np.empty(7)
    for n in range(len(rows)):
        row, points = rows[n], out.shape[1]
        v = known[row]
        if v == 0:
            continue
        cos, sin, dx, dy = 1.0, 0.0, 0.0, 0.0
        stale = route_us[row] != now_us[n] and route_us[row] >= times[row, 0]
        if stale and route_us[row] <= times[row, count[row] - 1]:
            # The route was given where the car stood then.
            _pose_at(times[row], poses[row], count[row], route_us[row], at)
            turn, yaw = _yaw(at) - _yaw(now[n]), _yaw(now[n])
            cos, sin = np.cos(turn), np.sin(turn)
            ex, ey = at[0] - now[n, 0], at[1] - now[n, 1]
            dx = np.cos(yaw) * ex + np.sin(yaw) * ey
            dy = np.cos(yaw) * ey - np.sin(yaw) * ex
        if sent[row] == points:
            for r in range(min(points, v)):
                x, y = route[row, r, 0], route[row, r, 1]
                out[n, r, 0], out[n, r, 1] = dx + cos * x - sin * y, dy + sin * x + cos * y
                mask[n, r] = True
            continue
        segment, arc = 0, 0.0
        for r in range(points):
            wanted = r * ROUTE_SPACING_M
            length = 0.0
            while segment < v - 1:
                length = np.hypot(
                    route[row, segment + 1, 0] - route[row, segment, 0],
                    route[row, segment + 1, 1] - route[row, segment, 1],
                )
                if arc + length >= wanted and length > 0.0:
                    break
                arc += length
                segment += 1
            # float32 points: the last one may lie a hair short of its own arc length.
            if segment >= v - 1 and wanted > arc + 1e-3:
                break
            f = 0.0
            if segment < v - 1:
                f = (wanted - arc) / length
            after = min(segment + 1, v - 1)
            x = route[row, segment, 0] + f * (route[row, after, 0] - route[row, segment, 0])
            y = route[row, segment, 1] + f * (route[row, after, 1] - route[row, segment, 1])
            out[n, r, 0], out[n, r, 1] = dx + cos * x - sin * y, dy + sin * x + cos * y
            mask[n, r] = True


@kernel
def _to_local(poses_rig, anchor, out):
    """Planar local poses and arc length [K,4] of poses in the anchor's rig frame."""
    point = np.empty(3)
    aw, ax, ay, az = anchor[3], anchor[4], anchor[5], anchor[6]
    inverse = np.empty(7)
    for k in range(len(poses_rig)):
        # Forward transform: rotate by the anchor, add its position.
        inverse[:3] = 0.0
        inverse[3], inverse[4], inverse[5], inverse[6] = aw, -ax, -ay, -az
        _into(inverse, poses_rig[k], point)
        bw, bx, by, bz = poses_rig[k, 3], poses_rig[k, 4], poses_rig[k, 5], poses_rig[k, 6]
        w = aw * bw - ax * bx - ay * by - az * bz
        x = aw * bx + ax * bw + ay * bz - az * by
        y = aw * by - ax * bz + ay * bw + az * bx
        z = aw * bz + ax * by - ay * bx + az * bw
        out[k, 0], out[k, 1] = anchor[0] + point[0], anchor[1] + point[1]
        out[k, 2] = np.arctan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))
        out[k, 3] = 0.0
        if k > 0:
            out[k, 3] = out[k - 1, 3] + np.hypot(out[k, 0] - out[k - 1, 0], out[k, 1] - out[k - 1, 1])


@kernel
def _recorded_plan(times, recording, count, rows, now_us, now, step_us, plan, mask):
    for n in range(len(rows)):
        row, total = rows[n], count[rows[n]]
        if total == 0:
            continue
        yaw = _yaw(now[n])
        cos, sin = np.cos(yaw), np.sin(yaw)
        for k in range(plan.shape[1]):
            query = now_us[n] + (k + 1) * step_us
            if query < times[row, 0] or query > times[row, total - 1]:
                continue
            i = _find(times[row], total, query)
            j = min(i + 1, total - 1)
            f = 0.0
            if j > i:
                f = (query - times[row, i]) / (times[row, j] - times[row, i])
            x = recording[row, i, 0] + f * (recording[row, j, 0] - recording[row, i, 0]) - now[n, 0]
            y = recording[row, i, 1] + f * (recording[row, j, 1] - recording[row, i, 1]) - now[n, 1]
            heading = recording[row, i, 2] + f * _wrap(recording[row, j, 2] - recording[row, i, 2])
            plan[n, k, 0], plan[n, k, 1] = cos * x + sin * y, cos * y - sin * x
            plan[n, k, 2] = _wrap(heading - yaw)
            mask[n, k] = True


@kernel
def _along(times, recording, count, rows, now_us, now, values, valid):
    for n in range(len(rows)):
        row, total = rows[n], count[rows[n]]
        if total == 0:
            continue
        best = np.inf
        for i in range(max(total - 1, 1)):
            j = min(i + 1, total - 1)
            sx = recording[row, j, 0] - recording[row, i, 0]
            sy = recording[row, j, 1] - recording[row, i, 1]
            ex, ey = now[n, 0] - recording[row, i, 0], now[n, 1] - recording[row, i, 1]
            squared = sx * sx + sy * sy
            f = 0.0
            if squared > 0.0:
                f = min(max((ex * sx + ey * sy) / squared, 0.0), 1.0)
            d = (ex - f * sx) ** 2 + (ey - f * sy) ** 2
            if d < best:
                best = d
                values[n, 0] = recording[row, i, 3] + f * np.sqrt(squared)
        valid[n, 0] = True
        if times[row, 0] <= now_us[n] <= times[row, total - 1]:
            i = _find(times[row], total, now_us[n])
            j = min(i + 1, total - 1)
            f = 0.0
            if j > i:
                f = (now_us[n] - times[row, i]) / (times[row, j] - times[row, i])
            x = recording[row, i, 0] + f * (recording[row, j, 0] - recording[row, i, 0])
            y = recording[row, i, 1] + f * (recording[row, j, 1] - recording[row, i, 1])
            values[n, 1] = recording[row, i, 3] + f * (recording[row, j, 3] - recording[row, i, 3])
            values[n, 2] = np.hypot(now[n, 0] - x, now[n, 1] - y)
            valid[n, 1] = True
