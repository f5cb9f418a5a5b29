r"""What the model is asked and what it answers, as text: components, markers and which of them are labels.

A turn is `<|im_start|>role\\n … <|im_end|>\\n`. The user's turn holds pictures, history, route and question, then the
requests joined by ", then "; the assistant's holds what `order` names of its components, each between its markers. In
generation the last component is only opened, and the turn is left open.

Pictures of one camera are numbered 0 … K - 1 under one name (4 cameras of 4 frames in the releases). Upstream's 1.5 RL
flow takes the samples apart before it builds the prompt, so there every picture is introduced as `Front camera: frame
0 `; `frames="published_rl"` gives those bytes, for checkpoints that were trained on them.

Source: texts and tables of NVlabs/alpamayo-recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from alpagym_alpamayo_r1.vocabulary import marker
from alpagym_plugins import ConfigError, nearest

SYSTEM = "You are a driving assistant that generates safe and accurate actions."
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TURN_END = "<|im_end|>"

USER = ("image", "traj_history", "route", "question", "prompt")
ASSISTANT = ("cot", "meta_action", "traj_future", "answer")
REQUESTS = {
    "cot": "output the chain-of-thought reasoning of the driving process",
    "meta_action": "output meta actions",
    "traj_future": "output the future trajectory",
    # The question stands in the prompt already.
    "answer": "",
}
# By camera index: the order of the releases' sorted camera list.
CAMERAS = (
    ("camera_cross_left_120fov", "Front left"),
    ("camera_front_wide_120fov", "Front"),
    ("camera_cross_right_120fov", "Front right"),
    ("camera_rear_left_70fov", "Rear left"),
    ("camera_rear_tele_30fov", "Rear"),
    ("camera_rear_right_70fov", "Rear right"),
    ("camera_front_tele_30fov", "Front telephoto"),
)
DEFAULT_CAMERAS = (0, 1, 2, 6)


@dataclass(frozen=True)
class PromptLayout:
    """Which components there are, in which order, and which are learned.

    Attributes:
        order: of USER and ASSISTANT names; assistant components last.
        requests: what the prompt asks for, of ASSISTANT names.
        labels: components whose tokens, markers included, are learned.
        camera_names: introduce each camera by name.
        frames: "none" | "numbered" (0 … K - 1 a camera) | "published_rl" (each picture named and numbered 0).

    """

    order: tuple[str, ...] = ("image", "traj_history", "prompt", "traj_future")
    requests: tuple[str, ...] = ("traj_future",)
    labels: tuple[str, ...] = ("traj_future",)
    camera_names: bool = False
    frames: Literal["none", "numbered", "published_rl"] = "none"

    def __post_init__(self) -> None:
        known = (*USER, *ASSISTANT)
        for name in self.order:
            if name not in known:
                near = nearest(name, known)
                hint = f"; did you mean {near!r}?" if near else f"; known: {', '.join(known)}"
                raise ConfigError(f"no component is named {name!r}{hint}", key="order")
        parts = [name in ASSISTANT for name in self.order]
        if parts != sorted(parts) or True not in parts:
            raise ConfigError(f"the assistant's components must come last, got {', '.join(self.order)}", key="order")
        for key in ("requests", "labels"):
            for name in getattr(self, key):
                if name not in ASSISTANT:
                    raise ConfigError(f"{name!r} is none of {', '.join(ASSISTANT)}", key=key)
        for name in self.labels:
            if name not in self.order:
                raise ConfigError(f"{name!r} is not in the order {', '.join(self.order)}", key="labels")
        if self.frames not in ("none", "numbered", "published_rl"):
            raise ConfigError(f"must be none, numbered or published_rl, got {self.frames!r}", key="frames")
        if self.frames == "published_rl" and not self.camera_names:
            raise ConfigError("published_rl introduces each picture by its camera's name", key="camera_names")

    @property
    def answers(self) -> tuple[str, ...]:
        """The assistant's components, in order."""
        return tuple(name for name in self.order if name in ASSISTANT)


