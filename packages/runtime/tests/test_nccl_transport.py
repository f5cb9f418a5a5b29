from __future__ import annotations

import contextlib
import gc
import json
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from alpagym_runtime.deploy_config import DeploySection
from alpagym_runtime.machine import Gpu
from alpagym_runtime.testing.conformance import TransportConformance, empty_episode
from alpagym_runtime.testing.examples import assert_same, example_camera_episode, example_episode
from alpagym_runtime.transport.config import NcclConfig
from alpagym_runtime.transport.nccl.blocks import Blocks, plain
from alpagym_runtime.transport.nccl.ends import _ranges
from alpagym_runtime.transport.nccl.message import closed_up, pack, parts, unpack
from alpagym_runtime.types import Ragged

FAST = {"backend": "gloo", "copy_threads": 1}


@pytest.fixture
def ends(tmp_path):
    """Makes ends in one run directory, and closes them."""
    made = []

    def make(role, **options):
        made.append(NcclConfig(**(FAST | options)).build(role, tmp_path))
        return made[-1]

    yield make
    for end in made[::-1]:
        end.close()


class TestNccl(TransportConformance):
    @pytest.fixture(autouse=True)
    def _close(self):
        self.made = []
        yield
        for end in self.made[::-1]:
            end.close()

    def make(self, directory):
        receiver = NcclConfig(**FAST).build("trainer", directory)
        sender = NcclConfig(**FAST).build("rollout", directory)
        self.made += [receiver, sender]
        return sender, receiver


# ---------------------------------------------------------------- messages


def through(episode):
    """What a message's other end makes of an episode."""
    message = pack(episode)
    buffer = np.empty(message.size, np.uint8)
    for part in parts(message.pieces, longest=100_000):
        part.fill(buffer)
    return message, unpack(message.header, buffer)


@pytest.mark.parametrize("episode", [example_episode(), example_camera_episode(4, 1, jpeg=True), empty_episode()])
def test_a_message_holds_an_episode_to_the_bit(episode):
    assert_same(through(episode)[1], episode, "the episode")


def test_arrays_without_elements_arrive_with_shape_and_type_and_take_no_byte():
    odd = {"a": np.zeros((13, 0, 3), np.float32), "b": np.zeros((0, 4), np.uint64), "c": np.zeros(0, bool)}
    message, found = through(replace(empty_episode(), observation=odd))
    assert message.size == 0
    assert_same(found.observation, odd, "the arrays")
    nothing = Ragged(np.zeros((0, 2), np.int32), np.zeros(5, np.int64))
    decisions = replace(example_episode().decisions, trace={"empty": nothing})
    assert_same(through(replace(example_episode(), decisions=decisions))[1].decisions.trace["empty"], nothing)


def test_pictures_whose_rows_overlap_are_sent_once():
    # 11 frames of 8 x 8 px seen as 10 rows of 2: 11 · 192 = 2112 bytes, not 3840; 2112 is a multiple of 64.
    frames = np.random.default_rng(0).integers(0, 256, (11, 8, 8, 3), np.uint8)
    rows = np.lib.stride_tricks.sliding_window_view(frames, 2, axis=0).transpose(0, 4, 1, 2, 3)
    message, found = through(replace(empty_episode(), observation={"camera_front": rows}))
    assert message.size == 2112
    np.testing.assert_array_equal(found.observation["camera_front"], rows)


def test_pieces_are_copied_in_parts_that_leave_out_what_is_not_among_them():
    # Pieces at 0 (100 bytes), 128 (200) and 1024 (10): parts of at most 150 bytes; from 328 to 1024 nothing is copied.
    pieces = [(at, np.full(size, at % 7, np.uint8)) for at, size in ((0, 100), (128, 200), (1024, 10))]
    found = parts(pieces, longest=150)
    assert [(part.start, part.end) for part in found] == [(0, 150), (150, 300), (300, 328), (1024, 1034)]
    buffer = np.full(1100, 9, np.uint8)
    for part in found:
        part.fill(buffer)
    assert (buffer[:100] == 0).all()
    assert (buffer[128:328] == 128 % 7).all()
    assert (buffer[1024:1034] == 1024 % 7).all()
    assert (buffer[328:1024] == 9).all()


