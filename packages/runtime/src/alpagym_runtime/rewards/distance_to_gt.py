"""Distance to the recorded drive.

A drive that crashes early must not come off best: where a world ends drives early and says what they then miss
(`distance_to_gt_stranded_m`), those samples count too, with the car standing where it was. AlpaSim drives on, so its
own samples go to the end.
"""

from __future__ import annotations

import math

import numpy as np

from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.rewards.base import Float, Term, require
from alpagym_runtime.types import Decision, Episode, SimulatorSpec, TickBatch

MEASURE = "distance_to_gt_m"
STRANDED = "distance_to_gt_stranded_m"


class DistanceToGt(Term):
    """sqrt(mean(d²)) in m over the defined samples from the handover's to the horizon; paid with the last tick."""

    def __init__(self, simulator_spec: SimulatorSpec) -> None:
        self.needs = require(simulator_spec, "distance_to_gt", MEASURE)
        # The embedded world computes this measure for whoever asks whether it is there.
        self._stranded = STRANDED in simulator_spec.measures

    def tick(self, batch: TickBatch, decisions: Decision | None) -> Float:
        """[n] zeros."""
        return np.zeros(len(batch))

    def end(self, episode: Episode) -> float:
        """The root mean square, m.

        Raises:
            SimulatorError: no sample is defined; permanent, since another attempt has the same recording.

        """
        series = episode.measures.get(MEASURE)
        distances = series.value[series.valid] if series is not None else np.zeros(0)
        if not len(distances):
            raise SimulatorError(
                f"term 'distance_to_gt' is undefined in scene {episode.request.scene_id!r}: "
                f"no valid sample of {MEASURE!r} from the handover on",
                code="UNDEFINED_MEASURE",
                permanent=True,
            )
        if self._stranded:
            distances = np.concatenate([distances, episode.measures[STRANDED].value])
        return math.sqrt(float(np.mean(distances * distances)))
