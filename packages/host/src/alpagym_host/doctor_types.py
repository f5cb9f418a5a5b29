"""What the checks of `alpagym doctor` get and give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from alpagym_host.alpasim import starts_alpasim
from alpagym_runtime.machine import Machine
from alpagym_runtime.run_config import RunConfig


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        name: of the check.
        state: ok | off (absent, and not asked for) | warn | wrong.
        text: what was found.
        remedy: the command that helps.

    """

    name: str
    state: Literal["ok", "off", "warn", "wrong"]
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Context:
    """What a check may ask.

    Attributes:
        config: the run to check for.
        machine: this one.
        timeout_s: longest wait for one answer.
        ids: further Hugging Face ids.

    """

    config: RunConfig
    machine: Machine
    timeout_s: float
    ids: tuple[str, ...] = ()

    @property
    def starts_alpasim(self) -> bool:
        """Whether an AlpaSim is started for the run on this machine."""
        return starts_alpasim(self.config)

    @property
    def uses_cosmos(self) -> bool:
        """Whether Cosmos-RL trains on this machine."""
        return self.config.trainer.type == "cosmos" and self.config.deploy.kind == "local"

    def missing(self, needed: bool) -> Literal["off", "wrong"]:
        """The state of something that is absent."""
        return "wrong" if needed else "off"