def test_a_buffer_has_room_for_what_is_copied_only():
    # From 328 to 1024 of the message nothing is copied: of the 696 bytes 640 = 10 · 64 are left out of the buffer.
    pieces = [(at, np.full(size, at % 7, np.uint8)) for at, size in ((0, 100), (128, 200), (1024, 10))]
    found = closed_up(parts(pieces, longest=150))
    assert [part.before for part in found] == [0, 0, 0, 640]
    assert _ranges(found) == [(0, 328, 0), (1024, 1034, 640)]
    buffer = np.full(394, 9, np.uint8)
    for part in found:
        part.fill(buffer)
    assert (buffer[:100] == 0).all()
    assert (buffer[128:328] == 128 % 7).all()
    assert (buffer[384:394] == 1024 % 7).all()


def test_nothing_is_left_out_of_a_buffer_that_everything_is_copied_into():
    message = pack(example_camera_episode(4, 1))
    assert all(part.before == 0 for part in closed_up(parts(message.pieces, longest=100_000)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"at": 1 << 40}, "bytes 1099511627776"),
        ({"shape": [1 << 40]}, "bytes 0 to"),
        ({"shape": [-1]}, "an array of"),
        ({"type": "|O"}, "an array of object"),
        ({"shape": [2, 2], "strides": [1 << 40, 1]}, "bytes 0 to"),
        ({"shape": [2, 2], "strides": [-1, 1]}, "strides"),
    ],
)
def test_a_header_that_points_outside_its_buffer_is_refused(change, reason):
    message = pack(replace(empty_episode(), rewards=np.arange(4.0)))
    header = json.loads(message.header)
    header["arrays"]["rewards"] |= {"at": 0} | change
    with pytest.raises(ValueError, match=f"does not describe its buffer: .*{reason}"):
        unpack(json.dumps(header).encode(), np.zeros(message.size, np.uint8))


@pytest.mark.parametrize("header", [b"", b"[]", b"{}", b'{"version": 9}', b"\xff"])
def test_what_is_no_header_is_refused(header):
    with pytest.raises(ValueError, match="does not describe its buffer"):
        unpack(header, np.zeros(8, np.uint8))


def test_objects_are_no_data():
    with pytest.raises(ValueError, match="'x': object arrays must be"):
        pack(replace(empty_episode(), observation={"x": np.array([{}], object)}))


# ---------------------------------------------------------------- blocks


def where(array):
    """Its address."""
    return array.__array_interface__["data"][0]


def test_a_block_comes_back_with_the_last_view_and_is_lent_again():
    blocks = Blocks(1 << 20, plain)
    first = blocks.allocate(100_000)
    assert len(first) == 100_000
    address, view = where(first), first.reshape(2, -1)[1:]
    del first
    second = blocks.allocate(100_000)
    assert where(second) != address
    del view
    assert where(blocks.allocate(90_000)) == address


def test_no_more_is_lent_than_the_limit_as_blocks_are_large():
    # 100,000 bytes take a block of 2**17 = 131,072: two of them are 262,144.
    blocks = Blocks(262_144, plain)
    first, second = blocks.allocate(100_000), blocks.allocate(131_072)
    assert blocks.allocate(1) is None
    assert first is not None
    del second
    assert blocks.allocate(1) is not None


def test_what_is_kept_makes_room_for_what_is_lent():
    made = []

    def make(size):
        made.append(plain(size))
        return made[-1]

    blocks = Blocks(3 << 20, make)
    three = [blocks.allocate(1 << 20) for _ in range(3)]
    del three
    gone = [weakref.ref(block) for block in made]
    made.clear()
    # 1.5 MB takes 2 MiB: with it in use one of the three of 1 MiB may stay.
    large = blocks.allocate(1_500_000)
    assert large is not None
    assert sum(ref() is not None for ref in gone) == 1


def test_closed_blocks_keep_nothing():
    made = []

    def make(size):
        made.append(plain(size))
        return made[-1]

    blocks = Blocks(3 << 20, make)
    lent, kept = blocks.allocate(1 << 20), blocks.allocate(1 << 20)
    refs = [weakref.ref(block) for block in made]
    made.clear()
    del kept
    blocks.close()
    assert [ref() is not None for ref in refs] == [True, False]
    assert blocks.allocate(8) is None
    lent[:] = 3
    del lent
    assert blocks.take(1 << 20) is made[0]
    assert refs[0]() is None


