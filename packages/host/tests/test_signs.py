from __future__ import annotations

import pytest

from alpagym_host.report.signs import signs


def value(mean, low=None, high=None, n=256):
    return {"mean": mean, "low": mean if low is None else low, "high": mean if high is None else high, "n": n}


def evaluation(
    score=0.8, *, pace=1.0, standing=0.02, weaving=0.1, failed=0, faults=0, scenes=256, at_fault=0.05, offroad=0.0
):
    return {
        "driving_score": value(score, score - 0.05, score + 0.05, n=256),
        "drive": {"speed_ratio": value(pace), "standing_share": value(standing), "weaving_per_s": value(weaving)},
        "rates": {"collision_at_fault": at_fault, "offroad": offroad},
        "failed": failed,
        "failures": {"TIMEOUT": failed} if failed else {},
        "initial_fault": faults,
        "non_finite_reward": 0,
        "scenes": scenes,
    }


def comparison(low, high, rates=None):
    return {
        "before": "warm_start",
        "after": "final",
        "driving_score": value((low + high) / 2, low, high),
        "rates": rates or {},
    }


def rate(before, after, low, high):
    return {"before": value(before), "after": value(after), "difference": value(after - before, low, high)}


def update(**more):
    return {
        "stage": "grpo",
        "kl": 0.01,
        "groups": 32.0,
        "groups_informative": 20.0,
        "void": 0.0,
        "steps_refused": 0.0,
    } | more


def reference(pace=1.0, standing=0.0, weaving=0.0, reward=-1.0, ahead=(0.1, 0.3)):
    """What the report knows of a policy that `final` and the warm start are ahead of."""
    difference = value(sum(ahead) / 2, *ahead)
    lead = {key: {"reward": difference, "driving_score": value(0.2, 0.1, 0.3)} for key in ("warm_start", "final")}
    return evaluation(0.5, pace=pace, standing=standing, weaving=weaving) | {"reward": value(reward), "ahead": lead}


def titles(*arguments):
    return {sign.title: sign.level for sign in signs(*arguments)}


def test_a_healthy_run_is_healthy():
    found = titles({"final": evaluation()}, [comparison(0.05, 0.15)], [update()] * 9)
    assert set(found.values()) == {"good"}
    assert {
        "It drives better than before training",
        "It keeps the recording's pace",
        "It steers calmly",
    } <= found.keys()


@pytest.mark.parametrize(
    ("low", "high", "title", "level"),
    [
        (0.01, 0.2, "It drives better than before training", "good"),
        (-0.01, 0.2, "No difference to before training is shown", "watch"),
        (-0.2, -0.01, "It drives worse than before training", "bad"),
    ],
)
def test_a_gain_is_what_its_interval_says(low, high, title, level):
    assert titles({"final": evaluation()}, [comparison(low, high)], [])[title] == level


@pytest.mark.parametrize(
    ("manner", "title"),
    [
        ({"standing": 0.4}, "It parks"),
        ({"pace": 0.4}, "It creeps"),
        ({"pace": 1.3}, "It speeds"),
        ({"weaving": 0.9}, "It weaves"),
    ],
)
def test_ways_to_cheat_the_score_are_named(manner, title):
    found = titles({"final": evaluation(**manner)}, [], [])
    assert found[title] in ("bad", "watch")


def test_unknown_manners_are_no_sign():
    final = evaluation()
    final["drive"] = {"speed_ratio": value(None, None, None)}
    assert not {"It parks", "It creeps", "It speeds", "It weaves"} & titles({"final": final}, [], []).keys()


def test_who_stands_where_the_recording_stands_does_not_park():
    queue = {"recording": reference(standing=0.3)}
    assert "It parks" not in titles({"final": evaluation(standing=0.4)}, [], [], queue)
    assert "It parks" in titles({"final": evaluation(standing=0.6)}, [], [], queue)


def rewarded(reward):
    return evaluation() | {"reward": value(reward)}


@pytest.mark.parametrize(
    ("ahead", "title", "level"),
    [
        ((0.1, 0.3), "The reward ranks those below that avoid driving", "good"),
        ((-0.1, 0.3), "The reward does not tell this policy from creeping", "watch"),
        ((-0.3, -0.1), "The reward prefers creeping to this policy", "bad"),
    ],
)
def test_a_reward_that_pays_for_creeping_is_told(ahead, title, level):
    found = signs({"final": rewarded(-0.5)}, [], [], {"parking": reference(), "creeping": reference(ahead=ahead)})
    texts = {s.title: s for s in found}
    assert texts[title].level == level
    assert texts[title].text.startswith("parking -1.000, creeping -1.000; this policy -0.500.")


def test_a_reward_that_preferred_creeping_before_training_is_told_too():
    evaluations = {"warm_start": rewarded(-2.0), "final": rewarded(0.5)}
    creeping = reference()
    creeping["ahead"]["warm_start"]["reward"] = value(-1.0, -1.2, -0.8)
    found = titles(evaluations, [], [], {"creeping": creeping})
    assert found["The reward prefers creeping to the warm start"] == "watch"
    assert found["The reward ranks those below that avoid driving"] == "good"


