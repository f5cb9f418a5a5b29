"""Options of the published open-loop rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from alpagym_plugins import ConfigError, check_choice, check_range

if TYPE_CHECKING:
    from alpagym_runtime.types import RewardTerm, SimulatorSpec

GRADERS = ("lingo_judge", "word_overlap")


@dataclass
class PaiMotionConfig:
    """- l2_weight · ADE / ade_limit_m + comfort_weight · comfort, or -1 where the ADE is not below the limit.

    Attributes:
        l2_weight: of the mean distance to the recorded drive.
        comfort_weight: of comfort, which is in [-1, 0].
        ade_limit_m: of the gate, strict.

    """

    l2_weight: float = 0.4
    comfort_weight: float = 0.1
    ade_limit_m: float = 3.0

    def __post_init__(self) -> None:
        check_range("l2_weight", self.l2_weight, minimum=0)
        check_range("comfort_weight", self.comfort_weight, minimum=0)
        check_range("ade_limit_m", self.ade_limit_m, above=0)

    def build(self, simulator_spec: SimulatorSpec) -> RewardTerm:
        """The term for this simulator; ConfigError where it has no such measure."""
        from alpagym_runtime.rewards.pai import PaiMotion

        return PaiMotion(self, simulator_spec)


@dataclass
class PaiDistanceConfig:
    """- ADE / (ADE + half_at_m), in [-1, 0]: tells plans apart that a gate holds for equal. Not a published term.

    It falls off so that a plan which comes near counts for more than one that is far off costs.

    Attributes:
        half_at_m: the mean distance to the recorded drive that costs one half.

    """

    half_at_m: float = 3.0

    def __post_init__(self) -> None:
        check_range("half_at_m", self.half_at_m, above=0)

    def build(self, simulator_spec: SimulatorSpec) -> RewardTerm:
        """The term for this simulator; ConfigError where it has no such measure."""
        from alpagym_runtime.rewards.pai import PaiDistance

        return PaiDistance(self, simulator_spec)


@dataclass
class PaiJointConfig:
    """Motion and reasoning; -1 where a gate fails: no reasoning, a score not above its limit, an ADE not below its.

    The score is the grader's probability less 1, in [-1, 0].

    Attributes:
        variant: corrected (+ reasoning_weight · score / 0.4: better words pay more) | published (+ reasoning_weight ·
            score / -0.4, as the recipe has it: the worst admitted words pay most).
        l2_weight, comfort_weight, reasoning_weight: of the parts.
        ade_limit_m: of the gate, strict.
        score_limit: of the gate, strict.
        grader: lingo_judge (a local checkpoint) | word_overlap (share of common words: for tests, no judge).
        grader_path: the checkpoint's directory; the hub is never asked.
        grader_device: auto | cpu | cuda:N.

    """

    labels: ClassVar[tuple[str, ...]] = ("cot_utf8",)

    variant: str = "corrected"
    l2_weight: float = 0.2
    comfort_weight: float = 0.0
    reasoning_weight: float = 0.3
    ade_limit_m: float = 3.0
    score_limit: float = -0.4
    grader: str = "lingo_judge"
    grader_path: str = ""
    grader_device: str = "auto"

    def __post_init__(self) -> None:
        check_choice("variant", self.variant, ("corrected", "published"))
        for key in ("l2_weight", "comfort_weight", "reasoning_weight"):
            check_range(key, getattr(self, key), minimum=0)
        check_range("ade_limit_m", self.ade_limit_m, above=0)
        check_range("score_limit", self.score_limit, minimum=-1, below=0)
        check_choice("grader", self.grader, GRADERS)

    def build(self, simulator_spec: SimulatorSpec) -> RewardTerm:
        """The term for this simulator; ConfigError where a measure or the grader's checkpoint is missing."""
        if self.grader == "lingo_judge" and not self.grader_path:
            raise ConfigError(
                "give the local Lingo-Judge checkpoint's directory (hf download wayveai/Lingo-Judge --local-dir DIR), "
                "or grader=word_overlap to try things out",
                key="grader_path",
            )
        from alpagym_runtime.rewards.pai import PaiJoint

        return PaiJoint(self, simulator_spec)
