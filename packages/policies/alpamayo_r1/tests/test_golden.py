"""The numbers that the published code gave on our drives (golden/open_loop.json beside the repository)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from alpagym_alpamayo_r1.trajectory_tokens import future_tokenizer, history_tokenizer

ROOT = Path(__file__).parents[4]
GOLDEN = ROOT / ".." / "shared" / "golden" / "open_loop.json"
pytestmark = pytest.mark.skipif(not GOLDEN.is_file(), reason="golden numbers are not beside this checkout")

DATA = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {"cases": {}}
CASES = DATA["cases"]


def tokenizer():
    space = dict(DATA["action_space"].items())
    return future_tokenizer({"action_space_cfg": space})


def drive(case, dtype):
    names = ("history_xyz", "history_yaw", "future_xyz", "future_yaw")
    return [torch.tensor(case[name], dtype=dtype) for name in names]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_actions(name, dtype):
    case, space = CASES[name], tokenizer().action_space
    history_xyz, history_yaw, future_xyz, future_yaw = drive(case, dtype)
    action = space.encode(history_xyz, history_yaw, future_xyz, future_yaw)
    assert action.dtype == dtype
    np.testing.assert_allclose(action, case["action"], atol=1e-3)
    np.testing.assert_allclose(space.initial_speed(history_xyz, history_yaw), np.ravel(case["v0"])[0], atol=1e-4)
    assert bool(space.is_within_bounds(action)) == case["within_bounds"]
    path = space.decode(action, space.initial_speed(history_xyz, history_yaw))
    np.testing.assert_allclose(path.xy, case["decoded_xy_from_action"], atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_future_tokens(name, dtype):
    case, tokens = CASES[name], tokenizer()
    history_xyz, history_yaw, future_xyz, future_yaw = drive(case, dtype)
    bins = tokens.encode(history_xyz, history_yaw, future_xyz, future_yaw)
    assert (bins - torch.tensor(case["future_tokens"])).abs().max() <= 1
    published = torch.tensor(case["future_tokens"])
    path = tokens.decode(published, history_xyz.float(), history_yaw.float())
    np.testing.assert_allclose(path.xy, case["decoded_xy"], atol=1e-3)
    np.testing.assert_allclose(path.yaw, case["decoded_yaw"], atol=1e-4)
    own = tokens.decode(bins, history_xyz.float(), history_yaw.float())
    error = torch.linalg.vector_norm(own.xy - future_xyz[:, :2].float(), dim=-1).mean()
    np.testing.assert_allclose(error, case["roundtrip_ade"], atol=1e-3)


@pytest.mark.parametrize("name", CASES)
def test_history_tokens(name):
    case, tokens = CASES[name], history_tokenizer({})
    bins = tokens.encode(torch.tensor(case["history_xyz"], dtype=torch.float64))
    assert bins.tolist() == case["history_tokens"]
    np.testing.assert_allclose(tokens.decode(bins)[0], case["history_decoded_xyz"], atol=1e-3)


def test_all_drives_at_once_equal_each_alone():
    space = tokenizer().action_space
    columns = zip(*(drive(case, torch.float32) for case in CASES.values()), strict=True)
    together = space.encode(*(torch.stack(column) for column in columns))
    for row, case in zip(together, CASES.values(), strict=True):
        np.testing.assert_allclose(row, space.encode(*drive(case, torch.float32)), atol=1e-6)
