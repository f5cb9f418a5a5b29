import io

from rich.console import Console

from alpagym_host.progress import LineReporter, make_reporter, print_summary, summary_rows


def evaluation(mean, low, high, at_fault=0.0):
    return {
        "driving_score": {"mean": mean, "low": low, "high": high, "n": 24},
        "rates": {"collision": 0.25, "collision_at_fault": at_fault, "offroad": 0.125, "goal": 0.5},
        "by_family": {"lead": {"driving_score": mean, "n": 20}, "cross": {"driving_score": 0.5, "n": 4}},
    }


SUMMARY = {
    "status": "completed",
    "evaluations": {
        "start": evaluation(0.12345, 0.1, 0.15),
        "warm_start": evaluation(0.5, 0.4567, 0.55, 1 / 3),
        "final": evaluation(0.8765, 0.8, 0.9),
    },
    "paired_gain": {"mean": 0.3765, "low": 0.3, "high": 0.45},
}


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_lines_are_a_start_an_end_and_one_each_ten_seconds():
    clock, lines = Clock(), []
    with LineReporter(lines.append, every_s=10, clock=clock) as reporter:
        reporter.stage("imitation", 100, "updates")
        for _ in range(100):
            clock.now_s += 0.25
            reporter.advance(loss=0.5)
        reporter.stage("grpo", 10, "updates")
        reporter.advance(2, reward=0.25)
        reporter.note("an episode failed")
    assert lines == [
        "imitation: 100 updates\n",
        "imitation: 40/100 updates, 10 s | loss 0.5\n",
        "imitation: 80/100 updates, 20 s | loss 0.5\n",
        "imitation: done, 100/100 updates, 25 s | loss 0.5\n",
        "grpo: 10 updates\n",
        "an episode failed\n",
        "grpo: stopped, 2/10 updates, 0 s | reward 0.25\n",
    ]


def test_not_a_terminal_gets_no_control_characters():
    file = io.StringIO()
    with make_reporter(Console(file=file)) as reporter:
        reporter.stage("grpo", 2, "updates")
        reporter.advance(2)
    assert file.getvalue().splitlines() == ["grpo: 2 updates", "grpo: done, 2/2 updates, 0 s"]


def test_a_terminal_gets_a_bar():
    file = io.StringIO()
    with make_reporter(Console(file=file, force_terminal=True, width=120)) as reporter:
        reporter.stage("grpo [1]", 2, "updates")
        reporter.advance(2, reward=0.25)
        reporter.note("[red] stays as it is")
    assert "grpo [1]" in file.getvalue()
    assert "reward 0.25" in file.getvalue()
    assert "[red] stays as it is" in file.getvalue()


def test_the_table_shows_the_numbers_of_the_file_rounded():
    assert summary_rows(SUMMARY) == [
        ["", "start", "warm start", "final"],
        ["driving score", "0.123 [0.100, 0.150]", "0.500 [0.457, 0.550]", "0.876 [0.800, 0.900]"],
        ["collision at fault", "0.0 %", "33.3 %", "0.0 %"],
        ["collision", "25.0 %", "25.0 %", "25.0 %"],
        ["off-road", "12.5 %", "12.5 %", "12.5 %"],
        ["goal", "50.0 %", "50.0 %", "50.0 %"],
        ["  cross", "0.500", "0.500", "0.500"],
        ["  lead", "0.123", "0.500", "0.876"],
        ["scenes × seeds", "24", "24", "24"],
    ]


def test_the_table_is_whole_in_a_narrow_log():
    file = io.StringIO()
    print_summary(Console(file=file, width=20), SUMMARY)
    assert "0.123 [0.100, 0.150]   0.500 [0.457, 0.550]   0.876 [0.800, 0.900]" in file.getvalue()
    assert "gain over the warm start, scene by scene: +0.377 [+0.300, +0.450]" in file.getvalue()


def test_a_run_without_evaluations_and_a_missing_mean_are_no_errors():
    file = io.StringIO()
    print_summary(Console(file=file), {"status": "stopped", "evaluations": {}})
    assert file.getvalue() == ""
    empty = {"driving_score": {"mean": None, "low": None, "high": None, "n": 0}}
    assert summary_rows({"evaluations": {"final": empty}})[1] == ["driving score", "–"]
