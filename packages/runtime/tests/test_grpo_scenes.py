from collections import Counter

import numpy as np
import pytest

from alpagym_runtime.testing.examples import example_episode
from alpagym_runtime.trainers.scenes import scenes_of_step, spreads_of
from alpagym_runtime.types import Ended, EpisodeRequest

SCENES = [f"s{i}" for i in range(10)]


def test_without_focus_every_scene_comes_once_a_pass():
    # 5 steps of 4 groups are 2 passes of 10 scenes
    drawn = [scene for step in range(5) for scene in scenes_of_step(SCENES, {}, 4, 0.0, 1, step)]
    assert Counter(drawn[:10]) == Counter(drawn[10:]) == Counter(SCENES)
    assert drawn[:10] != drawn[10:]
    assert drawn[:10] != SCENES


def test_focus_takes_its_share_of_the_groups_and_passes_go_on_in_the_rest():
    spreads = {"s1": 1.0, "s2": 1.0, "s3": 1.0}
    steps = [scenes_of_step(SCENES, spreads, 4, 0.5, 1, step) for step in range(5)]
    for chosen in steps:
        assert len(set(chosen[:2])) == 2
        assert set(chosen[:2]) <= set(spreads)
    assert Counter(scene for chosen in steps for scene in chosen[2:]) == Counter(SCENES)


def test_scenes_that_differ_more_are_drawn_more_often():
    spreads = {"s1": 0.9, "s2": 0.1, "s3": 0.0}
    drawn = Counter(scenes_of_step(SCENES, spreads, 2, 0.5, 1, step)[0] for step in range(400))
    # Binomial with p = 0.9: 360 ± 6
    assert abs(drawn["s1"] - 360) < 30
    assert drawn["s3"] == 0


@pytest.mark.parametrize("spreads", [{}, {"s4": 0.3}])
def test_with_too_little_to_focus_on_the_pass_fills_the_step(spreads):
    chosen = scenes_of_step(SCENES, spreads, 6, 0.5, 1, 0)
    assert len(chosen) == 6
    # 3 of the pass, and 3 less the focused ones more
    assert len(set(chosen[len(spreads) :])) == 6 - len(spreads)


def test_a_step_is_a_function_of_seed_step_and_spreads():
    spreads = dict.fromkeys(SCENES, 0.5)
    first = scenes_of_step(SCENES, spreads, 8, 0.5, 3, 7)
    assert first == scenes_of_step(SCENES, spreads, 8, 0.5, 3, 7)
    assert first != scenes_of_step(SCENES, spreads, 8, 0.5, 4, 7)
    assert first != scenes_of_step(SCENES, spreads, 8, 0.5, 3, 8)


def group(scene, rewards, group_id, **changes):
    return [
        example_episode(1).with_arrays(
            request=EpisodeRequest(scene, group_id=group_id, member=m),
            rewards=np.array([r]),
            initial_fault=False,
            **changes,
        )
        for m, r in enumerate(rewards)
    ]


def test_a_spread_is_the_groups_population_deviation():
    episodes = group("a", [1.0, 3.0], 0) + group("b", [2.0, 2.0], 1) + group("c", [5.0], 2)
    episodes += group("a", [np.nan], 0) + group("d", [1.0, 2.0], 3, ended=Ended.FAILED)
    # 1, 3: mean 2, deviation 1
    assert spreads_of(episodes) == {"a": 1.0, "b": 0.0}
