import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from alpagym_runtime.errors import CorruptFileError
from alpagym_runtime.testing.conformance import TransportConformance
from alpagym_runtime.testing.examples import assert_same, example_camera_episode, example_episode
from alpagym_runtime.transport import shared_memory
from alpagym_runtime.transport.config import DiskConfig, SharedMemoryConfig
from alpagym_runtime.transport.memory import MemoryConfig
from alpagym_runtime.transport.rules import Ledger


class TestMemory(TransportConformance):
    def make(self, directory):
        both = MemoryConfig().build("both", directory)
        return both, both


class TestDisk(TransportConformance):
    def make(self, directory):
        return DiskConfig().build("rollout", directory), DiskConfig().build("trainer", directory)


class TestSharedMemory(TransportConformance):
    @pytest.fixture(autouse=True)
    def _close(self):
        self.made = []
        yield
        for end in self.made:
            end.close()

    def make(self, directory):
        pair = (SharedMemoryConfig().build("rollout", directory), SharedMemoryConfig().build("trainer", directory))
        self.made += pair
        return pair


def start(code, *arguments):
    """Another Python with the imports of a sender."""
    prelude = """
        import sys, time
        from pathlib import Path
        from alpagym_runtime.testing.examples import example_camera_episode, example_episode
        from alpagym_runtime.transport.config import DiskConfig, SharedMemoryConfig
    """
    program = textwrap.dedent(prelude) + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


# ---------------------------------------------------------------- rules


def test_the_oldest_goes_when_room_is_needed():
    ledger = Ledger(limit_bytes=100, expire_s=1e9)
    assert ledger.add("a", 60) == []
    assert ledger.add("b", 60) == ["a"]
    assert ledger.add("c", 40) == []
    assert ledger.add("d", 300) == ["b", "c"]  # what is too large for the room alone is still handed over
    assert "limit_mb" in str(ledger.missing("a"))
    assert ledger.held_bytes == 300


def test_the_oldest_goes_when_its_time_is_over():
    now = [0.0]
    ledger = Ledger(10**9, expire_s=10.0, clock=lambda: now[0])
    ledger.add("a", 1)
    now[0] = 6.0
    ledger.add("b", 1)
    now[0] = 11.0
    assert ledger.add("c", 1) == ["a"]
    assert "expire_s" in str(ledger.missing("a"))
    assert "never sent" in str(ledger.missing("x"))


@pytest.mark.parametrize("config", [MemoryConfig, DiskConfig, SharedMemoryConfig])
def test_what_is_never_received_is_released(config, tmp_path):
    end = config(limit_mb=1).build("both", tmp_path)
    episode = example_camera_episode(10, height=96, width=96)  # 11 frames of 28 kB, in histories of 3
    handles = [end.send(episode) for _ in range(8)]
    with pytest.raises(KeyError, match=r"transport\.limit_mb"):
        end.receive(handles[0])
    assert_same(end.receive(handles[-1]), episode, "the newest")
    end.close()


@pytest.mark.parametrize("config", [DiskConfig, SharedMemoryConfig])
def test_what_the_other_end_discarded_takes_no_room(config, tmp_path):
    sender, receiver = config(limit_mb=2).build("rollout", tmp_path), config().build("trainer", tmp_path)
    episode = example_camera_episode(10, height=96, width=96)
    for _ in range(6):
        receiver.discard(sender.send(episode))
    assert_same(receiver.receive(sender.send(episode)), episode, "the last")
    sender.close()


# ---------------------------------------------------------------- disk


def test_files_of_a_dead_sender_go_by_age(tmp_path):
    sender = DiskConfig().build("rollout", tmp_path)
    old, new = sender.send(example_episode()), sender.send(example_episode())
    path = tmp_path / "transport" / f"{old}.arrow"
    os.utime(path, (0, 0))
    partial = tmp_path / "transport" / ".partial-dead.arrow"
    partial.write_bytes(b"torn")
    os.utime(partial, (0, 0))
    receiver = DiskConfig().build("trainer", tmp_path)
    with pytest.raises(KeyError):
        receiver.receive(old)
    receiver.receive(new)
    assert not partial.exists()


def test_a_torn_file_is_never_taken_for_a_whole_one(tmp_path):
    end = DiskConfig().build("both", tmp_path)
    handle = end.send(example_episode())
    path = tmp_path / "transport" / f"{handle}.arrow"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptFileError, match=rf"{handle}.arrow \(\d+ bytes\).*remove it"):
        end.receive(handle)


