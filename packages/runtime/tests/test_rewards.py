from __future__ import annotations

import math

import numpy as np
import pytest

from alpagym_runtime.envs.presets import reward_section
from alpagym_runtime.errors import ConfigError, SimulatorError
from alpagym_runtime.rewards.config import (
    CollisionConfig,
    ComfortConfig,
    DistanceToGtConfig,
    MeasureConfig,
    OffRoadConfig,
    ProgressConfig,
)
from alpagym_runtime.testing.conformance import RewardTermConformance, TransportConformance
from alpagym_runtime.testing.examples import example_episode, ticks_of
from alpagym_runtime.transport.memory import MemoryConfig
from alpagym_runtime.types import Ended, EpisodeRequest, Failure, MeasureSeries, SimulatorSpec


def gains(value):
    """Differences between neighbours, 0 where one of them is undefined (NaN)."""
    return np.nan_to_num(np.diff(value), nan=0.0)


class TestProgress(RewardTermConformance):
    def make(self, simulator_spec):
        return ProgressConfig(full_at=0.8).build(simulator_spec)

    def value(self, measures):
        value = np.minimum(measures["progress"].value / 0.8, 1.0)
        return value[-1] - value[0]


class TestCollision(RewardTermConformance):
    def make(self, simulator_spec):
        return CollisionConfig().build(simulator_spec)

    def value(self, measures):
        return measures["collision_count"].value[-1]


class TestCollisionAtFault(RewardTermConformance):
    def make(self, simulator_spec):
        return CollisionConfig(at_fault=True).build(simulator_spec)

    def value(self, measures):
        return measures["collision_at_fault_count"].value[-1]


class TestOffRoad(RewardTermConformance):
    def make(self, simulator_spec):
        return OffRoadConfig().build(simulator_spec)

    def value(self, measures):
        return measures["offroad_count"].value[-1]


class TestDistanceToGt(RewardTermConformance):
    def make(self, simulator_spec):
        return DistanceToGtConfig().build(simulator_spec)

    def value(self, measures):
        return math.sqrt(np.nanmean(measures["distance_to_gt_m"].value ** 2))


class TestComfort(RewardTermConformance):
    def make(self, simulator_spec):
        return ComfortConfig().build(simulator_spec)

    def value(self, measures):
        exceeded = measures["acceleration_mps2"].value > 2.40
        exceeded |= measures["acceleration_mps2"].value < -4.05
        for name, limit in (("lateral_acceleration_mps2", 4.89), ("jerk_mps3", 8.37), ("yaw_rate_radps", 0.95)):
            exceeded |= np.abs(measures[name].value) > limit
        return float(np.count_nonzero(exceeded[1:]))


class TestMeasure(RewardTermConformance):
    measures = ("lateral_error_m",)

    def make(self, simulator_spec):
        return MeasureConfig("lateral_error_m", absolute=True, dead_band=0.5, span=4.0).build(simulator_spec)

    def value(self, measures):
        shaped = np.clip((np.abs(measures["lateral_error_m"].value) - 0.5) / 4.0, 0.0, 1.0)
        return float(np.nansum(shaped[1:]))


class TestMeasureDifference(RewardTermConformance):
    def make(self, simulator_spec):
        return MeasureConfig("along_track_error_m", difference=True).build(simulator_spec)

    def value(self, measures):
        return float(gains(measures["along_track_error_m"].value).sum())


class TestMemoryTransport(TransportConformance):
    def make(self, directory):
        transport = MemoryConfig().build("rollout", directory)
        return transport, transport


# ---------------------------------------------------------------- by hand


def series(*values):
    """Samples 0.2 s apart from the handover on; None is undefined."""
    valid = np.array([value is not None for value in values])
    numbers = np.array([math.nan if value is None else float(value) for value in values])
    return MeasureSeries(np.arange(len(values)) * 200_000, numbers, valid)


def spec(*names):
    return SimulatorSpec(True, 200_000, 1, ("s",), dict.fromkeys(names, "tick"))


def paid(config, **measures):
    """What each tick of an episode pays."""
    return config.build(spec(*measures)).tick(ticks_of(measures), None).tolist()


def episode(**measures):
    made = example_episode()
    made.measures = measures
    return made


def test_progress_pays_its_increase():
    # 0.1 -> 0.3 -> 0.3 -> 0.7
    assert paid(ProgressConfig(), progress=series(0.1, 0.3, 0.3, 0.7)) == pytest.approx([0.2, 0.0, 0.4])


def test_progress_is_full_at_its_share_and_pays_no_more():
    # min(p / 0.8, 1): 0, 0.5, 1, 1
    assert paid(ProgressConfig(full_at=0.8), progress=series(0.0, 0.4, 0.9, 1.0)) == pytest.approx([0.5, 0.5, 0.0])


