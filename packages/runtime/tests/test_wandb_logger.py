"""W&B against a server of ours: what it refuses, when it is away, and when it goes away in the middle of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from alpagym_runtime.errors import ConfigError
from alpagym_runtime.machine import Machine
from alpagym_runtime.run_config import from_mapping
from alpagym_runtime.telemetry.config import WandbConfig
from alpagym_runtime.trainers.run import Run

pytest.importorskip("wandb", reason="needs wandb: uv sync --extra wandb")

KEY = "5ecretmarker" + "0123456789" * 3  # as long as a key is
NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens
VIEWER = {"username": "me", "entity": "me", "teams": {"edges": [{"node": {"name": "team"}}]}}
BUCKET = {"id": "b", "name": "n", "displayName": "n", "description": None, "config": "{}", "sweepName": None}


class Server:
    """Speaks as much of W&B's API as the client asks for; `status` is what it answers."""

    def __init__(self, viewer=200, upsert=200):
        outer = self
        self.requests: list[str] = []
        self.status = {"viewer": viewer, "upsert": upsert}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                text = body.decode(errors="replace")
                outer.requests.append(f"{self.path} {text[:200]}")
                kind = "upsert" if "UpsertBucket" in text else "viewer"
                status = outer.status[kind] if self.path == "/graphql" else 200
                answer = {"data": {"viewer": VIEWER, "serverInfo": None}}
                if status != 200:
                    answer = {"errors": [{"message": "permission denied", "path": ["upsertBucket"]}]}
                elif kind == "upsert":
                    project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}}
                    bucket = BUCKET | {"project": project, "historyLineCount": 0}
                    answer = {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
                out = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(out)))
                self.end_headers()
                self.wfile.write(out)

            do_GET = do_PUT = do_POST

            def log_message(self, *_): ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self):
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


@pytest.fixture
def serve(monkeypatch):
    started = []
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)

    def serve(**status):
        started.append(Server(**status))
        return started[-1]

    yield serve
    for server in started:
        server.close()


def configure(**wandb):
    """A run of two updates in the toy world."""
    return from_mapping(
        {
            "run": {},
            "simulator": {"type": "toy"},
            "dataset": {"train_scenes": 2, "val_scenes": 1, "test_scenes": 1},
            "expected_valid_steps": 4,
            "policy": {"type": "waypoint", "hidden": 16, "actors": 1},
            "reward": {"terms": {"progress": {"type": "progress", "scale": 1.0}}},
            "rollout": {"slots": 4, "group_size": 2, "scenes_per_step": 1},
            "transport": {"type": "memory"},
            "trainer": {"type": "grpo", "updates": 2, "minibatch": 8, "warm_start": None},
            "evaluation": {"bootstrap": 100},
            "logging": {"loggers": {"jsonl": {"type": "jsonl"}, "wandb": {"type": "wandb"} | wandb}},
        }
    )


def stages(directory):
    """What metrics.jsonl has rows of, in order."""
    return [json.loads(line)["stage"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def problems(config):
    section = config.logging.loggers["wandb"].config
    return [problem.under("logging.loggers.wandb") for problem in section.preflight(config, Machine())]


def test_a_key_that_is_taken_is_no_problem(serve):
    server = serve()
    assert problems(configure(mode="online", base_url=server.url, entity="team")) == []
    assert len(server.requests) == 1


def test_403_names_entity_project_and_the_keys_and_never_the_key(serve):
    config = configure(mode="online", base_url=serve(viewer=403).url, entity="foreign", project="theirs")
    (problem,) = problems(config)
    assert problem.key == "logging.loggers.wandb.entity"
    assert "403" in problem.message
    assert "entity foreign, project 'theirs'" in problem.message
    assert "mode=offline" in problem.remedy
    assert KEY not in str(problem)


def test_401_and_no_key_and_nobody_there_have_their_own_words(serve, monkeypatch, tmp_path):
    (problem,) = problems(configure(mode="online", base_url=serve(viewer=401).url))
    assert (problem.message[:4], problem.remedy) == ("401:", "wandb login --relogin")
    (problem,) = problems(configure(mode="online", base_url=NOWHERE))
    assert "cannot be reached" in problem.message
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "absent"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (problem,) = problems(configure(mode="online", base_url=NOWHERE))
    assert problem.message == f"no key for {NOWHERE}"


def test_an_entity_that_the_key_does_not_belong_to_is_named_with_those_it_does(serve):
    (problem,) = problems(configure(mode="online", base_url=serve().url, entity="foreign"))
    assert "the key belongs to me, team" in problem.message


def test_the_key_of_wandb_login_is_found(serve, monkeypatch, tmp_path):
    server = serve()
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1\n  login user\n  password {KEY}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert problems(configure(mode="online", base_url=server.url)) == []


def test_a_refusal_at_the_start_stops_the_run_before_its_simulator_and_leaves_nothing(serve, tmp_path):
    config = configure(mode="online", base_url=serve(upsert=403).url, project="theirs", timeout_s=5)
    with pytest.raises(ConfigError, match="W&B refused the run: permission denied .*project 'theirs'") as caught:
        Run(config, tmp_path)
    assert KEY not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_offline_needs_no_key_and_no_network_and_leaves_files(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", NOWHERE)
    begun = time.perf_counter()
    run = Run(configure(mode="offline"), tmp_path)
    # Its process starts beside the run, which does not wait for it.
    assert time.perf_counter() - begun < 5
    assert run.train().completed
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert kept.stat().st_size > 0
    assert stages(tmp_path).count("grpo") == 2


def test_a_server_that_goes_away_in_mid_run_costs_one_warning(serve, tmp_path):
    server = serve()
    notes = []

    class Reporter:
        def stage(self, name, total, unit):
            if name == "grpo":
                server.close()

        def advance(self, amount=1, **numbers): ...

        def note(self, text):
            notes.append(text)

    config = configure(mode="online", base_url=server.url, timeout_s=2)
    assert Run(config, tmp_path, Reporter()).train().completed
    (warning,) = [text for text in notes if "wandb" in text]
    assert warning.startswith("logger wandb failed and is left out from now on")
    found = stages(tmp_path)
    assert found.count("grpo") == 2
    assert found[-1].startswith("evaluate/")  # the last rows came long after the server had gone


def test_disabled_by_the_environment_starts_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    config = configure(mode="online", base_url=NOWHERE)
    assert problems(config) == []
    assert Run(config, tmp_path).train().completed
    assert not (tmp_path / "wandb").exists()


def test_a_run_without_it_does_not_import_wandb():
    code = "import sys\nimport alpagym_runtime.trainers.run\nfrom alpagym_runtime.telemetry import config, loggers\n"
    code += "config.ConsoleConfig, config.WandbConfig()\nassert 'wandb' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr


def test_wrong_modes_are_named():
    with pytest.raises(ConfigError, match="mode: must be one of 'offline', 'online', 'disabled'"):
        WandbConfig(mode="dryrun")
