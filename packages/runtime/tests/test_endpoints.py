import json
import os
import socket
import threading
import time

import pytest

from alpagym_runtime.endpoints import Endpoint, Registry, own_address
from alpagym_runtime.errors import SimulatorError
from alpagym_runtime.simulators.alpasim.config import AlpasimConfig, ServerConfig

ENDPOINT = Endpoint("alpasim-0", "alpasim", "127.0.0.1", 6007, 4, ("clip-a", "clip-b"))


def test_what_is_published_is_read_back(tmp_path):
    registry = Registry(tmp_path)
    registry.publish(ENDPOINT)
    assert registry.fresh("alpasim") == [ENDPOINT]
    assert registry.fresh("driver") == []
    assert registry.beat(ENDPOINT).beat == 1
    assert registry.fresh("alpasim")[0].beat == 1
    assert sorted(path.name for path in registry.folder.iterdir()) == ["alpasim-0.json"]
    registry.withdraw("alpasim-0")
    registry.withdraw("alpasim-0")
    assert registry.all() == []


def test_what_no_longer_beats_is_not_fresh(tmp_path):
    registry = Registry(tmp_path)
    registry.publish(ENDPOINT)
    past_s = time.time() - 60.0
    os.utime(registry.folder / "alpasim-0.json", (past_s, past_s))
    assert registry.fresh("alpasim") == []
    ((_, age_s),) = registry.all()
    assert 59.0 < age_s < 70.0
    assert registry.wait("alpasim", 0.0) == []


def test_a_clock_that_is_wrong_does_not_age_anything(tmp_path, monkeypatch):
    registry = Registry(tmp_path)
    registry.publish(ENDPOINT)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # this machine's clock; the files have the file system's
    assert registry.fresh("alpasim") == [ENDPOINT]


def test_a_reader_never_sees_half_a_file(tmp_path):
    registry, over, seen = Registry(tmp_path), threading.Event(), []
    large = Endpoint("alpasim-0", "alpasim", "h", 1, 1, tuple(f"clip-{i}" for i in range(3000)))
    registry.publish(large)

    def write():
        while not over.is_set():
            registry.beat(large)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(50):
            seen.append(len(registry.all()))
    finally:
        over.set()
        thread.join()
    assert set(seen) == {1}


def test_files_that_are_no_endpoints_are_left_out(tmp_path):
    registry = Registry(tmp_path)
    registry.publish(ENDPOINT)
    (registry.folder / "torn.json").write_text('{"name": "to')
    (registry.folder / "other.json").write_text(json.dumps({"scenes": [], "colour": "red"}))
    assert registry.fresh("alpasim") == [ENDPOINT]


@pytest.mark.parametrize("name", ["", "../x", "A", "a b"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="an endpoint's name"):
        Registry(tmp_path).publish(Endpoint(name, "alpasim", "h", 1))


def test_an_address_of_version_six_is_bracketed():
    assert Endpoint("a", "alpasim", "::1", 5).address == "[::1]:5"


def test_a_run_finds_the_alpasim_that_was_started_for_it(tmp_path):
    Registry(tmp_path).publish(ENDPOINT)
    Registry(tmp_path).publish(Endpoint("alpasim-1", "alpasim", "node2", 6007))
    found = AlpasimConfig(rollout_timeout_s=5.0).located(tmp_path)
    assert found.addresses == ["127.0.0.1:6007", "node2:6007"]
    assert found.rollout_timeout_s == 5.0
    named = AlpasimConfig(address="elsewhere:1")
    assert named.located(tmp_path) is named


def test_an_alpasim_on_another_node_can_reach_our_drivers(tmp_path):
    Registry(tmp_path).publish(Endpoint("alpasim-0", "alpasim", "127.0.0.1", 6007))
    assert AlpasimConfig().located(tmp_path).server.host == "127.0.0.1"
    Registry(tmp_path).publish(Endpoint("alpasim-0", "alpasim", "10.0.0.7", 6007))
    assert AlpasimConfig().located(tmp_path).server.host == own_address()
    chosen = AlpasimConfig(server=ServerConfig(host="10.0.0.9"))
    assert chosen.located(tmp_path).server.host == "10.0.0.9"


def test_an_endpoint_is_awaited_by_its_name_and_several_by_their_kind(tmp_path):
    registry = Registry(tmp_path)
    assert registry.named("team-1-0", 0.0) is None
    registry.publish(Endpoint("team-1-0", "team", "a", 1))
    timer = threading.Timer(0.3, registry.publish, (Endpoint("team-1-1", "team", "b", 2),))
    timer.start()
    assert registry.named("team-1-1", 10.0) == Endpoint("team-1-1", "team", "b", 2)
    assert len(registry.wait("team", 10.0, 2)) == 2
    assert len(registry.wait("team", 0.0, 3)) == 2  # what there is
    # Of an earlier time, and still it is the one of that name.
    os.utime(registry.folder / "team-1-0.json", (1.0, 1.0))
    assert registry.named("team-1-0", 0.0) is not None


def test_our_own_address_is_one_of_this_machine():
    with socket.create_server((own_address(), 0)):
        pass


def test_a_run_without_an_alpasim_says_how_to_get_one(tmp_path):
    with pytest.raises(SimulatorError, match="no AlpaSim is published in .*alpagym resume"):
        AlpasimConfig(connect_timeout_s=0.01).located(tmp_path)
