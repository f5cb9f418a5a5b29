"""Action space and tokenizers on drives of our own: round trips, standstill, order, config keys."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from alpagym_alpamayo_r1.action_space import UnicycleActionSpace, unwrap, yaw_of_rotation
from alpagym_alpamayo_r1.tiny import RELEASED_ACTION_SPACE
from alpagym_alpamayo_r1.trajectory_tokens import Bins, future_tokenizer, history_tokenizer, yaw_of_motion
from alpagym_plugins import ConfigError

RELEASED = UnicycleActionSpace.from_config(RELEASED_ACTION_SPACE)
PLAIN = UnicycleActionSpace()


def still(rows, position_std, yaw_std, dtype=torch.float64):
    """Cars that stand: poses that jitter around the origin, as localisation does."""
    generator = torch.Generator().manual_seed(0)
    xyz = torch.randn(rows, 80, 3, generator=generator, dtype=torch.float64) * position_std
    yaw = torch.randn(rows, 80, generator=generator, dtype=torch.float64) * yaw_std
    xyz, yaw = xyz - xyz[:, 15:16], yaw - yaw[:, 15:16]
    return [part.to(dtype) for part in (xyz[:, :16], yaw[:, :16], xyz[:, 16:], yaw[:, 16:])]


def test_constant_speed_by_hand():
    # 10 m/s straight: 1 m a step, heading 0.
    path = PLAIN.decode(torch.zeros(64, 2), torch.tensor(10.0))
    np.testing.assert_allclose(path.xy[:, 0], np.arange(1, 65), rtol=1e-5)
    assert (path.yaw == 0).all()


def test_one_step_of_a_left_turn_by_hand():
    # v = 10, a = 2, k = 0.05, dt = 0.1: v1 = 10.2; s = 1 + 0.01 = 1.01; yaw = 0.0505;
    # x = 0.05 (10 + 10.2 cos 0.0505) = 1.009350, y = 0.05 · 10.2 sin 0.0505 = 0.025744
    actions = torch.zeros(64, 2, dtype=torch.float64)
    actions[0] = torch.tensor([2.0, 0.05])
    path = PLAIN.decode(actions, torch.tensor(10.0, dtype=torch.float64))
    np.testing.assert_allclose(path.yaw[0], 0.0505)
    np.testing.assert_allclose(path.xy[0], [1.009350, 0.025744], atol=1e-6)
    assert path.yaw[0] > 0  # positive curvature is to the left


def test_encoding_is_the_inverse_of_decoding():
    time = torch.arange(64, dtype=torch.float64) * 0.1
    actions = torch.stack([torch.sin(time), 0.5 * torch.cos(time / 2)], -1)
    path = RELEASED.decode(actions, torch.tensor(12.0, dtype=torch.float64))
    future = torch.cat([path.xy, torch.zeros(64, 1, dtype=torch.float64)], -1)
    history = torch.zeros(16, 3, dtype=torch.float64)
    history[:, 0] = torch.arange(-15, 1) * 1.2
    back = RELEASED.encode(history, torch.zeros(16, dtype=torch.float64), future, path.yaw)
    again = RELEASED.decode(back, RELEASED.initial_speed(history, torch.zeros(16, dtype=torch.float64)))
    assert torch.linalg.vector_norm(again.xy - path.xy, dim=-1).mean() < 0.02


@pytest.mark.parametrize(("position_std", "yaw_std"), [(0.0, 0.0), (1e-6, 1e-3), (0.005, 0.002), (0.03, 0.01)])
def test_standstill_does_not_explode(position_std, yaw_std):
    drives = still(200, position_std, yaw_std)
    action = RELEASED.encode(*drives)
    assert action.isfinite().all()
    curvature = action[..., 1] * RELEASED.curvature_std + RELEASED.curvature_mean
    yaw = torch.cat([torch.zeros(200, 1, dtype=torch.float64), drives[3]], 1)
    allowed = 100.0 * torch.linalg.vector_norm(torch.diff(yaw), dim=-1)
    assert (torch.linalg.vector_norm(curvature, dim=-1) <= allowed + 1e-9).all()
    single = RELEASED.encode(*(part.float() for part in drives))
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single, action, atol=1e-3)
    # Decoded, the car is still where it stood (a ridge on speeds lets it creep by what the positions jitter).
    path = RELEASED.decode(action, RELEASED.initial_speed(drives[0], drives[1]))
    assert (torch.linalg.vector_norm(path.xy, dim=-1) <= 0.02 + 12 * position_std).all()


def test_a_row_does_not_depend_on_its_company():
    drives = still(33, 0.01, 0.01, torch.float32)
    whole = RELEASED.encode(*drives)
    alone = RELEASED.encode(*(part[7:8] for part in drives))
    np.testing.assert_allclose(alone[0], whole[7], atol=1e-6)


def test_order_comes_from_the_config():
    other = UnicycleActionSpace.from_config(RELEASED_ACTION_SPACE | {"action_order": ["curvature", "accel"]})
    actions = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    one, two = RELEASED.decode(actions, torch.tensor(9.0)), other.decode(actions.flip(-1), torch.tensor(9.0))
    assert torch.equal(one.xy, two.xy)
    drives = still(2, 0.01, 0.01)
    assert torch.equal(RELEASED.encode(*drives), other.encode(*drives).flip(-1))
    assert torch.equal(RELEASED.is_within_bounds(actions), other.is_within_bounds(actions.flip(-1)))


def test_bounds_are_tested_and_not_clipped():
    actions = torch.zeros(2, 64, 2)
    actions[1, 3, 0] = 9.9
    space = UnicycleActionSpace()
    assert space.is_within_bounds(actions).tolist() == [True, False]
    assert space.decode(actions, torch.zeros(2)).speed[1, -1] == pytest.approx(0.99)


def test_angles_are_unwrapped_from_their_first_value():
    yaw = torch.tensor([3.0, -3.1, -2.9])
    np.testing.assert_allclose(unwrap(yaw), [3.0, 2 * math.pi - 3.1, 2 * math.pi - 2.9], rtol=1e-6)


def test_yaw_of_a_rotation():
    c, s = math.cos(0.3), math.sin(0.3)
    assert yaw_of_rotation(torch.tensor([[c, -s, 0], [s, c, 0], [0, 0, 1.0]])) == pytest.approx(0.3)


def test_bins_by_hand():
    # 3 bins over -1 … 1: centres -1, 0, 1; -0.5 is half way and rounds to the even bin 0, 0.5 to bin 2.
    bins = Bins((-1.0,), (1.0,), 3)
    values = torch.tensor([[-9.0], [-0.5], [0.0], [0.5], [9.0]])
    assert bins.encode(values)[:, 0].tolist() == [0, 0, 1, 2, 2]
    assert bins.decode(torch.tensor([[0], [1], [2]]))[:, 0].tolist() == [-1, 0, 1]


def test_history_gives_its_heading_back():
    # A circle of 20 m to the left at 8 m/s: heading 0 at the end, 0.04 rad a step.
    angle = (torch.arange(16, dtype=torch.float64) - 15) * 0.04
    xyz = torch.stack([20 * torch.sin(angle), 20 * (1 - torch.cos(angle)), torch.zeros(16)], -1)
    np.testing.assert_allclose(yaw_of_motion(xyz[:, :2]), angle, atol=1e-3)
    tokens = history_tokenizer({})
    decoded, _ = tokens.decode(tokens.encode(xyz))
    # The first difference, -11.3 m, is outside ±4 m: the path is right up to a shift, and half a bin a step.
    np.testing.assert_allclose(torch.diff(decoded, dim=0), torch.diff(xyz, dim=0), atol=0.0101)


@pytest.mark.parametrize(
    ("act", "key"),
    [
        (lambda: UnicycleActionSpace.from_config({"acel_mean": 0}), "action_space_cfg.acel_mean"),
        (
            lambda: UnicycleActionSpace.from_config({"action_order": ["accel", "accel"]}),
            "action_space_cfg.action_order",
        ),
        (lambda: future_tokenizer({"num_bins": 1}), "traj_tokenizer_cfg.num_bins"),
        (lambda: future_tokenizer({"dims_min": [0, 0, 0]}), "traj_tokenizer_cfg"),
        (lambda: future_tokenizer({"bins": 3}), "traj_tokenizer_cfg.bins"),
        (lambda: history_tokenizer({"predict_yaw": True}), "hist_traj_tokenizer_cfg.predict_yaw"),
    ],
)
def test_wrong_configs_name_their_key(act, key):
    with pytest.raises(ConfigError) as caught:
        act()
    assert caught.value.key == key