def test_what_is_small_takes_no_large_block():
    blocks = Blocks(1 << 30, plain)
    address = where(blocks.allocate(1 << 20))
    small = blocks.allocate(100_000)
    assert where(small) != address
    assert where(blocks.allocate(600_000)) == address


# ---------------------------------------------------------------- flight


def sized(count, number):
    """An episode of `count` bytes, known by its number."""
    return replace(
        empty_episode(), observation={"x": np.full(count, number % 251, np.uint8)}, rewards=np.full(1, float(number))
    )


def test_a_hundred_episodes_of_all_sizes_arrive_in_any_order(ends):
    receiver, sender = ends("trainer"), ends("rollout")
    sizes = [0, 1, 4096, 100_000, 3_000_000] * 20
    sizes[50] = 64_000_000
    with ThreadPoolExecutor(1) as other:
        sending = other.submit(lambda: [sender.send(sized(size, n)) for n, size in enumerate(sizes)])
        first = sender_link(receiver, sender)
        for pair in range(0, 100, 2):
            for n in (pair + 1, pair):
                handle = f"{first}-{n}"
                found = receiver.receive(handle)
                receiver.discard(handle)
                assert (len(found.observation["x"]), found.rewards[0]) == (sizes[n], n)
                assert (found.observation["x"] == n % 251).all()
        assert sending.result(60) == [f"{first}-{n}" for n in range(100)]


def sender_link(receiver, sender):
    """What the handles of the only sender begin with."""
    return f"nccl-{receiver._session.token}-0"


def test_what_is_sent_and_not_taken_holds_the_sender_up(ends):
    receiver, sender = ends("trainer"), ends("rollout", in_flight=2, timeout_s=1.0)
    handles = [sender.send(sized(8, n)) for n in range(2)]
    with ThreadPoolExecutor(1) as other:
        third = other.submit(sender.send, sized(8, 2))
        time.sleep(0.3)
        assert not third.done()
        receiver.receive(handles[1])
        assert receiver.receive(third.result(5)).rewards[0] == 2.0
    # Two are taken, one is not: one more goes, then none.
    sender.send(sized(8, 3))
    began = time.monotonic()
    with pytest.raises(
        TimeoutError, match=r"trainer \(process \d+ .* within 1 s, and 2 are on their way before nccl-.*-4"
    ):
        sender.send(sized(8, 4))
    assert time.monotonic() - began < 3.0


def test_what_is_left_out_gives_its_place_back(ends):
    receiver, sender = ends("trainer", in_flight=4), ends("rollout", in_flight=4, timeout_s=2.0)
    # Of sixteen every fourth is left out; four kept places of four would stop the sender.
    left_out = []
    for number in range(16):
        handle = sender.send(empty_episode())
        if number % 4 == 0:
            left_out.append(handle)
            continue
        receiver.receive(handle)
        receiver.discard(handle)
        receiver.discard_older(handle)
    with pytest.raises(KeyError):
        receiver.receive(left_out[0])
    # What may still be asked for, fewer than four before the last, is there.
    assert receiver.receive(left_out[3]) is not None


def test_nothing_travels_beside_a_weight_sync(ends):
    receiver, sender = ends("trainer"), ends("rollout")
    receiver.receive(sender.send(sized(8, 0)))
    with ThreadPoolExecutor(1) as other:
        with receiver.paused():
            arriving = other.submit(receiver.receive, sender.send(sized(100_000, 1)))
            time.sleep(0.4)
            assert not arriving.done()
        assert arriving.result(10).rewards[0] == 1.0


def test_an_episode_that_nobody_asks_for_is_an_error_within_the_deadline(ends):
    receiver, sender = ends("trainer"), ends("rollout", timeout_s=1.0)
    receiver.receive(sender.send(sized(8, 0)))
    with receiver.paused():
        handle = sender.send(sized(8, 1))
        time.sleep(1.5)
        with pytest.raises(TimeoutError, match=rf"did not ask for {handle} within 1 s; .* transport.timeout_s"):
            sender.send(sized(8, 2))
    # The next one joins again, as another link.
    assert receiver.receive(sender.send(sized(8, 3))).rewards[0] == 3.0


