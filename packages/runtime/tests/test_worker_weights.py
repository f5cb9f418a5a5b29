"""Weights on their way to workers, and who may connect as one."""

from __future__ import annotations

import json
import stat

import pytest
import torch

from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.rollouts.weights import Publisher, take
from alpagym_runtime.rollouts.wire import Rendezvous
from alpagym_waypoint.config import WaypointConfig


def policy_of(seed):
    return WaypointConfig(hidden=16, actors=1, seed=seed).build("cpu")


def files(directory):
    return sorted(path.name for path in (directory / "workers" / "weights").iterdir())


def same(a, b):
    pairs = zip(a.module.state_dict().values(), b.module.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def test_a_worker_gets_the_newest_weights_with_their_version(tmp_path):
    trainer, worker, publisher = policy_of(1), policy_of(2), Publisher(tmp_path)
    trainer.version = 7
    publisher.publish(trainer)
    assert take(tmp_path, 1, worker) == 1
    assert worker.version == 7
    assert same(worker, trainer)


def test_weights_that_did_not_change_are_not_written_again(tmp_path):
    trainer, publisher = policy_of(1), Publisher(tmp_path)
    publisher.publish(trainer)
    publisher.publish(trainer)
    assert publisher.number == 1
    with torch.no_grad():
        next(iter(trainer.module.parameters())).add_(1.0)
    publisher.publish(trainer)
    assert publisher.number == 2


def test_older_weights_are_a_new_publication_of_an_old_version(tmp_path):
    trainer, worker, publisher = policy_of(1), policy_of(2), Publisher(tmp_path)
    for version in (3, 4, 3):
        trainer.version = version
        publisher.publish(trainer)
    assert take(tmp_path, 3, worker) == 3
    assert worker.version == 3
    assert files(tmp_path) == ["000000002.safetensors", "000000003.safetensors"]  # the last two stay


def test_weights_that_are_not_those_that_were_published_are_refused(tmp_path):
    trainer, worker, publisher = policy_of(1), policy_of(2), Publisher(tmp_path)
    publisher.publish(trainer)
    path = tmp_path / "workers" / "weights" / "000000001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CorruptFileError, match="000000001.safetensors does not hold the weights that were published"):
        take(tmp_path, 1, worker)
    path.write_bytes(whole[:100])
    with pytest.raises(CorruptFileError, match="000000001.safetensors cannot be read"):
        take(tmp_path, 1, worker)
    assert same(worker, policy_of(2))


def test_weights_that_are_not_there_are_named(tmp_path):
    publisher = Publisher(tmp_path)
    publisher.publish(policy_of(1))
    with pytest.raises(CorruptFileError, match="weights 2 are not in .*weights"):
        take(tmp_path, 2, policy_of(2))


def test_the_token_is_for_the_owner_and_is_not_printed(tmp_path):
    rendezvous = Rendezvous("127.0.0.1", 1)
    rendezvous.write(tmp_path)
    assert stat.S_IMODE((tmp_path / "workers").stat().st_mode) == 0o700
    assert rendezvous.token not in repr(rendezvous)
    assert Rendezvous.read(tmp_path).admits({"token": rendezvous.token})
    assert not rendezvous.admits({"token": "0" * 64})
    assert not rendezvous.admits({})


def test_a_rendezvous_that_is_not_whole_is_named(tmp_path):
    Rendezvous("127.0.0.1", 1).write(tmp_path)
    (tmp_path / "workers" / "rendezvous.json").write_text(json.dumps({"host": "127.0.0.1"}))
    with pytest.raises(CorruptFileError, match="rendezvous.json is not whole"):
        Rendezvous.read(tmp_path)
