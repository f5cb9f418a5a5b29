"""`DriveResponse` bytes straight from arrays: every pose is a record of 52 bytes, so a plan is one copy.

Setting 65 poses through message objects takes 0.1 ms a response, this a few microseconds a batch; a test parses the
bytes with the generated messages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.kernels import kernel

# Trajectory.poses[]: PoseAtTime { pose { vec { x y z } quat { w x y z } } timestamp_us }, every field written out.
RECORD = np.dtype(
    [
        ("head", "u1", 6),  # poses (10) of 50 bytes, pose (10) of 39 bytes, vec (10) of 15 bytes
        ("x_tag", "u1"),
        ("x", "<f4"),
        ("y_tag", "u1"),
        ("y", "<f4"),
        ("z_tag", "u1"),
        ("z", "<f4"),
        ("quat", "u1", 2),  # quat (18) of 20 bytes
        ("qw_tag", "u1"),
        ("qw", "<f4"),
        ("qx_tag", "u1"),
        ("qx", "<f4"),
        ("qy_tag", "u1"),
        ("qy", "<f4"),
        ("qz_tag", "u1"),
        ("qz", "<f4"),
        ("time_tag", "u1"),
        ("time_us", "<u8"),
    ]
)
assert RECORD.itemsize == 52
_TEMPLATE = np.zeros((), RECORD)
_TEMPLATE["head"] = [0x0A, 50, 0x0A, 39, 0x0A, 15]
_TEMPLATE["quat"] = [0x12, 20]
for _name, _tag in {
    "x": 0x0D, "y": 0x15, "z": 0x1D, "qw": 0x0D, "qx": 0x15, "qy": 0x1D, "qz": 0x25, "time": 0x11,
}.items():  # fmt: skip
    _TEMPLATE[f"{_name}_tag"] = _tag

TERMINATE = b"\x20\x01"
"""`terminate_session = true` and no plan."""


def plan_in_local(plan_rig: NDArray[np.float32], pose_local_to_rig: NDArray[np.float64]) -> NDArray[np.float32]:
    """Plans [n,T,3] (x m, y m, yaw rad in the rig frame) as local poses [n,T+1,7], the present pose first.

    The plan lies in the plane of the rig's x and y axes, so a car on a slope plans along the slope.

    Args:
        plan_rig: finite.
        pose_local_to_rig: [n,7] xyz m, quaternion wxyz.

    Returns:
        float32 [n,T+1,7], unit quaternions.

    """
    out = np.empty((len(plan_rig), plan_rig.shape[1] + 1, 7), np.float32)
    _plan_in_local(np.ascontiguousarray(plan_rig, np.float32), pose_local_to_rig, out)
    return out


@kernel
def _plan_in_local(plan, pose, out):
    for n in range(len(plan)):
        w, x, y, z = pose[n, 3], pose[n, 4], pose[n, 5], pose[n, 6]
        norm = np.sqrt(w * w + x * x + y * y + z * z)
        w, x, y, z = w / norm, x / norm, y / norm, z / norm
        xx, xy = 1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y - w * z)
        yx, yy = 2.0 * (x * y + w * z), 1.0 - 2.0 * (x * x + z * z)
        zx, zy = 2.0 * (x * z - w * y), 2.0 * (y * z + w * x)
        for c in range(3):
            out[n, 0, c] = pose[n, c]
        out[n, 0, 3], out[n, 0, 4], out[n, 0, 5], out[n, 0, 6] = w, x, y, z
        for k in range(plan.shape[1]):
            px, py = float(plan[n, k, 0]), float(plan[n, k, 1])
            half = float(plan[n, k, 2]) / 2.0
            c, s = np.cos(half), np.sin(half)
            out[n, k + 1, 0] = pose[n, 0] + xx * px + xy * py
            out[n, k + 1, 1] = pose[n, 1] + yx * px + yy * py
            out[n, k + 1, 2] = pose[n, 2] + zx * px + zy * py
            out[n, k + 1, 3] = w * c - z * s
            out[n, k + 1, 4] = x * c + y * s
            out[n, k + 1, 5] = y * c - x * s
            out[n, k + 1, 6] = z * c + w * s


def drive_replies(
    plan_rig: NDArray[np.float32],
    pose_local_to_rig: NDArray[np.float64],
    now_us: NDArray[np.int64],
    step_us: int,
    samples: bool,
) -> list[bytes]:
    """One serialised `DriveResponse` a plan.

    Args:
        plan_rig: [n,T,3], poses at now + step … now + T·step.
        pose_local_to_rig: [n,7], the ego now.
        now_us: [n].
        step_us: between poses.
        samples: put the plan among `debug_info.sampled_trajectories` too.

    """
    poses = plan_in_local(plan_rig, pose_local_to_rig)
    records = pose_records(poses, now_us[:, None] + np.arange(poses.shape[1]) * step_us)
    size = varint(poses.shape[1] * RECORD.itemsize)
    bodies = [row.tobytes() for row in records]
    if not samples:
        return [b"\x12" + size + body for body in bodies]
    debug = varint(1 + len(size) + len(bodies[0])) if bodies else b""
    return [b"\x12" + size + body + b"\x1a" + debug + b"\x12" + size + body for body in bodies]


def pose_records(poses: NDArray[Any], time_us: NDArray[np.int64]) -> NDArray[Any]:
    """The bytes of `Trajectory` messages as records [...]: poses [...,7] (xyz m, quaternion wxyz) at times [...]."""
    records = np.full(poses.shape[:-1], _TEMPLATE, RECORD)
    for c, name in enumerate(("x", "y", "z", "qw", "qx", "qy", "qz")):
        records[name] = poses[..., c]
    records["time_us"] = time_us
    return records


def varint(value: int) -> bytes:
    """A length as the wire writes it."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