def test_events_that_rise_or_fall_are_told_with_both_shares():
    rates = {"collision_at_fault": rate(0.2, 0.1, -0.15, -0.05), "offroad": rate(0.0, 0.05, 0.01, 0.09)}
    found = {s.title: s for s in signs({"final": evaluation()}, [comparison(0.0, 0.1, rates)], [])}
    assert found["Collisions at fault fell"].text == "From 20.0 % to 10.0 % of drives against the warm start."
    assert found["Drives off the road rose"].level == "bad"


def test_the_worst_comes_first():
    levels = [
        s.level for s in signs({"final": evaluation(standing=0.5, scenes=20)}, [comparison(0.1, 0.2)], [update()])
    ]
    assert levels == sorted(levels, key=["bad", "watch", "good"].index)
    assert {"bad", "watch", "good"} == set(levels)


def test_void_drives_are_no_fault_of_the_policy():
    found = {s.title: s for s in signs({"final": evaluation(failed=1)}, [], [])}
    assert found["Drives are void"].level == "watch"  # 1 of 257
    assert "TIMEOUT 1" in found["Drives are void"].text
    assert titles({"final": evaluation(failed=9)}, [], [])["Drives are void"] == "bad"


@pytest.mark.parametrize(
    ("more", "title", "level"),
    [
        ({"kl": 0.1}, "Steps are large", "watch"),
        ({"kl": 0.5}, "Steps are too large", "bad"),
        ({"groups_informative": 1.0}, "Hardly a group teaches", "bad"),
        ({"groups_informative": 6.0}, "Few groups teach", "watch"),
        ({"steps_refused": 1.0}, "Steps were refused", "bad"),
        ({"clip_share": 0.4}, "Much is clipped", "watch"),
        ({"ratio_max": 30.0}, "Some ratios are extreme", "watch"),
        ({"staleness_max": 5.0}, "Data is stale", "watch"),
        ({"void": 1.0}, "Training lost episodes", "watch"),
    ],
)
def test_updates_that_go_wrong_are_named(more, title, level):
    assert titles({"final": evaluation()}, [], [update(**more)] * 6)[title] == level


def test_a_policy_that_was_better_before_the_end_is_told():
    found = titles({"final": evaluation(0.7), "best": evaluation(0.8)}, [], [])
    assert found["It was better before the end"] == "watch"
    assert "It was better before the end" not in titles({"final": evaluation(0.79), "best": evaluation(0.8)}, [], [])


def test_a_warm_start_that_is_no_better_than_fresh_weights_is_sick():
    weights = {"start": evaluation(0.3), "warm_start": evaluation(0.2), "final": evaluation()}
    assert titles(weights, [], [])["Imitation taught nothing"] == "bad"


@pytest.mark.parametrize(
    ("losses", "title"),
    [
        ([1.0, 0.5, 0.6, 0.7], "Imitation ended by validation"),
        ([1.0, 0.5, 0.495], "Imitation has levelled off"),
        ([1.0, 0.5, 0.4], "Imitation had not ended"),
    ],
)
def test_the_end_of_imitation_is_read_from_its_losses(losses, title):
    rows = [{"stage": "imitation", "validation_loss": loss} for loss in losses]
    assert title in titles({}, [], rows)


def test_a_cool_down_is_no_sign_that_imitation_goes_on():
    # Validation stopped after the second of three epochs; in the cool-down the loss falls far below that.
    losses, cooling = (1.0, 0.6, 0.7, 0.5, 0.4), (0.0, 0.0, 0.0, 1.0, 1.0)
    rows = [
        {"stage": "imitation", "validation_loss": loss, "cooling_down": cool}
        for loss, cool in zip(losses, cooling, strict=True)
    ]
    (found,) = [sign for sign in signs({}, [], rows) if sign.title == "Imitation ended by validation"]
    assert "lowest after epoch 2 of 3. In 2 more the rate fell to nothing; the last weights were kept." in found.text


@pytest.mark.parametrize(
    ("last", "title"),
    [((-0.21, 1.34), "Reward rises, distance falls"), ((-0.30, 1.70), "Reward and distance do not improve together")],
)
def test_drawn_plans_are_judged_by_reward_and_distance(last, title):
    # Ten updates: the first fifth are two rows, the last fifth two.
    rows = [update(reward=-0.28, **{"open_loop/ade_m": 1.66})] * 8
    rows += [update(reward=last[0], **{"open_loop/ade_m": last[1]})] * 2
    (found,) = [sign for sign in signs({}, [], rows) if sign.title == title]
    assert f"reward -0.280 to {last[0]:.3f}, distance 1.66 m to {last[1]:.2f} m" in found.text