def test_what_does_not_come_is_an_error_within_the_deadline(ends):
    receiver, sender = ends("trainer", timeout_s=1.0), ends("rollout")
    handle = sender.send(sized(8, 0))
    for missing, who in ((handle[:-1] + "7", "its sender is process"), (handle[:-3] + "9-0", "no such sender")):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=f"{missing} did not arrive within 1 s: {who}"):
            receiver.receive(missing)
        assert time.monotonic() - began < 3.0


def test_a_sender_frees_an_episode_of_its_own(ends):
    receiver, sender = ends("trainer"), ends("rollout")
    first, second = sender.send(sized(8, 0)), sender.send(sized(8, 1))
    sender.discard(first)
    sender.discard("nccl-0123456789abcdef-0-0")
    receiver.receive(second)
    # Messages keep their order, and the second discard comes behind the first episode's.
    receiver.receive(sender.send(sized(8, 2)))
    with pytest.raises(KeyError, match=first):
        receiver.receive(first)


def test_what_is_received_and_never_discarded_is_released_by_rule(ends):
    receiver, sender = ends("trainer", limit_mb=2), ends("rollout")
    handles = [sender.send(sized(900_000, n)) for n in range(2)]
    for handle in handles:
        receiver.receive(handle)
    receiver.receive(sender.send(sized(900_000, 2)))
    with pytest.raises(KeyError, match="transport.limit_mb"):
        receiver.receive(handles[0])
    assert receiver.receive(handles[1]).rewards[0] == 1.0


def test_what_nobody_received_yet_is_not_released_for_what_is_newer(ends):
    # 2 MB have room for two; the last is asked for first and comes all the same, and so do those before it.
    receiver, sender = ends("trainer", limit_mb=2), ends("rollout")
    handles = [sender.send(sized(900_000, n)) for n in range(5)]
    for number in (4, 0, 1, 2, 3):
        assert receiver.receive(handles[number]).rewards[0] == number


def test_a_sender_waits_while_what_nobody_received_fills_the_room(ends):
    receiver, sender = ends("trainer", limit_mb=2), ends("rollout", timeout_s=2.0)
    with ThreadPoolExecutor(1) as other:
        # Two are there and three in the sender's buffers.
        handles = [sender.send(sized(900_000, n)) for n in range(5)]
        sixth = other.submit(sender.send, sized(900_000, 5))
        time.sleep(0.5)
        assert not sixth.done()
        assert len(receiver._links[0].held) == 2
        receiver.receive(handles[0])
        assert receiver.receive(sixth.result(5)).rewards[0] == 5.0
    for number in (6, 7, 8):
        sender.send(sized(900_000, number))
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r": 2 MB of episodes that it did not take .* \(transport.limit_mb\)"):
        [sender.send(sized(900_000, number)) for number in (9, 10, 11)]
    assert time.monotonic() - began < 10.0


def test_a_sender_that_goes_while_it_waits_for_room_is_noticed_and_leaves_it(ends):
    receiver, sender, other = ends("trainer", limit_mb=2), ends("rollout"), ends("rollout")
    handles = [sender.send(sized(900_000, n)) for n in range(4)]
    end = time.monotonic() + 5.0
    while len(receiver._links[0].held) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    sender._outgoing.abort()
    sender._outgoing = None
    while receiver._links[0]._channel is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert receiver._links[0].broken is not None
    for number in range(2):
        assert receiver.receive(handles[number]).rewards[0] == number
    with pytest.raises(ConnectionError, match=f"{handles[2]} did not arrive"):
        receiver.receive(handles[2])
    assert receiver._untaken == 0
    assert receiver.receive(other.send(sized(1_900_000, 7))).rewards[0] == 7.0


def test_what_is_too_old_makes_room_although_nothing_comes(ends):
    receiver, sender, other = ends("trainer", limit_mb=2, expire_s=1.0), ends("rollout"), ends("rollout")
    for number in range(2):
        sender.send(sized(900_000, number))
    # The room is full, and who sent what fills it is gone.
    sender._outgoing.abort()
    sender._outgoing = None
    assert receiver.receive(other.send(sized(1_900_000, 7))).rewards[0] == 7.0