def test_progress_over_an_episode_is_at_most_one():
    assert sum(paid(ProgressConfig(full_at=0.2), progress=series(*np.linspace(0.0, 1.0, 30)))) == pytest.approx(1.0)


def test_a_contact_that_lasts_pays_once_and_a_second_object_again():
    count = series(0, 0, *[1] * 30, 2, 2)
    ticks = paid(CollisionConfig(), collision_count=count)
    assert [k for k, value in enumerate(ticks) if value] == [1, 31]
    assert sum(ticks) == 2.0


def test_two_objects_in_one_tick_pay_twice():
    assert paid(CollisionConfig(), collision_count=series(0, 2, 2)) == [2.0, 0.0]


def test_once_is_the_maximum_over_the_drive():
    # Published: -10 times the maximum of "any contact", -5 times that of "off the road".
    assert paid(CollisionConfig(once=True), collision_count=series(0, 2, 2, 3)) == [1.0, 0.0, 0.0]
    assert paid(OffRoadConfig(once=True), offroad_count=series(0, 0, 1, 2)) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("preset", ["metrics", "progress_safety"])
def test_published_presets_charge_a_drive_once(preset):
    terms = reward_section(preset).terms
    assert all(terms[name].config.once for name in ("collision", "off_road") if name in terms)


def test_at_fault_counts_only_the_egos_doing():
    measures = {"collision_count": series(0, 1, 2), "collision_at_fault_count": series(0, 0, 1)}
    assert paid(CollisionConfig(), **measures) == [1.0, 1.0]
    assert paid(CollisionConfig(at_fault=True), **measures) == [0.0, 1.0]


def test_what_is_true_at_the_handover_pays_nothing():
    # A world that counted before the handover: the initial sample is no edge.
    assert paid(CollisionConfig(), collision_count=series(1, 1, 2)) == [0.0, 1.0]
    handover = ticks_of({"collision_count": series(0, 1)})
    handover.tick[:] = 0
    handover.measures_previous.valid["collision_count"][:] = False
    assert CollisionConfig().build(spec("collision_count")).tick(handover, None).tolist() == [0.0]


def test_off_road_pays_on_each_rising_edge():
    assert paid(OffRoadConfig(), offroad_count=series(0, 1, 1, 2)) == [1.0, 0.0, 1.0]


def test_a_failed_slot_pays_nothing():
    batch = ticks_of({"collision_count": series(0, 1, 2)})
    batch.ended[1] = Ended.FAILED
    batch.failure[1] = Failure("transient", "X", "gone")
    assert CollisionConfig().build(spec("collision_count")).tick(batch, None).tolist() == [1.0, 0.0]


def test_distance_to_gt_is_the_root_mean_square_paid_at_the_end():
    term = DistanceToGtConfig().build(spec("distance_to_gt_m"))
    distances = series(0.0, 3.0, 4.0, None)
    assert term.tick(ticks_of({"distance_to_gt_m": distances}), None).tolist() == [0.0, 0.0, 0.0]
    # the handover's sample counts, the undefined one does not: sqrt((0 + 9 + 16) / 3) = 2.88675
    assert term.end(episode(distance_to_gt_m=distances)) == pytest.approx(2.886751, abs=1e-6)


def test_distance_to_gt_counts_what_a_crash_leaves_undriven():
    term = DistanceToGtConfig().build(spec("distance_to_gt_m", "distance_to_gt_stranded_m"))
    made = episode(distance_to_gt_m=series(0.0, 1.0), distance_to_gt_stranded_m=series(3.0, 5.0))
    # sqrt((0 + 1 + 9 + 25) / 4) = 2.95804; the drive alone would have 0.70711
    assert term.end(made) == pytest.approx(2.958040, abs=1e-6)


@pytest.mark.parametrize("measures", [{"distance_to_gt_m": series(None, None)}, {}])
def test_distance_to_gt_without_a_sample_is_an_error_not_zero(measures):
    term = DistanceToGtConfig().build(spec("distance_to_gt_m"))
    made = episode(**measures)
    made.request = EpisodeRequest("scene-7")
    with pytest.raises(SimulatorError, match="distance_to_gt.*scene-7") as error:
        term.end(made)
    assert error.value.permanent


def comfort(**changed):
    """Two ticks: an easy one, then one with the changed measures."""
    easy = {"acceleration_mps2": 0.0, "lateral_acceleration_mps2": 0.0, "jerk_mps3": 0.0, "yaw_rate_radps": 0.0}
    return paid(ComfortConfig(), **{name: series(0.0, 0.0, changed.get(name, easy[name])) for name in easy})


