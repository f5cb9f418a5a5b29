from __future__ import annotations

from alpagym_runtime.trainers.health import Health

HEALTHY = {"groups": 4.0, "groups_informative": 3.0, "seconds_drive": 1.0, "seconds_train": 2.0}


def told(rows, ahead=True):
    lines: list[str] = []
    health = Health(lines.append, ahead)
    for step, row in enumerate(rows, 1):
        health.see(step, row)
    return lines


def test_a_healthy_run_says_nothing():
    # pending as in the published log of a healthy run: it goes up and down
    assert told([HEALTHY | {"pending": p} for p in (24.0, 48.0, 72.0, 48.0) * 8]) == []


def test_groups_that_collapse_are_said_once_with_the_temperature_first():
    # 10 steps of 4 groups, 3 of 40 informative: below a tenth
    rows = [HEALTHY | {"groups_informative": float(k < 3)} for k in range(10)] + [
        HEALTHY | {"groups_informative": 0.0}
    ] * 5
    (line,) = told(rows, ahead=False)
    assert line.startswith("step 10: groups have collapsed: in 3 of 40 groups the rewards differ")
    assert line.index("trainer.temperature") < line.index("a reward that")


def test_drives_that_pile_up_name_the_remedies_in_order():
    rows = [HEALTHY | {"seconds_drive": 0.01, "pending": 48.0 * k} for k in range(10)]
    (line,) = told(rows)
    order = ["simulator.workers", "rollout.group_size", "topology.processes", "learner.shard", "trainer.updates"]
    places = [line.index(name) for name in order]
    assert places == sorted(places)
    assert told(rows, ahead=False) == []  # nothing is driven ahead


def test_training_that_waits_asks_for_workers():
    # 3 s of driving to 2 s of training: it waits 60 % of the time
    (line,) = told([HEALTHY | {"seconds_drive": 3.0}] * 12)
    assert "waits 60% of the time" in line
    assert "rollout.workers" in line


def test_a_refused_step_is_said_at_once():
    (line,) = told([HEALTHY | {"steps_refused": 1.0}, HEALTHY | {"steps_refused": 1.0}])
    assert line.startswith("step 1: a number was not finite")