def test_a_killed_senders_episodes_make_room_and_can_be_had_until_then(ends):
    receiver, sender, other = ends("trainer", limit_mb=2), ends("rollout"), ends("rollout")
    handles = [sender.send(sized(900_000, n)) for n in range(2)]
    end = time.monotonic() + 5.0
    while len(receiver._links[0].held) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    sender._outgoing.abort()
    sender._outgoing = None
    while receiver._untaken and time.monotonic() < end:
        time.sleep(0.01)
    assert receiver.receive(handles[1]).rewards[0] == 1.0
    last = other.send(sized(900_000, 7))
    assert receiver.receive(last).rewards[0] == 7.0
    with pytest.raises(KeyError, match="released to make room"):
        receiver.receive(handles[0])


def test_a_sender_that_waits_for_room_can_free_what_fills_it(ends):
    receiver, sender = ends("trainer", limit_mb=2), ends("rollout")
    handles = [sender.send(sized(900_000, n)) for n in range(3)]
    end = time.monotonic() + 5.0
    while len(receiver._links[0].held) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    for handle in handles[:2]:
        sender.discard(handle)
    while 2 not in receiver._links[0].held and time.monotonic() < end:
        time.sleep(0.01)
    assert list(receiver._links[0].held) == [2]


def test_what_a_sender_frees_itself_leaves_room(ends):
    receiver, sender = ends("trainer", limit_mb=2), ends("rollout")
    first = sender.send(sized(900_000, 0))
    receiver.receive(sender.send(sized(900_000, 1)))
    sender.discard(first)
    receiver.receive(sender.send(sized(8, 2)))
    # Arrays begin at multiples of 64 bytes, and each episode has one reward: 900,032 + 64 and 64 + 64.
    assert (receiver._untaken, receiver._ledger.held_bytes) == (0, 900_096 + 128)


def test_pictures_in_memory_of_the_sender_arrive_as_they_were(ends):
    receiver, sender = ends("trainer"), ends("rollout", in_flight=1)
    for number in range(3):
        pictures = sender.allocate(2_000_000)
        pictures[:] = number
        found = receiver.receive(sender.send(replace(empty_episode(), observation={"x": pictures.reshape(2, -1)})))
        assert found.observation["x"].shape == (2, 1_000_000)
        assert (found.observation["x"] == number).all()


def test_episodes_beyond_the_memory_that_they_may_hold_are_copied(ends):
    receiver, sender = ends("trainer", pinned_mb=0), ends("rollout", pinned_mb=0)
    for number in range(3):
        pictures = sender.allocate(2_000_000)
        pictures[:] = number
        found = receiver.receive(sender.send(replace(empty_episode(), observation={"x": pictures})))
        assert (found.observation["x"] == number).all()


def test_small_episodes_do_not_hold_the_buffers_of_large_ones(ends):
    # Blocks of 2**22, 2**16, 2**16, ...: beside the large one ten small ones hold less than one more large one.
    receiver, sender = ends("trainer"), ends("rollout", in_flight=16)
    handles = [sender.send(sized(size, n)) for n, size in enumerate([4_000_000] * 4 + [8] * 10)]
    held = [receiver.receive(handle) for handle in handles]
    assert receiver._blocks._lent <= 4 * (1 << 22) + 10 * (1 << 16)
    assert [episode.rewards[0] for episode in held] == list(range(14))


def test_an_episode_that_has_gone_is_let_go_of_without_the_garbage_collector(ends):
    receiver, sender = ends("trainer"), ends("rollout", in_flight=2)
    receiver.receive(sender.send(sized(8, 0)))
    gc.disable()
    try:
        memory = sender.allocate(2_000_000)
        memory[:] = 1
        gone = weakref.ref(memory)
        handle = sender.send(replace(empty_episode(), observation={"x": memory.reshape(2, -1)}))
        del memory
        receiver.receive(handle)
        receiver.receive(sender.send(sized(8, 1)))
        receiver.receive(sender.send(sized(8, 2)))
        end = time.monotonic() + 5.0
        while gone() is not None and time.monotonic() < end:
            time.sleep(0.01)
        assert gone() is None
    finally:
        gc.enable()