@pytest.mark.parametrize(
    ("name", "allowed", "exceeded"),
    [
        ("acceleration_mps2", 2.40, 2.41),
        ("acceleration_mps2", -4.05, -4.06),
        ("lateral_acceleration_mps2", -4.89, -4.90),
        ("lateral_acceleration_mps2", 4.89, 4.90),
        ("jerk_mps3", 8.37, 8.38),
        ("yaw_rate_radps", -0.95, -0.96),
    ],
)
def test_comfort_limits(name, allowed, exceeded):
    assert comfort(**{name: allowed}) == [0.0, 0.0]
    assert comfort(**{name: exceeded}) == [0.0, 1.0]


def test_two_limits_exceeded_in_one_tick_pay_once():
    assert comfort(jerk_mps3=20.0, yaw_rate_radps=2.0) == [0.0, 1.0]


def test_an_undefined_jerk_exceeds_nothing_but_the_rest_of_the_tick_counts():
    assert comfort(jerk_mps3=None) == [0.0, 0.0]
    assert comfort(jerk_mps3=None, yaw_rate_radps=2.0) == [0.0, 1.0]


def test_a_measure_pays_its_value_each_tick():
    assert paid(MeasureConfig("gap_m"), gap_m=series(9.0, 1.0, -2.0, None)) == [1.0, -2.0, 0.0]


def test_a_measure_is_shaped_by_absolute_then_dead_band_then_span():
    config = MeasureConfig("gap_m", absolute=True, dead_band=0.5, span=2.0)
    # |m|: 1.5, 0.4, 9 -> less 0.5, not below 0: 1, 0, 8.5 -> / 2, to [0, 1]: 0.5, 0, 1
    assert paid(config, gap_m=series(0.0, -1.5, 0.4, 9.0)) == [0.5, 0.0, 1.0]


def test_without_absolute_a_negative_measure_lies_in_the_dead_band():
    assert paid(MeasureConfig("gap_m", dead_band=0.5), gap_m=series(0.0, -3.0, 2.0)) == [0.0, 1.5]


def test_a_difference_pays_gains_of_the_shaped_value():
    config = MeasureConfig("gap_m", span=2.0, difference=True)
    # clip(m / 2): 0.5, 1, 1, 0 -> gains 0.5, 0, -1
    assert paid(config, gap_m=series(1.0, 2.0, 8.0, -1.0)) == [0.5, 0.0, -1.0]


def test_an_unknown_measure_is_refused_with_the_nearest_and_all_known():
    world = spec("collision_count", "offroad_count", "progress")
    with pytest.raises(ConfigError) as error:
        MeasureConfig("offroad_typo").build(world)
    message = str(error.value)
    assert error.value.key == "measure"
    assert "'offroad_typo'" in message
    assert "collision_count, offroad_count, progress" in message
    with pytest.raises(ConfigError, match="did you mean 'offroad_count'"):
        MeasureConfig("ofroad_count").build(world)


@pytest.mark.parametrize(
    "config", [ProgressConfig(), CollisionConfig(), OffRoadConfig(), DistanceToGtConfig(), ComfortConfig()]
)
def test_every_term_refuses_a_world_without_its_measure(config):
    with pytest.raises(ConfigError, match="does not have.*known: speed_mps"):
        config.build(spec("speed_mps"))


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: ProgressConfig(full_at=0.0), "full_at"),
        (lambda: ProgressConfig(full_at=1.5), "full_at"),
        (lambda: ComfortConfig(jerk_mps3=-1.0), "jerk_mps3"),
        (lambda: ComfortConfig(yaw_rate_radps=math.nan), "yaw_rate_radps"),
        (lambda: MeasureConfig("gap_m", span=-1.0), "span"),
        (lambda: MeasureConfig("gap_m", dead_band=-1.0), "dead_band"),
        (lambda: MeasureConfig(""), "measure"),
    ],
)
def test_options_out_of_range_are_refused(make, key):
    with pytest.raises(ConfigError) as error:
        make()
    assert error.value.key == key


def test_the_memory_transport_hands_over_the_object_itself():
    transport = MemoryConfig().build("trainer", None)
    sent = example_episode()
    assert transport.receive(transport.send(sent)) is sent


def test_the_memory_transport_serves_many_threads():
    from concurrent.futures import ThreadPoolExecutor

    transport, sent = MemoryConfig().build("trainer", None), example_episode()
    with ThreadPoolExecutor(8) as pool:
        handles = list(pool.map(lambda _: transport.send(sent), range(1000)))
    assert len(set(handles)) == 1000
