"""A process that decodes parts of samples into shared memory; started by `loader`, ends when its socket closes.

It talks over an inherited socket pair that nobody else can reach, in lines of JSON: data, never code. Pictures do not
pass through the socket: they are written to their place in a file without a name that both sides have mapped.
"""

from __future__ import annotations

import json
import mmap
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np

from alpagym_runtime.errors import CorruptFileError, OutOfRangeError, SceneError
from alpagym_runtime.simulators.pai.clips import Sample
from alpagym_runtime.simulators.pai.samples import Layout, motion_array, read_motion, read_pictures
from alpagym_runtime.simulators.pai.tree import Tree


def read_part(
    tree: Tree, layout: Layout, sample: Sample, camera: str, max_gap_us: int, target: memoryview
) -> dict[str, Any]:
    """Decode one camera (or, with "", the motion) into `target`; returns times and numbers of the frames."""
    if not camera:
        values = motion_array(read_motion(tree, sample, layout, max_gap_us))
        target[: values.nbytes] = values.tobytes()
        return {}
    pictures = read_pictures(tree, sample, camera, layout)
    place = np.frombuffer(target, np.uint8, pictures.images.size)
    place[:] = pictures.images.reshape(-1)
    return {"time_us": pictures.time_us.tolist(), "number": pictures.number.tolist()}


def serve(connection: socket.socket, arena: mmap.mmap) -> None:
    """Answer jobs until the other side closes."""
    lines = connection.makefile("rb")
    first = lines.readline()
    if not first:
        return
    setup = json.loads(first)
    layout_data = setup["layout"]
    layout_data["cameras"] = {name: tuple(size) for name, size in layout_data["cameras"].items()}
    layout = Layout(**layout_data)
    tree = Tree(Path(setup["root"]))
    view = memoryview(arena)
    for line in lines:
        job = json.loads(line)
        sample = Sample("", job["clip_id"], job["chunk"], "", job["t0_us"])
        begin, size = job["offset"], job["size"]
        reply: dict[str, Any] = {"job": job["job"]}
        try:
            reply |= read_part(tree, layout, sample, job["camera"], setup["max_gap_us"], view[begin : begin + size])
        except (SceneError, CorruptFileError, OutOfRangeError, ValueError, OSError) as err:
            reply["error"] = str(err)
        try:
            connection.sendall(json.dumps(reply).encode() + b"\n")
        except OSError:
            return  # nobody wants it any more


def main() -> None:
    """Arguments: the socket's and the shared file's descriptors, and the file's size."""
    handle, file, size = (int(text) for text in sys.argv[1:4])
    with socket.socket(fileno=handle) as connection:
        serve(connection, mmap.mmap(file, size))


if __name__ == "__main__":
    main()
