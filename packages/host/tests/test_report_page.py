"""The report in a real browser: it loads nothing, says nothing on the console, and fits a phone and paper."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from alpagym_host.cli import main
from alpagym_host.report.page import page
from alpagym_host.report.run_data import load_run
from alpagym_plugins import ConfigError

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
# A training run and a browser: 15 CPU seconds in all, minutes where ten others want the cores.
pytestmark = pytest.mark.timeout(400)
PHONE, DESKTOP = (390, 844), (1280, 900)


class Browser:
    """Chromium's debugging protocol over a pair of pipes; what pages request or log is kept."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._rest, self._number = to, back, b"", 0
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session = ""

    def call(self, method: str, **params: object) -> dict:
        self._number += 1
        wanted = self._number
        message = {"id": wanted, "method": method, "params": params}
        os.write(
            self._to, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while (answer := self._next()).get("id") != wanted:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, page: Path, size: tuple[int, int]) -> None:
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 500}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self._loaded = False
        self.call("Page.navigate", url=page.absolute().as_uri())
        while not self._loaded:
            self._next()

    def value(self, expression: str) -> object:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _next(self) -> dict:
        while b"\0" not in self._rest:
            chunk = os.read(self._back, 1 << 20)
            assert chunk, "the browser has gone"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))
        elif method == "Page.loadEventFired":
            self._loaded = True
        return message


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    theirs, to = os.pipe()
    back, theirs_back = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    command = [CHROMIUM, *options, "--mute-audio", f"--user-data-dir={folder / 'profile'}"]
    # It reads descriptor 3 and writes 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{theirs_back}', "bash", *command]
    process = subprocess.Popen(
        shell, pass_fds=(theirs, theirs_back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs)
    os.close(theirs_back)
    try:
        yield Browser(to, back)
    finally:
        os.close(to)
        os.close(back)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def pictures(page: Path, folder: Path) -> dict[str, object]:
    """Screenshots and a PDF of a page, and what the browser found."""
    found: dict[str, object] = {}
    with browser(folder) as tab:
        for name, size in (("desktop", DESKTOP), ("phone", PHONE)):
            tab.open(page, size)
            width, wanted = tab.value("[document.documentElement.scrollWidth, innerWidth]")
            found[name] = (width, wanted)
            found[f"{name} videos"] = tab.value(
                "Promise.all([...document.querySelectorAll('video')].map(v => v.play().then(() => "
                "new Promise(done => v.requestVideoFrameCallback(() => done([v.videoWidth, v.duration]))))))"
            )
            shot = tab.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
            (folder / f"{name}.png").write_bytes(base64.b64decode(shot))
        pdf = tab.call("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)["data"]
        (folder / "print.pdf").write_bytes(base64.b64decode(pdf))
        found |= {"requests": tab.requests, "complaints": tab.complaints}
    return found


# ---------------------------------------------------------------- runs to report


def alpagym(*arguments: object) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["alpagym", *map(str, arguments)])
        try:
            main()
        except SystemExit as leave:
            return int(leave.code or 0)
    return 0


SMALL = (
    *("simulator=toy", "policy=waypoint_actors", "policy.hidden=16", "policy.actors=1", "dataset.train_scenes=4"),
    *(
        "dataset.val_scenes=2",
        "dataset.test_scenes=6",
        "expected_valid_steps=20",
        "rollout.slots=8",
        "rollout.group_size=3",
    ),
    *("rollout.scenes_per_step=2", "trainer.updates=3", "trainer.minibatch=32", "trainer.warm_start.epochs=3"),
    *("trainer.warm_start.drives_per_scene=1", "trainer.warm_start.batch=32", "evaluation.bootstrap=100"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A trained run, and an evaluation with hostile text in its config, another seed, and a simulator that fails."""
    folder = tmp_path_factory.mktemp("runs")
    hostile = (
        "policy=constant_speed",
        "simulator=toy",
        "dataset.test_scenes=6",
        "expected_valid_steps=20",
        "run.seed=2",
    )
    # The fifth of six first attempts fails; the next would be the tenth, after the three that are filmed.
    hostile += ("simulator.fail_every=5", "rollout.slots=8", "store.path='<script>alert(1)</script>'")
    assert alpagym("train", *SMALL, "--directory", folder / "a") == 0
    assert alpagym("evaluate", *hostile, "--directory", folder / "b") == 0
    return folder / "a", folder / "b"


@pytest.fixture(scope="module")
def pages(runs):
    return [(run / "report.html").read_text() for run in runs]


def test_a_run_writes_its_report_when_it_ends(runs, capsys):
    text = (runs[0] / "report.html").read_text()
    for part in (
        "Signs",
        "Results",
        "By kind of scene",
        "Best, median and worst drive",
        "Training",
        "Config and receipt",
    ):
        assert f">{part}<" in text
    final = json.loads((runs[0] / "summary.json").read_text())["evaluations"]["final"]
    assert f"<b>{final['driving_score']['mean']:.3f}</b>" in text
    assert text.count("<video ") == 3
    assert len(text) < 2_000_000


def test_two_runs_stand_side_by_side(runs):
    assert alpagym("report", *runs) == 0
    text = (runs[0] / "report_against_b.html").read_text()
    assert "B against A, scene by scene" in text
    assert "6 drives in 6 scenes" in text
    assert text.count("<video ") == 6
    assert "+  seed: 2" in text  # what differs


def test_failures_of_the_infrastructure_stand_apart(pages):
    assert "None: no drive was void" in pages[0]
    text = pages[1]
    assert "None: no drive was void" not in text
    assert '<td data-name="retried">1</td>' in text


def test_text_of_a_config_is_never_markup(pages):
    assert "alert(1)" in pages[1]
    assert "<script>alert(1)" not in pages[1]


def test_no_secret_of_the_environment_is_shown(runs, tmp_path, monkeypatch):
    shutil.copytree(runs[1], tmp_path / "run")
    config = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(config.replace("name: run", "name: hf_abcdefgh"))
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    text = page([load_run(tmp_path / "run")])
    assert "name: ***" in text
    assert "hf_abcdefgh" not in text


def test_a_page_is_a_function_of_its_run(runs, pages):
    assert page([load_run(runs[1])]) == pages[1]


def test_numbers_come_from_the_rows_and_not_from_the_summary(runs, tmp_path):
    shutil.copytree(runs[1], tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    wanted = summary["evaluations"]["final"]["driving_score"]["mean"]
    summary["evaluations"]["final"]["driving_score"]["mean"] = 0.123
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    assert load_run(tmp_path / "run").evaluations["final"]["driving_score"]["mean"] == wanted


def test_a_run_that_has_not_ended_has_a_report_too(runs, tmp_path):
    shutil.copytree(runs[0], tmp_path / "run")
    for name in ("summary.json", "per_scene.parquet"):
        (tmp_path / "run" / name).unlink()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    (tmp_path / "run" / "metrics.jsonl").write_text(lines[:-20])  # in the middle of a line
    text = page([load_run(tmp_path / "run")])
    assert "not ended" in text
    assert "Nothing was evaluated yet." not in text  # the training has signs


def test_workers_restarts_and_the_age_of_weights_are_shown(runs, pages, tmp_path):
    shutil.copytree(runs[0], tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    summary["workers"] = {"count": 4, "restarts": 1, "lost": 7, "cpu_s": 1.0, "peak_rss_bytes": 1}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    told = {"workers/alive": 4.0, "workers/restarts": 1.0, "workers/lost": 7.0}
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row | told) + "\n" for row in rows))
    text = page([load_run(tmp_path / "run")])
    assert "4, 1 restarts, 7 episodes lost and driven again" in text
    assert "Age of the weights that drove" in text
    assert "Restarts and lost episodes since the start." in text
    assert "Age of the weights that drove" not in pages[0]


def test_what_is_no_run_or_has_nothing_is_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match="is no run directory"):
        load_run(tmp_path)
    (tmp_path / "config.yaml").write_text("run: {}")
    with pytest.raises(ConfigError, match="has nothing to report yet"):
        load_run(tmp_path)
    with pytest.raises(ConfigError, match="one run or two side by side, got 3"):
        page([load_run(runs[0])] * 3)


# ---------------------------------------------------------------- in a browser


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize("pair", [False, True], ids=["one run", "two runs"])
def test_the_page_works_offline_on_a_desk_a_phone_and_paper(runs, pair, tmp_path):
    shutil.copytree(runs[0], tmp_path / "a")
    shutil.copytree(runs[1], tmp_path / "b")
    assert alpagym("report", tmp_path / "a", *([tmp_path / "b"] if pair else []), "-o", tmp_path / "page.html") == 0
    found = pictures(tmp_path / "page.html", tmp_path)
    assert found["complaints"] == []
    assert {url.partition(":")[0] for url in found["requests"]} == {"file", "data"}
    assert {url for url in found["requests"] if url.startswith("file")} == {(tmp_path / "page.html").as_uri()}
    for name in ("desktop", "phone"):
        width, window = found[name]
        assert width <= window, f"{name}: {width} px wide in {window} px"
        assert len(found[f"{name} videos"]) == (6 if pair else 3)
        for pixels, seconds in found[f"{name} videos"]:
            assert pixels == 400
            assert seconds > 0.5
    assert (tmp_path / "print.pdf").stat().st_size > 20_000
