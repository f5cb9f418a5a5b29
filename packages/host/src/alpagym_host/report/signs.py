"""Signs of health and of sickness in a run, in words. Each rule is one number against one limit, stated in its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from alpagym_runtime.rollouts.references import CHEATS, RECORDING

Level = Literal["good", "watch", "bad"]

SLOW, FAST = 0.8, 1.1
"""Limits of the speed ratio."""
STANDING = 0.25
"""Limit of the share of the time below 0.5 m/s, above the recording's."""
WEAVING_PER_S = 0.5
"""Limit of changes between left and right a second, above the recording's."""
MANNER = ("speed_ratio", "standing_share", "weaving_per_s")
MANY = 0.2
KL_LIMIT, KL_BLOW_UP = 0.05, 0.3
ENOUGH_SCENES = 256
BEFORE = {"warm_start": "the warm start", "start": "the untrained policy"}
"""What training can have started from, the nearest first."""


@dataclass(frozen=True)
class Sign:
    """One finding."""

    level: Level
    title: str
    text: str


def signs(
    evaluations: Mapping[str, Mapping[str, Any]],
    comparisons: Sequence[Mapping[str, Any]],
    training: Sequence[Mapping[str, Any]],
    references: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Sign]:
    """What a person would look for, worst first.

    Args:
        evaluations: summaries by name.
        comparisons: of the last and the best weights with what training started from.
        training: lines of metrics.jsonl that are training steps.
        references: what `hold_against` says of the recording and of policies that cheat; None where none drove.

    """
    references = references or {}
    found = [*_gain(evaluations, comparisons)]
    final = evaluations.get("final")
    if final is not None:
        recording = references.get(RECORDING)
        found += [*_ends(final), *_manner(final, recording), *_infrastructure(final), *_certainty(final)]
        found += _cheats(evaluations, references)
    grpo = [row for row in training if "kl" in row or "groups" in row]
    if grpo:
        found += [*_updates(grpo), *_groups(grpo), *_open_loop(grpo)]
    imitation = [row for row in training if "validation_loss" in row]
    if imitation:
        found += [_imitation(imitation)]
    order = {"bad": 0, "watch": 1, "good": 2}
    return sorted(found, key=lambda sign: order[sign.level])


def _gain(evaluations: Mapping[str, Mapping[str, Any]], comparisons: Sequence[Mapping[str, Any]]) -> Iterator[Sign]:
    last = next((c for c in comparisons if c["after"] == "final"), None)
    if last is not None and last["driving_score"]["mean"] is not None:
        gain, than = last["driving_score"], BEFORE[last["before"]]
        text = f"Scene by scene {gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}] against {than}."
        if gain["low"] > 0.0:
            yield Sign("good", "It drives better than before training", text)
        elif gain["high"] < 0.0:
            yield Sign("bad", "It drives worse than before training", text)
        else:
            yield Sign("watch", "No difference to before training is shown", f"{text} The interval holds 0.")
        for rate, words in (("collision_at_fault", "Collisions at fault"), ("offroad", "Drives off the road")):
            yield from _rate(last["rates"].get(rate), words, than)
    fresh, warm = (evaluations.get(name, {}).get("driving_score", {}).get("mean") for name in ("start", "warm_start"))
    if fresh is not None and warm is not None and warm <= fresh:
        text = f"Fresh weights score {fresh:.3f}, the warm start {warm:.3f}: GRPO begins with nothing to improve."
        yield Sign("bad", "Imitation taught nothing", text)
    score = {name: evaluations[name]["driving_score"]["mean"] for name in ("final", "best") if name in evaluations}
    if len(score) == 2 and None not in score.values() and score["best"] - score["final"] > 0.03:
        yield Sign(
            "watch",
            "It was better before the end",
            f"The best weights on val score {score['best']:.3f} on test, the last ones {score['final']:.3f}; "
            "they are in checkpoints/best.",
        )


def _rate(rate: Mapping[str, Any] | None, words: str, than: str) -> Iterator[Sign]:
    if rate is None or rate["difference"]["mean"] is None:
        return
    shares = f"{100 * rate['before']['mean']:.1f} % to {100 * rate['after']['mean']:.1f} % of drives"
    if rate["difference"]["low"] > 0.0:
        yield Sign("bad", f"{words} rose", f"From {shares} against {than}.")
    elif rate["difference"]["high"] < 0.0:
        yield Sign("good", f"{words} fell", f"From {shares} against {than}.")


def _ends(final: Mapping[str, Any]) -> Iterator[Sign]:
    for rate, words in (("collision_at_fault", "collide and are at fault"), ("offroad", "leave the road")):
        share = final["rates"].get(rate)
        if share is not None and share >= MANY:
            level: Level = "bad" if share >= 2 * MANY else "watch"
            yield Sign(level, f"Many drives {words}", f"{100 * share:.1f} % of them.")


