"""What the bank holds of each agent, what traffic keeps of it, and what agents see of each other: names of columns."""

from __future__ import annotations

import numpy as np

from alpagym_runtime.kernels import kernel
from alpagym_runtime.simulators.embedded.scene import KINDS, MAX_ACTORS

# Columns of bank.agents.
PATH, PATH_N, STOP, STOP_N, LANES_LEFT, LANES_RIGHT, YIELDS = range(7)
# Columns of bank.agent_numbers.
START_ARC, START_SPEED, DESIRED, LATERAL, LANE_WIDTH = range(5)
# Columns of bank.stops.
STOP_ARC, STOP_GROUP, STOP_X, STOP_Y = range(4)
# Columns of Slots.agents.
ARC, SPEED, ACCELERATION, OFFSET, OFFSET_TARGET, WAITED, LANE, NEXT_STOP = range(8)

# Rows of what agents see of each other, see `make_view`.
X, Y, COS, SIN, PACE, LONG, WIDE, ON_FOOT = range(8)

PEDESTRIAN = KINDS.index("pedestrian")
NOBODY = -1

NOWHERE_M = 1e9
"""Where those are who are not there."""

SIGHT_M = 55.0


@kernel
def make_view():
    """Room for what the agents of one slot see: (around [8,MAX_ACTORS + 1], seen [S], S ≥ MAX_ACTORS + 1)."""
    return np.empty((8, MAX_ACTORS + 1)), np.zeros((MAX_ACTORS // 8 + 1) * 8, np.uint8)