@pytest.mark.parametrize("moments", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_moment_leaves_whole_files_only(tmp_path, moments):
    code = """
        end = DiskConfig().build("rollout", Path(sys.argv[1]))
        episode = example_camera_episode(20, height=256, width=256)
        while True:
            print(end.send(episode), flush=True)
    """
    killed = 0
    for attempt in range(moments):
        with start(code, tmp_path) as writer:
            assert writer.stdout.readline()
            time.sleep(0.013 * attempt)
            writer.send_signal(signal.SIGKILL)
        killed += 1
    receiver = DiskConfig().build("trainer", tmp_path)
    expected = example_camera_episode(20, height=256, width=256)
    found = sorted((tmp_path / "transport").glob("disk-*.arrow"))
    assert len(found) >= killed
    for path in found[:: max(1, len(found) // 8)]:
        assert_same(receiver.receive(path.stem), expected, path.name)


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path, monkeypatch):
    import resource

    end = DiskConfig().build("both", tmp_path)
    first = end.send(example_episode())
    # A limit on the size of files fails like a full disk: write(2) returns an error in the middle of a file.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write .*arrow \(.* MB of arrays\): File too large.*transport.path"):
            end.send(example_camera_episode(20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [path.stem for path in (tmp_path / "transport").iterdir()] == [first]
    assert_same(end.receive(first), example_episode(), "the earlier episode")


def test_a_folder_that_cannot_be_made_names_the_key(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot make .*transport\.path"):
        DiskConfig(path=str(tmp_path / "file" / "below")).build("both", tmp_path)


# ---------------------------------------------------------------- shared memory


def segments():
    return set(shared_memory.root().glob(f"alpagym-{os.getuid()}-*"))


def test_a_receiver_maps_without_a_copy(tmp_path):
    sender, receiver = SharedMemoryConfig().build("a", tmp_path), SharedMemoryConfig().build("b", tmp_path)
    handle = sender.send(example_camera_episode(20, height=64, width=64))
    received = receiver.receive(handle)
    pixels = received.observation["camera_front"]
    assert not pixels.flags.owndata
    if Path("/proc/self/maps").exists():
        token, number = handle.split("-")[1:]
        ranges = [
            tuple(int(x, 16) for x in line.split()[0].split("-"))
            for line in Path("/proc/self/maps").read_text().splitlines()
            if f"{token}/{number}.arrow" in line
        ]
        assert any(low <= pixels.ctypes.data < high for low, high in ranges)
    pixels[:] = 0  # the receiver's own
    assert_same(receiver.receive(handle), example_camera_episode(20, height=64, width=64), "the segment")
    sender.close()


def test_memory_of_a_killed_owner_is_freed():
    before = segments()
    code = """
        end = SharedMemoryConfig().build("rollout", Path("."))
        print(end.send(example_episode()), flush=True)
        time.sleep(60)
    """
    receiver = SharedMemoryConfig().build("trainer", Path("."))
    with start(code) as owner:
        handle = owner.stdout.readline().strip()
        episode = receiver.receive(handle)
        assert segments() - before
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10.0
    while segments() - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not segments() - before
    with pytest.raises(KeyError):
        receiver.receive(handle)
    assert_same(episode, example_episode(), "what was mapped before")


def test_an_owner_that_ends_leaves_nothing():
    before = segments()
    code = """
        end = SharedMemoryConfig().build("rollout", Path("."))
        print(end.send(example_episode()), flush=True)
    """
    with start(code) as owner:
        assert owner.wait(30) == 0
    assert not segments() - before


def test_orphans_are_found_by_their_free_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "root", lambda: tmp_path)
    orphan = tmp_path / f"alpagym-{os.getuid()}-{'0' * 16}"
    orphan.mkdir()
    (orphan / "owner.lock").touch()
    (orphan / "0.arrow").write_bytes(b"x")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner.lock").touch()
    (tmp_path / f"alpagym-{os.getuid()}-{'1' * 16}").symlink_to(elsewhere)
    alive = SharedMemoryConfig().build("a", tmp_path)
    handle = alive.send(example_episode())
    SharedMemoryConfig().build("b", tmp_path)
    assert not orphan.exists()
    assert elsewhere.exists()  # a link is not followed
    alive.receive(handle)
    alive.close()
