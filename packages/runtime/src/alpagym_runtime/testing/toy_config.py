"""Options of the toy world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from alpagym_plugins import check_range

if TYPE_CHECKING:
    from alpagym_runtime.testing.toy import ToySimulator


@dataclass
class ToyConfig:
    """A straight road with a parked car on it: small enough to read, whole enough to train on in a test.

    Attributes:
        control_period_us: time between decisions. At most 250 ms: at 30 m/s a longer tick could jump over the car.
        late_measures: measures come with the episode's end only.
        fail_every: every n-th first attempt fails with a transient failure in its third tick; 0 never.

    """

    control_period_us: int = 200_000
    late_measures: bool = False
    fail_every: int = 0

    def __post_init__(self) -> None:
        check_range("control_period_us", self.control_period_us, minimum=10_000, maximum=250_000)
        check_range("fail_every", self.fail_every, minimum=0)

    def build(self, policy_spec: Any, dataset: Any, slots: int, labels: Sequence[str]) -> ToySimulator:
        """A simulator with `slots` slots over the dataset's split, computing what `policy_spec` and `labels` name."""
        from alpagym_runtime.testing.toy import ToySimulator

        return ToySimulator(self, policy_spec, dataset, slots, labels)