def test_several_senders_are_served_side_by_side(ends):
    receiver = ends("trainer")
    senders = [ends("rollout") for _ in range(3)]
    handles = [sender.send(sized(50_000, k)) for k, sender in enumerate(senders)]
    assert [receiver.receive(handle).rewards[0] for handle in handles[::-1]] == [2.0, 1.0, 0.0]


# ---------------------------------------------------------------- ends that die


def start(code, folder):
    """Another process with an end in the same run directory."""
    prelude = f"""
        import sys, time
        from pathlib import Path
        from alpagym_runtime.testing.examples import example_episode
        from alpagym_runtime.transport.config import NcclConfig
        make = lambda role: NcclConfig(**{FAST!r}).build(role, Path({str(folder)!r}))
    """
    program = textwrap.dedent(prelude) + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def test_a_sender_that_is_killed_is_replaced_by_another(ends, tmp_path):
    receiver = ends("trainer", timeout_s=15.0)
    child = start("end = make('rollout'); print(end.send(example_episode()), flush=True); time.sleep(60)", tmp_path)
    try:
        handle = child.stdout.readline().strip()
        assert_same(receiver.receive(handle), example_episode(), "the episode")
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    # What arrived stays; another sender is another link, whose handles are new.
    assert_same(receiver.receive(handle), example_episode(), "the episode")
    again = ends("rollout").send(example_episode(1))
    assert again.split("-")[2] == "1"
    assert_same(receiver.receive(again), example_episode(1), "the episode")


def test_what_a_killed_sender_never_sent_is_an_error_at_once(ends, tmp_path):
    receiver = ends("trainer", timeout_s=30.0)
    child = start("end = make('rollout'); print(end.send(example_episode()), flush=True); time.sleep(60)", tmp_path)
    try:
        handle = child.stdout.readline().strip()
        receiver.receive(handle)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"-0-7 did not arrive from process \d+ .*: the connection"):
        receiver.receive(handle[:-1] + "7")
    assert time.monotonic() - began < 5.0


def test_a_silent_stranger_holds_up_nobodys_end(tmp_path):
    receiver = NcclConfig(**FAST, timeout_s=20.0).build("trainer", tmp_path)
    about = json.loads((tmp_path / "transport" / "nccl.json").read_text())
    with socket.create_connection((about["host"], about["line_port"]), 5.0):
        while not receiver._strangers:
            time.sleep(0.01)
        began = time.monotonic()
        receiver.close()
        assert time.monotonic() - began < 5.0


def test_a_stranger_is_let_go_of_and_nobody_else_is_kept_waiting(ends, tmp_path):
    receiver, sender = ends("trainer"), ends("rollout")
    about = json.loads((tmp_path / "transport" / "nccl.json").read_text())
    address = about["host"], about["line_port"]
    with socket.create_connection(address, 5.0) as silent, socket.create_connection(address, 5.0) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.settimeout(5.0)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        assert receiver.receive(sender.send(sized(8, 3))).rewards[0] == 3.0
        assert silent.fileno() >= 0


def test_a_trainer_that_is_killed_is_an_error_at_once_and_is_found_again(ends, tmp_path):
    child = start("end = make('trainer'); print('there', flush=True); time.sleep(60)", tmp_path)
    sender = ends("rollout", timeout_s=15.0)
    try:
        assert child.stdout.readline().strip() == "there"
        sender.send(sized(8, 0))
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    began = time.monotonic()
    # What is announced into the void is found out at the next one.
    with pytest.raises(ConnectionError, match="trainer"):
        [(sender.send(sized(8, n)), time.sleep(0.1)) for n in range(1, 9)]
    assert time.monotonic() - began < 5.0
    receiver = ends("trainer")
    assert receiver.receive(sender.send(sized(8, 2))).rewards[0] == 2.0


def test_without_a_trainer_the_first_episode_is_an_error(ends, tmp_path):
    with pytest.raises(TimeoutError, match=r"no trainer opened .*nccl.json within 0.2 s: no address is there"):
        ends("rollout", timeout_s=0.2).send(sized(8, 0))


