"""Measuring a policy: each scene of a split once a seed, with its mean action; one row a drive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alpagym_runtime.random import mix_int, text_seed
from alpagym_runtime.rollouts.collector import Collects
from alpagym_runtime.rollouts.drive_facts import drive_facts
from alpagym_runtime.rollouts.table import Row
from alpagym_runtime.types import Ended, Episode, EpisodeRequest, Sampling

MEAN = Sampling(mode="mean")


def evaluation_request(scene_id: str, seed: int, horizon_ticks: int) -> EpisodeRequest:
    """The drive of a scene under a seed: the same in every evaluation, so drives of two policies pair up."""
    return EpisodeRequest(
        scene_id=scene_id,
        horizon_ticks=horizon_ticks,
        world_seed=mix_int(seed, 1, text_seed(scene_id)),
        policy_seed=mix_int(seed, 2, text_seed(scene_id)),
        member=seed,
    )


def evaluate(
    collector: Collects,
    scene_ids: Sequence[str],
    seeds: Sequence[int],
    horizon_ticks: int,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Row]:
    """Drive every scene once a seed with the policy's mean action; one row a drive, in the order of the requests."""
    requests = [evaluation_request(scene_id, seed, horizon_ticks) for seed in seeds for scene_id in scene_ids]
    rows: dict[tuple[str, int], Row] = {}

    def keep(episode: Episode) -> None:
        rows[episode.request.scene_id, episode.request.member] = _row(episode, collector.scene_family)
        if on_episode is not None:
            on_episode(episode)

    collector.collect(requests, MEAN, keep)
    return [rows[request.scene_id, request.member] for request in requests]


def _row(episode: Episode, family: Callable[[str], str]) -> Row:
    request, failed = episode.request, episode.ended == Ended.FAILED
    row: Row = {
        "scene_id": request.scene_id,
        "scene_hash": episode.receipt.scene_hash if episode.receipt else "",
        "family": "" if failed else family(request.scene_id),
        "seed": request.member,
        "ended": episode.ended.name.lower(),
        "failed": failed,
        "failure_code": episode.failure.code if episode.failure else None,
        "failure": episode.failure.text if episode.failure else None,
        "attempt": request.attempt,
        "ticks": len(episode),
        "driving_score": None if failed else episode.driving_score,
        "initial_fault": episode.initial_fault,
        "reward": None if failed else float(episode.rewards.sum()),
    }
    row |= {f"term/{name}": float(values.sum()) for name, values in episode.terms.items()}
    row |= {f"measure/{name}": series.aggregate() for name, series in episode.measures.items()}
    return row if failed else row | drive_facts(episode.measures)