def manner(evaluation: Mapping[str, Any], recording: Mapping[str, Any] | None = None) -> list[str]:
    """What the manner of driving looks like: parks, creeps, speeds, weaves; empty for none of them.

    Args:
        evaluation: a summary.
        recording: that of the recording in the same scenes; where it stands or turns, others may too.

    """
    pace, standing, weaving = (
        _mean_of(evaluation, name) for name in ("speed_ratio", "standing_share", "weaving_per_s")
    )
    known = recording or {"drive": {}}
    stands, turns = (_mean_of(known, name) or 0.0 for name in MANNER[1:])
    words = {
        "parks": standing is not None and standing > stands + STANDING,
        "creeps": pace is not None and pace < SLOW,
        "speeds": pace is not None and pace > FAST,
        "weaves": weaving is not None and weaving > turns + WEAVING_PER_S,
    }
    return [word for word, holds in words.items() if holds]


def _mean_of(evaluation: Mapping[str, Any], name: str) -> float | None:
    found: float | None = evaluation["drive"].get(name, {}).get("mean")
    return found


def _manner(final: Mapping[str, Any], recording: Mapping[str, Any] | None) -> Iterator[Sign]:
    words = manner(final, recording)
    pace, standing, weaving = (_mean_of(final, name) for name in MANNER)

    def beside(name: str, form: str) -> str:
        there = None if recording is None else _mean_of(recording, name)
        return "" if there is None else f" (the recording {there:{form}})"

    if standing is not None and "parks" in words:
        share = f"{standing:.0%} of the time{beside('standing_share', '.0%')}"
        yield Sign("bad", "It parks", f"It stands {share}: that avoids collisions at fault and gets nowhere.")
    if pace is not None:
        text = f"It drives {pace:.2f} times as far as the recording in the same time"
        if "creeps" in words:
            yield Sign("watch", "It creeps", f"{text}: caution that costs progress.")
        elif "speeds" in words:
            yield Sign("watch", "It speeds", f"{text}: the score stops at 80 % progress, so nothing holds it back.")
        else:
            yield Sign("good", "It keeps the recording's pace", f"{text}.")
    if weaving is not None:
        often = f"{weaving:.2f} changes between left and right a second{beside('weaving_per_s', '.2f')}"
        text = f"{often}; {WEAVING_PER_S} more than the recording is swinging from side to side."
        yield Sign("bad", "It weaves", text) if "weaves" in words else Sign("good", "It steers calmly", text)


def _cheats(
    evaluations: Mapping[str, Mapping[str, Any]], references: Mapping[str, Mapping[str, Any]]
) -> Iterator[Sign]:
    """Whether the reward, and the score, tell the policy from those that try to get away without driving."""
    present = [name for name in CHEATS if name in references]
    if not present:
        return
    before = next((name for name in BEFORE if name in evaluations), None)
    held = {"final": "this policy", **({before: BEFORE[before]} if before else {})}
    for key, noun in (("reward", "reward"), ("driving_score", "driving score")):
        shares = ", ".join(f"{name} {_number(references[name][key]['mean'])}" for name in present)
        for evaluation, who in held.items():
            ahead = {name: references[name]["ahead"][evaluation][key] for name in present}
            own = f"{shares}; {who} {_number(evaluations[evaluation][key]['mean'])}"
            better = [n for n, a in ahead.items() if a["high"] is not None and a["high"] < 0.0]
            close = [n for n, a in ahead.items() if n not in better and (a["low"] is None or a["low"] <= 0.0)]
            if better:
                level: Level = "bad" if evaluation == "final" else "watch"
                title = f"The {noun} prefers {_list(better)} to {who}"
                remedy = " Training for it leads there: choose another reward." if key == "reward" else ""
                yield Sign(level, title, f"{own}.{remedy}")
            if close:
                yield Sign("watch", f"The {noun} does not tell {who} from {_list(close)}", f"{own}.")
            if not better and not close and evaluation == "final":
                yield Sign("good", f"The {noun} ranks those below that avoid driving", f"{own}.")


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _infrastructure(final: Mapping[str, Any]) -> Iterator[Sign]:
    drives = final["driving_score"]["n"] + final["failed"] + final["initial_fault"]
    if final["failed"]:
        codes = ", ".join(f"{code} {count}" for code, count in final["failures"].items())
        level: Level = "bad" if final["failed"] > 0.01 * drives else "watch"
        yield Sign(
            level, "Drives are void", f"{final['failed']} of {drives} failed for no fault of the policy: {codes}."
        )
    if drives and final["initial_fault"] > 0.05 * drives:
        text = (
            f"{final['initial_fault']} of {drives} drives are at fault before the policy drives; they are not scored."
        )
        yield Sign("watch", "Scenes begin with a fault", text)
    if final["non_finite_reward"]:
        yield Sign("bad", "Rewards are not finite", f"{final['non_finite_reward']} drives have no finite reward.")


