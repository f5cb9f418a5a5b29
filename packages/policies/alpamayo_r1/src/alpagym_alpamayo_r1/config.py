"""Options of the Alpamayo policies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from alpagym_plugins import ConfigError, Problem, check_choice, check_range

if TYPE_CHECKING:
    from alpagym_alpamayo_r1.policy import AlpamayoPolicy
    from alpagym_runtime.types import PolicySpec

# In the order of their index in prompts; an observation's field is `camera_<name>`.
CAMERA_NAMES = (
    "cross_left_120fov",
    "front_wide_120fov",
    "cross_right_120fov",
    "rear_left_70fov",
    "rear_tele_30fov",
    "rear_right_70fov",
    "front_tele_30fov",
)
RELEASED_CAMERAS = ("cross_left_120fov", "front_wide_120fov", "cross_right_120fov", "front_tele_30fov")
HEADS = ("tokens", "expert")
ENGINES = ("eager", "graph", "vllm")
PICTURE_WORDS = ("auto", "none", "numbered", "published_rl")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass
class ModelSection:
    """Which weights, and how they are held.

    Attributes:
        path: converted checkpoint directory (`alpagym checkpoint convert`).
        dtype: auto (as in the files) | float32 | bfloat16 | float16.
        attention: sdpa | eager | flash_attention_2 (where flash-attn is installed, in bfloat16 or float16); the action
            expert, whose mask flash-attn does not take, stays with sdpa.

    """

    path: str = ""
    dtype: str = "auto"
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("attention", self.attention, ("sdpa", "eager", "flash_attention_2"))


@dataclass
class _Driving:
    """What all Alpamayo policies share.

    Attributes:
        head: what makes the plan: tokens (128 trajectory tokens) | expert (flow matching, ten steps).
        reasoning_tokens: most tokens of reasoning before the plan; 0: none is asked for.
        noise_level: of the expert's steps when it samples, in units of its first noise; 0: only the first noise is
            drawn, and no log-probability is known. The sampling's temperature scales both.
        noise_steps: of the expert's steps, the first so many draw noise and are scored, the others follow the flow;
            null: all. A score costs a forward of the expert each.
        noise_correlation: with head tokens, of the draws of one coordinate from a waypoint to the next, AR(1); 0: as
            published. White draws of 64 steps average out, so that the plans of a group hardly differ in speed;
            `log_prob` stays the tokens' own (ADR 83).
        noise_modes: with head expert, a step's noise moves so many cosines of each action over the plan, the constant
            one first, and its density is of these; null: each way-point has its own noise, which averages out.
        decided_s: seconds of a plan that are decided; the rest is decided again before it is driven, earns nothing and
            only widens the ratio. head tokens: what comes later is not written, the plan keeps speed and curvature.
            head expert: its coordinates do not count in the log-probability.
        train_backbone: with head expert, let gradients of a score through to the backbone.
        cameras: which it sees, in the order of `CAMERA_NAMES`.
        frames: pictures a camera, 0.1 s apart.
        height, width: px of a rendered picture.
        picture_words: before pictures: auto (as the checkpoint says) | none | numbered (camera names, frames 0 … K - 1)
            | published_rl (every picture named, and numbered 0, as in the published RL of 1.5).
        gradient_checkpointing: a score computes the activations of a layer again in its backward pass: less memory,
            a third more time. Tokens only: the expert reads a cache, which that would not fill.
        engine: eager | graph (static cache, compiled and captured on a GPU; pictures seen before are not seen again) |
            vllm (head tokens; not run with vLLM itself). An engine acts; scores come from the plain model, whose
            numbers differ in the last bits.
        context: with an engine, most tokens of prompt and completion together.
        vllm_memory_share: of the GPU that vLLM takes: a second copy of the weights, and its cache.
        rows: observations of one forward; a batch is cut into forwards of exactly this many, the last one padded, so
            that a row's bits do not depend on its company. On a GPU a score takes no more rows than there are.

    """

    head: str = "tokens"
    reasoning_tokens: int = 0
    noise_level: float = 0.5
    noise_steps: int | None = None
    noise_correlation: float = 0.0
    noise_modes: int | None = None
    decided_s: float = 6.4
    train_backbone: bool = False
    engine: str = "eager"
    context: int = 4096
    vllm_memory_share: float = 0.4
    cameras: list[str] = field(default_factory=lambda: list(RELEASED_CAMERAS))
    frames: int = 4
    height: int = 320
    width: int = 576
    picture_words: str = "auto"
    gradient_checkpointing: bool = False
    rows: int = 8

    def __post_init__(self) -> None:
        check_choice("head", self.head, HEADS)
        check_choice("engine", self.engine, ENGINES)
        check_choice("picture_words", self.picture_words, PICTURE_WORDS)
        if self.gradient_checkpointing and self.head == "expert":
            raise ConfigError("needs head=tokens: the expert reads a cache", key="gradient_checkpointing")
        check_range("context", self.context, minimum=256, maximum=262_144)
        check_range("vllm_memory_share", self.vllm_memory_share, above=0, maximum=1)
        if self.engine == "vllm" and self.head == "expert":
            raise ConfigError("vllm serves no action expert; take graph, or head=tokens", key="engine")
        check_range("reasoning_tokens", self.reasoning_tokens, minimum=0, maximum=4096)
        check_range("noise_level", self.noise_level, minimum=0.0, maximum=2.0)
        if self.noise_steps is not None:
            check_range("noise_steps", self.noise_steps, minimum=1, maximum=1000)
        check_range("noise_correlation", self.noise_correlation, minimum=0.0, below=1.0)
        if self.noise_correlation and (self.head == "expert" or self.engine == "vllm"):
            raise ConfigError(
                "must be 0 with head=expert, whose steps draw whole plans, and with engine=vllm, which draws by itself",
                key="noise_correlation",
            )
        if self.noise_modes is not None:
            check_range("noise_modes", self.noise_modes, minimum=1, maximum=64)
        check_range("decided_s", self.decided_s, minimum=0.1, maximum=6.4)
        for name in self.cameras:
            check_choice("cameras", name, CAMERA_NAMES)
        if self.cameras != sorted(set(self.cameras), key=CAMERA_NAMES.index):
            raise ConfigError(
                f"must be in this order, each once: {', '.join(CAMERA_NAMES)}; got {', '.join(self.cameras)}",
                key="cameras",
            )
        check_range("frames", self.frames, minimum=1, maximum=16)
        for key in ("height", "width"):
            check_range(key, getattr(self, key), minimum=32, maximum=4096)
        check_range("rows", self.rows, minimum=1, maximum=1024)

    def spec(self) -> PolicySpec:
        """What it reads and answers; needs no torch."""
        from alpagym_runtime.types import PolicySpec

        return PolicySpec(
            fields=("ego_history_rig", "ego_dynamics_rig"),
            cameras=dict.fromkeys(self.cameras, (self.height, self.width)),
            frames=self.frames,
        )


@dataclass
class AlpamayoTinyConfig(_Driving):
    """An Alpamayo of 0.8 million random weights, made locally: for tests and for trying a pipeline out on a CPU.

    Same words, prompt and architecture as 1.5. It sees no camera by default, so that it runs in every world.

    Attributes:
        hidden: width of its layers.
        future_bins: of each number of a plan; 1.5 has 3000. Fewer are learned from fewer drives, and cost less.
        waypoints: of a plan, 0.1 s apart; 1.5 has 64, of which a car that decides again after 0.5 s follows few.
        denoising_steps: of the expert when it drives; 1.5 has ten.
        seed: of the first weights.

    """

    cameras: list[str] = field(default_factory=list)
    height: int = 64
    width: int = 96
    hidden: int = 64
    future_bins: int = 3000
    waypoints: int = 64
    denoising_steps: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("hidden", self.hidden, minimum=16, maximum=1024)
        if self.hidden % 8:
            raise ConfigError(f"must be a multiple of 8, got {self.hidden}", key="hidden")
        check_range("future_bins", self.future_bins, minimum=16, maximum=3000)
        check_range("waypoints", self.waypoints, minimum=4, maximum=64)
        check_range("denoising_steps", self.denoising_steps, minimum=1, maximum=1000)
        check_range("seed", self.seed, minimum=0, maximum=2**63 - 1)

    def spec(self) -> PolicySpec:
        """What it reads and answers; needs no torch."""
        return replace(super().spec(), plan_steps=self.waypoints)

    def build(self, device: str = "cpu") -> AlpamayoPolicy:
        """The policy with fresh weights."""
        policy = _policy_module("alpamayo_tiny")
        return policy.tiny_policy(self, device)


@dataclass
class _Released(_Driving):
    model: ModelSection = field(default_factory=ModelSection)

    HUGGING_FACE: ClassVar[str]  # the release that a checkpoint is converted from, as kind/owner/name

    def preflight(self, config: Any, machine: Any) -> Iterable[Problem]:
        """Whether the checkpoint is there and whole, and a GPU has room for it; reads config and headers only."""
        from alpagym_alpamayo_r1.preflight import checkpoint_problems, memory_problems

        yield from checkpoint_problems(self.model.path, self.HUGGING_FACE.removeprefix("models/"))
        yield from memory_problems(self, config, machine)

    def parameters(self) -> tuple[int, int] | None:
        """Trainable and frozen parameters, from the checkpoint's headers; None if they cannot be read."""
        from alpagym_alpamayo_r1.preflight import parameter_counts

        return parameter_counts(self.model.path)

    def _build(self, name: str, device: str) -> AlpamayoPolicy:
        if not self.model.path:
            raise ConfigError("give a converted checkpoint: policy.model.path=DIR", key="policy.model.path")
        policy = _policy_module(name)
        return policy.load_policy(self, device)


@dataclass
class Alpamayo1Config(_Released):
    """Alpamayo 1 from a converted checkpoint.

    Attributes:
        model: which weights.

    """

    HUGGING_FACE = "models/nvidia/Alpamayo-R1-10B"

    def build(self, device: str = "cpu") -> AlpamayoPolicy:
        """The policy with the checkpoint's weights."""
        return self._build("alpamayo_1", device)


@dataclass
class Alpamayo15Config(_Released):
    """Alpamayo 1.5 from a converted checkpoint.

    Attributes:
        model: which weights.

    """

    HUGGING_FACE = "models/nvidia/Alpamayo-1.5-10B"

    def build(self, device: str = "cpu") -> AlpamayoPolicy:
        """The policy with the checkpoint's weights."""
        return self._build("alpamayo_1_5", device)


def _policy_module(name: str):  # type: ignore[no-untyped-def]
    try:
        from alpagym_alpamayo_r1 import policy
    except ImportError as err:
        raise ConfigError(
            f"policy {name!r} needs the module {err.name!r}: pip install 'alpagym-alpamayo-r1[torch]'", key="policy"
        ) from err
    return policy