def test_closed_ends_leave_no_thread_and_no_address(tmp_path):
    before = set(threading.enumerate())
    receiver, sender = (NcclConfig(**FAST).build(role, tmp_path) for role in ("trainer", "rollout"))
    receiver.receive(sender.send(sized(8, 0)))
    sender.close()
    receiver.close()
    receiver.close()
    end = time.monotonic() + 5.0
    while set(threading.enumerate()) - before and time.monotonic() < end:
        time.sleep(0.02)
    assert set(threading.enumerate()) <= before
    assert not (tmp_path / "transport" / "nccl.json").exists()


def test_it_listens_on_loopback_only(ends, tmp_path):
    receiver = ends("trainer")
    about = json.loads((tmp_path / "transport" / "nccl.json").read_text())
    assert about["host"] == "127.0.0.1"
    own = socket.gethostbyname(socket.gethostname())
    if own.startswith("127."):
        pytest.skip("this machine's name leads to loopback")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((own, about["port"]), 2.0)
    assert receiver is not None


def test_a_port_that_is_taken_names_the_keys(ends, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match=r"transport.port=0 .* transport.host"):
            ends("trainer", port=other.getsockname()[1])


def test_one_process_for_both_is_refused():
    class Config:
        has_workers = False

    (problem,) = NcclConfig().preflight(Config, None)
    assert (problem.key, problem.remedy) == (".type", "rollout.workers=2, or transport=memory")
    Config.has_workers = True
    assert not list(NcclConfig(backend="gloo").preflight(Config, None))


class Between:
    """Stands in for NCCL within one process: what one end sends is copied on its stream to where the other receives."""

    def __init__(self):
        self._to, self._gone = queue.SimpleQueue(), queue.SimpleQueue()

    def recv(self, tensors, peer, tag):
        self._to.put(tensors[0])
        torch.cuda.current_stream().wait_event(self._gone.get(timeout=30.0))  # one of the past is no event yet
        return self

    def send(self, tensors, peer, tag):
        self._to.get(timeout=30.0).copy_(tensors[0], non_blocking=True)
        self._gone.put(torch.cuda.current_stream().record_event())
        return self

    def wait(self):
        pass

    def abort(self):
        pass


@pytest.mark.gpu
@pytest.mark.parametrize("pinned_mb", [4096, 0])
def test_what_a_gpu_reads_and_what_is_copied_arrive_and_no_more_memory_is_locked(ends, monkeypatch, pinned_mb):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: pytest -m gpu on a machine that has one")
    between, drawn = Between(), np.random.default_rng(0)
    monkeypatch.setattr("alpagym_runtime.transport.nccl.channel.process_group", lambda *_: between)
    receiver = ends("trainer", backend="nccl", pinned_mb=pinned_mb)
    sender = ends("rollout", backend="nccl", pinned_mb=pinned_mb, copy_threads=2)

    def one(number):
        # In the order of a message: copied, read, copied and large, read, copied and small.
        pictures = [sender.allocate(size) for size in (5_000_000, 3_000_001)]
        for array in pictures:
            array[:] = drawn.integers(0, 256, len(array), np.uint8)
        others = [drawn.integers(0, 256, size, np.uint8) for size in (70, 2_500_000, 900)]
        names = {"a": others[0], "b": pictures[0], "c": others[1], "d": pictures[1], "e": others[2]}
        return replace(example_camera_episode(4, 1), observation=names, rewards=np.full(4, float(number)))

    locked = []
    for number in range(12):
        episode = one(number)
        got = receiver.receive(handle := sender.send(episode))
        assert_same(got, episode, "the episode")
        receiver.discard(handle)
        del got, episode
        locked.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    assert locked[-1] == locked[6]


def test_nccl_on_one_machine_needs_two_gpus():
    class Config:
        has_workers = True
        deploy = DeploySection()

    gpu = Gpu(0, "H200", 143_771 << 20, "580")
    (problem,) = NcclConfig().preflight(Config, SimpleNamespace(gpus=[gpu], gpus_text="1 found"))
    assert (problem.key, problem.remedy) == (".backend", "transport.backend=gloo, or transport=shared_memory")
    assert not list(NcclConfig().preflight(Config, SimpleNamespace(gpus=[gpu, gpu], gpus_text="2 found")))