def _certainty(final: Mapping[str, Any]) -> Iterator[Sign]:
    score = final["driving_score"]
    if score["mean"] is None or final["scenes"] >= ENOUGH_SCENES:
        return
    half = (score["high"] - score["low"]) / 2.0
    text = f"{final['scenes']} scenes say the score to ±{half:.3f}; take {ENOUGH_SCENES} or more to report a figure."
    yield Sign("watch", "Few scenes", text)


def _updates(rows: Sequence[Mapping[str, Any]]) -> Iterator[Sign]:
    kl = _values(rows, "kl")
    if len(kl):
        late = float(np.median(kl[-max(len(kl) // 3, 1) :]))
        if kl.max() > KL_BLOW_UP:
            text = f"KL to the weights that drove reached {kl.max():.2f}; above {KL_BLOW_UP} a policy seldom recovers."
            yield Sign("bad", "Steps are too large", text)
        elif late > KL_LIMIT:
            yield Sign("watch", "Steps are large", f"KL is {late:.3f} in the last third; {KL_LIMIT} is a good limit.")
        else:
            yield Sign("good", "Steps are small", f"KL is {late:.4f} in the last third of the updates.")
    limits: list[tuple[str, Callable[[NDArray[np.float64]], float], float, Level, str, str]] = [
        ("clip_share", _mean, 0.3, "watch", "Much is clipped", "{:.2f} of decisions lie outside the clip"),
        ("ratio_max", _max, 10.0, "watch", "Some ratios are extreme", "the largest probability ratio is {:.1f}"),
        ("steps_refused", np.sum, 0.0, "bad", "Steps were refused", "{:.0f} had something that is not finite"),
        ("staleness_max", _max, 4.0, "watch", "Data is stale", "decisions are up to {:.0f} versions old"),
    ]
    for name, reduce, limit, level, title, text in limits:
        values = _values(rows, name)
        if len(values) and reduce(values) > limit:
            yield Sign(level, title, f"In training {text.format(reduce(values))}.")
    entropy = _values(rows, "entropy")
    if len(entropy) > 1 and entropy[-1] < entropy[0] - 1.0:
        text = f"Entropy fell from {entropy[0]:.2f} to {entropy[-1]:.2f} nat: it explores less and less."
        yield Sign("watch", "Exploration shrinks", text)


def _groups(rows: Sequence[Mapping[str, Any]]) -> Iterator[Sign]:
    share = _values(rows, "groups_informative") / np.maximum(_values(rows, "groups"), 1.0)
    if len(share):
        text = f"In {100 * share.mean():.0f} % of groups the drives differ in reward, so that they teach something."
        level: Level = "bad" if share.mean() < 0.1 else "watch" if share.mean() < 0.3 else "good"
        titles = {"bad": "Hardly a group teaches", "watch": "Few groups teach", "good": "Groups are informative"}
        yield Sign(level, titles[level], text)
    lost, groups = _values(rows, "void").sum(), _values(rows, "groups").sum()
    if lost:
        yield Sign("watch", "Training lost episodes", f"{lost:.0f} void episodes in {groups:.0f} groups.")


def _open_loop(rows: Sequence[Mapping[str, Any]]) -> Iterator[Sign]:
    """Whether reward and distance of drawn plans move the right way, first against last fifth."""
    reward, ade = (
        _values([row for row in rows if "open_loop/ade_m" in row], name) for name in ("reward", "open_loop/ade_m")
    )
    part = len(ade) // 5
    if not part:
        return
    means = [float(values[cut].mean()) for values in (reward, ade) for cut in (slice(part), slice(-part, None))]
    text = f"Drawn plans: reward {means[0]:.3f} to {means[1]:.3f}, distance {means[2]:.2f} m to {means[3]:.2f} m."
    if means[1] > means[0] and means[3] < means[2]:
        yield Sign("good", "Reward rises, distance falls", text)
    else:
        remedy = " Learn one sample by heart first: if that fails too, look at reward and data before settings."
        yield Sign("watch", "Reward and distance do not improve together", text + remedy)


def _imitation(rows: Sequence[Mapping[str, Any]]) -> Sign:
    losses = _values(rows, "validation_loss")
    best = int(np.argmin(losses))
    text = f"The loss on validation drives was lowest after epoch {best + 1} of {len(rows)}; those weights were kept."
    cool = sum(bool(row.get("cooling_down")) for row in rows)
    if cool:
        losses = losses[: len(rows) - cool]
        best = int(np.argmin(losses))
        kept = f"In {cool} more the rate fell to nothing; the last weights were kept."
        text = f"The loss on validation drives was lowest after epoch {best + 1} of {len(losses)}. {kept}"
    if best < len(losses) - 1:
        return Sign("good", "Imitation ended by validation", text)
    if best and losses[best] > 0.98 * losses[:best].min():
        return Sign("good", "Imitation has levelled off", text)
    return Sign("watch", "Imitation had not ended", f"{text} More epochs may help: trainer.warm_start.epochs.")


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    return np.array([row[name] for row in rows if row.get(name) is not None], np.float64)


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean())


def _max(values: NDArray[np.float64]) -> float:
    return float(values.max())
