from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from alpagym_runtime.run_config import Plugin
from alpagym_runtime.telemetry.config import ConsoleConfig, JsonlConfig, TensorboardConfig
from alpagym_runtime.telemetry.loggers import Loggers, Row, build_loggers


class Notes:
    def __init__(self):
        self.notes, self.shown = [], []

    def stage(self, name, total, unit): ...

    def advance(self, amount=1, **numbers):
        self.shown.append((amount, numbers))

    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def run(tmp_path):
    return SimpleNamespace(directory=tmp_path, reporter=Notes())


class Failing:
    essential = False

    def log(self, row):
        raise RuntimeError("boom")

    def rewind(self, rows, total_steps): ...

    def close(self): ...


def rows(count, stage="grpo"):
    return [Row(stage, k, k, {"loss": k / 2, "reward": float("nan")}) for k in range(1, count + 1)]


def test_a_row_is_a_line_of_json_and_nan_is_null(run):
    logger = JsonlConfig().build(run)
    for row in rows(2):
        logger.log(row)
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"stage": "grpo", "step": k, "loss": k / 2, "reward": None} for k in (1, 2)]


def test_a_rewound_file_keeps_its_first_rows(run):
    logger = JsonlConfig().build(run)
    for row in rows(3):
        logger.log(row)
    logger.rewind(2, 2)
    logger.log(Row("grpo", 9, 9, {}))
    steps = [json.loads(line)["step"] for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 9]


def test_a_logger_that_fails_is_named_once_and_the_others_go_on(run):
    loggers = Loggers({"bad": Failing(), "file": JsonlConfig().build(run)}, run.reporter.note)
    for row in rows(3):
        loggers.log(row)
    assert run.reporter.notes == ["logger bad failed and is left out from now on: RuntimeError: boom"]
    assert len((run.directory / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_logger_that_fails_is_closed(run):
    closed = []

    class Held(Failing):
        def close(self):
            closed.append(True)

    loggers = Loggers({"bad": Held()}, run.reporter.note)
    for row in rows(2):
        loggers.log(row)
    loggers.close()
    assert closed == [True]


def test_the_file_that_resume_reads_may_stop_a_run(run):
    loggers = Loggers({"file": JsonlConfig().build(run)}, run.reporter.note)
    (run.directory / "metrics.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        loggers.log(rows(1)[0])


def test_the_console_shows_chosen_numbers_and_a_line_every_few_rows(run):
    logger = ConsoleConfig(names=["loss"], every_rows=2).build(run)
    for row in rows(4):
        logger.log(row)
    logger.log(Row("evaluate/final", 4, 4, {"driving_score": 1.0}))
    assert run.reporter.shown == [(0, {"loss": k / 2}) for k in (1, 2, 3, 4)]
    assert run.reporter.notes == ["grpo 2: loss 1", "grpo 4: loss 2"]


def events_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return read


def test_tensorboard_reads_the_curves(run):
    logger = TensorboardConfig().build(run)
    for row in rows(3):
        logger.log(row)
    logger.close()
    read = events_of(run.directory / "tensorboard")
    assert set(read.Tags()["scalars"]) == {"grpo/loss", "grpo/reward"}
    assert [(e.step, e.value) for e in read.Scalars("grpo/loss")] == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_tensorboard_hides_what_a_resumed_run_makes_again(run):
    first = TensorboardConfig().build(run)
    for row in rows(3):
        first.log(row)
    first.close()
    # Another process goes on from the checkpoint of step 1.
    second = TensorboardConfig().build(run)
    second.rewind(1, 1)
    second.log(Row("grpo", 2, 2, {"loss": 7.0}))
    second.close()
    # Files are read in the order of their names, which begin with the second they were made in.
    folder = run.directory / "tensorboard"
    first_file, second_file = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    first_file.rename(folder / "events.out.tfevents.0000000001.a.1.0")
    second_file.rename(folder / "events.out.tfevents.0000000002.a.1.0")
    assert [(e.step, e.value) for e in events_of(folder).Scalars("grpo/loss")] == [(1, 0.5), (2, 7.0)]


def test_a_logger_that_cannot_be_built_closes_those_before_it(run):
    closed = []

    class Closing(Failing):
        def close(self):
            closed.append(True)

    def build(run):
        raise ValueError("refused")

    good, bad = SimpleNamespace(build=lambda run: Closing()), SimpleNamespace(build=build)
    with pytest.raises(ValueError, match="refused"):
        build_loggers({"good": Plugin("a", good), "bad": Plugin("b", bad)}, run)
    assert closed == [True]