LAYOUTS = {
    "sft": PromptLayout(),
    "sft_cot": PromptLayout(
        ("image", "traj_history", "prompt", "cot", "traj_future"), ("cot", "traj_future"), ("cot", "traj_future")
    ),
    "sft_1_5_nav": PromptLayout(
        ("image", "traj_history", "route", "prompt", "traj_future"), camera_names=True, frames="numbered"
    ),
    "sft_1_5_vqa": PromptLayout(
        ("image", "question", "answer"), ("answer",), ("answer",), camera_names=True, frames="numbered"
    ),
    "rl_1": PromptLayout(("image", "traj_history", "prompt", "cot"), ("cot", "traj_future"), ()),
    "rl_1_5": PromptLayout(
        ("image", "traj_history", "prompt", "cot"), ("cot", "traj_future"), (), camera_names=True, frames="numbered"
    ),
    "rl_1_5_published": PromptLayout(
        ("image", "traj_history", "prompt", "cot"), ("cot", "traj_future"), (), camera_names=True, frames="published_rl"
    ),
}
"""The published configurations by name; `rl_1_5_published` has upstream's frame numbering."""


def render(
    layout: PromptLayout,
    *,
    cameras: Sequence[int],
    frames: int,
    history_tokens: int,
    future_tokens: int,
    texts: dict[str, str],
    generate: bool,
) -> str:
    """The whole conversation, one `<|image_pad|>` a picture and placeholders for trajectories.

    Args:
        layout: components and order.
        cameras: index of each camera, pictures follow in this order, oldest first.
        frames: K, pictures a camera.
        history_tokens: placeholders of the history.
        future_tokens: placeholders of the plan.
        texts: cot, meta_action, route, question, answer, where the order names them.
        generate: leave the assistant's turn open after the start marker of the last component.

    Raises:
        ConfigError: a text that the order needs is missing.

    """
    user, assistant = "", ""
    for name in layout.order:
        if name == "image":
            user += _pictures(layout, cameras, frames)
        elif name == "traj_history":
            user += _between(name, marker("traj_history") * history_tokens)
        elif name in ("route", "question"):
            user += _between(name, _text(texts, name))
        elif name == "prompt":
            wanted = [REQUESTS[request] for request in layout.requests if REQUESTS[request]]
            user += ", then ".join(wanted) + "." if wanted else ""
        elif generate and name == layout.answers[-1]:
            assistant += marker(f"{name}_start")
        elif name == "traj_future":
            assistant += _between(name, marker("traj_future") * future_tokens)
        else:
            assistant += _between(name, _text(texts, name))
    head = _turn("system", SYSTEM) + _turn("user", user)
    answer = f"<|im_start|>assistant\n{assistant}"
    return head + (answer if generate else f"{answer}{TURN_END}\n")


def _pictures(layout: PromptLayout, cameras: Sequence[int], frames: int) -> str:
    out = ""
    for camera in cameras:
        if not 0 <= camera < len(CAMERAS):
            raise ConfigError(f"camera index {camera} is outside 0 … {len(CAMERAS) - 1}", key="cameras")
        name = f"{CAMERAS[camera][1]} camera: " if layout.camera_names else ""
        if layout.frames == "published_rl":
            out += f"{name}frame 0 {IMAGE}" * frames
            continue
        out += name
        for k in range(frames):
            out += (f"frame {k} " if layout.frames == "numbered" else "") + IMAGE
    return out


def _text(texts: dict[str, str], name: str) -> str:
    if name not in texts:
        raise ConfigError(f"the order has {name!r}, the sample has no such text", key="order")
    for word in (marker(f"{name}_end"), TURN_END, "<|image_pad|>"):
        if word in texts[name]:
            raise ConfigError(f"the text must not hold {word}", key=name)
    return texts[name]


def _between(name: str, content: str) -> str:
    return f"{marker(f'{name}_start')}{content}{marker(f'{name}_end')}"


def _turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}{TURN_END}\n"
