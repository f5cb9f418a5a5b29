import os
import subprocess
import threading
from pathlib import Path

import pytest

from alpagym_host import doctor_machine
from alpagym_host.alpasim import checkout as checkouts
from alpagym_host.alpasim import scenes
from alpagym_host.alpasim.checkout import cached, present, resolve
from alpagym_host.compose import compose
from alpagym_host.doctor_types import Context
from alpagym_host.preflight import preflight
from alpagym_plugins import ConfigError
from alpagym_runtime.deploy_config import AlpasimSection
from alpagym_runtime.machine import Machine


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def upstream(checkout):
    """The stand-in checkout as a repository with two commits; the first one is tagged v1."""
    git(checkout, "init", "-q")
    git(checkout, "config", "uploadpack.allowFilter", "true")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    git(checkout, "tag", "v1")
    (checkout / "second").write_text("")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "second")
    return checkout


@pytest.fixture
def section(upstream, alpasim_machine, tmp_path):
    return AlpasimSection(repo_url=upstream.as_uri(), repo_ref="main", checkout_cache=str(tmp_path / "the cache"))


class Tools:
    """Runs git and uv, and remembers which."""

    def __init__(self):
        self.ran = []

    def __call__(self, name, argv, folder, log):
        self.ran.append(" ".join(argv[:2]))
        with log.open("ab") as file:
            return subprocess.run(argv, cwd=folder, stdout=file, stderr=file, env=checkouts.environment()).returncode


def silent(text):
    pass


@pytest.mark.parametrize("kind", ["branch", "tag", "commit", "short commit"])
def test_a_pinned_clone_holds_that_commit_and_its_environment(section, upstream, kind):
    first, second = git(upstream, "rev-parse", "v1"), git(upstream, "rev-parse", "main")
    section.repo_ref, commit = {
        "branch": ("main", second),
        "tag": ("v1", first),
        "commit": (second, second),
        "short commit": (first[:7], first),
    }[kind]
    told = []
    found = resolve(section, Tools(), told.append)
    assert found.path == cached(section)
    assert found.commit == commit
    assert (found.path / "second").exists() == (commit == second)
    assert found.python.is_file()
    assert (found.path / ".venv/uv-words").read_text().endswith("--frozen --extra wizard --extra grpc")
    if kind != "short commit":
        assert git(found.path, "rev-list", "--count", "HEAD") == "1"  # shallow
    assert len(told) == 2
    assert [path.name for path in found.path.parent.glob(".partial-*")] == []


def test_what_is_in_the_cache_needs_no_network_and_no_tools(section, upstream):
    first = resolve(section, Tools(), silent)
    upstream.rename(upstream.with_name("gone"))
    tools = Tools()
    assert resolve(section, tools, silent) == first
    assert tools.ran == []
    assert present(section) == first.path


def test_doctor_finds_the_cached_clone(section):
    config = compose(["simulator=alpasim", "dataset.scene_ids=[clip-a]"])
    config.alpasim = section

    def said():
        (finding,) = doctor_machine.alpasim(Context(config, Machine(), 1.0))
        return finding.text

    assert said().endswith(f"would be cloned to {cached(section)}")
    found = resolve(section, Tools(), silent)
    assert said() == f"{found.path} at {found.commit[:7]}"


def test_a_clone_that_fails_says_why_and_leaves_nothing(section):
    section.repo_ref = "no-such-branch"
    with pytest.raises(ConfigError, match=r"alpasim.repo_ref: cannot clone .*couldn't find remote ref no-such-branch"):
        resolve(section, Tools(), silent)
    assert not cached(section).exists()
    assert present(section) is None


def test_a_repository_that_is_no_alpasim_is_said(section, upstream):
    git(upstream, "rm", "-q", "uv.lock")
    git(upstream, "commit", "-qm", "third")
    with pytest.raises(ConfigError, match=r"is no AlpaSim: it has no uv.lock"):
        resolve(section, Tools(), silent)


def test_an_environment_that_cannot_be_built_says_why_and_is_tried_again(section, alpasim_machine):
    uv = alpasim_machine[0] / "uv"
    works = uv.read_text()
    uv.write_text("#!/bin/sh\necho 'error: no space left on device' >&2\nexit 2\n")
    with pytest.raises(ConfigError, match="cannot build AlpaSim's environment: error: no space left on device"):
        resolve(section, Tools(), silent)
    uv.write_text(works)
    tools = Tools()
    resolve(section, tools, silent)
    assert tools.ran == ["uv sync"]  # the clone was whole


def test_of_two_at_once_one_makes_the_clone(section):
    tools, found = Tools(), []
    threads = [threading.Thread(target=lambda: found.append(resolve(section, tools, silent))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert tools.ran.count("git fetch") == 1
    assert tools.ran.count("uv sync") == 1


def test_a_checkout_of_the_users_is_taken_as_it_is(checkout, alpasim_machine, tmp_path):
    section = AlpasimSection(repo_path=str(checkout), checkout_cache=str(tmp_path / "cache"))
    tools = Tools()
    found = resolve(section, tools, silent)
    assert (found.path, found.commit) == (checkout, "unknown")
    assert tools.ran == ["uv sync"]
    assert resolve(section, tools, silent) == found
    assert tools.ran == ["uv sync"]


def test_a_folder_that_is_no_checkout_says_what_it_lacks(tmp_path):
    with pytest.raises(ConfigError, match="alpasim.repo_path: .* is no checkout of AlpaSim: it lacks pyproject.toml"):
        resolve(AlpasimSection(repo_path=str(tmp_path)), Tools(), silent)


def test_our_environment_is_hidden_from_its_tools(monkeypatch):
    for name in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PYTHONPATH"):
        monkeypatch.setenv(name, "/ours")
    assert not {"VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PYTHONPATH"} & set(checkouts.environment())
    assert checkouts.environment()["PATH"] == os.environ["PATH"]


# ---------------------------------------------------------------- scenes


def run(checkout, *words):
    return compose(["simulator=alpasim", f"alpasim.repo_path={checkout}", *words])


def test_scenes_and_suites_that_the_tables_lack_are_found_before_anything_starts(checkout, alpasim_machine):
    for words, key, said in (
        (
            ["dataset.scene_ids=[clip-a,clip-x,clip-y]"],
            "dataset.scene_ids",
            "not 'clip-x' and 1 more of the 3 asked for",
        ),
        (["dataset.test_suite_id=public_2606"], "dataset.test_suite_id", "did you mean 'public_2604'"),
        (
            ["dataset.scene_ids=[clip-a]", "alpasim.wizard_args.topology=5gpu"],
            "alpasim.wizard_args.topology",
            "there is no '5gpu'",
        ),
    ):
        problems = {problem.key: problem.message for problem in preflight(run(checkout, *words), "train", Machine())}
        assert said in problems[key]


def test_a_suite_is_its_scenes(checkout):
    rows = scenes.chosen(run(checkout, "dataset.test_suite_id=public_2604"), checkout)
    assert [row["scene_id"] for row in rows] == ["clip-a"]


def test_of_several_versions_the_newest_is_meant(checkout):
    with (checkout / "data/scenes/sim_scenes.csv").open("a") as file:
        file.write("uuid-new,clip-a,26.05,p,2026-06-01,local,main\n")
    rows = scenes.chosen(run(checkout, "dataset.scene_ids=[clip-a]"), checkout)
    assert [row["uuid"] for row in rows] == ["uuid-new"]


def test_scenes_of_the_users_own_are_not_looked_up(checkout):
    words = ["dataset.scene_ids=[mine]", "alpasim.wizard_args.extra_overrides=['scenes.local_usdz_dir=/data']"]
    assert scenes.chosen(run(checkout, *words), checkout) == []


def test_a_pointer_of_git_lfs_is_told_from_a_table(checkout):
    (checkout / "data/scenes/sim_scenes.csv").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    with pytest.raises(ConfigError, match="is a pointer of Git LFS: git lfs install"):
        scenes.chosen(run(checkout, "dataset.scene_ids=[clip-a]"), checkout)


def row(uuid, repository="huggingface"):
    return {"uuid": uuid, "artifact_repository": repository}


def test_only_what_is_not_there_yet_is_fetched(tmp_path):
    cache = tmp_path / "data/nre-artifacts/all-usdzs"
    cache.mkdir(parents=True)
    (cache / "there.usdz").write_text("")
    rows = [row("there"), row("missing"), row("mine", "local")]
    assert scenes.to_fetch(rows, tmp_path) == [row("missing")]


def test_access_is_asked_for_only_where_something_is_fetched(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    scenes.require_access([])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    scenes.require_access([row("a")])


def test_without_a_token_gated_scenes_are_refused_before_anything_starts(monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"2 scenes would be fetched from Hugging Face, and: .* no token; hf auth login"
    ):
        scenes.require_access([row("a"), row("b")])


def test_the_default_cache_is_below_the_users_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cached(AlpasimSection()).parent == Path("/somewhere/alpagym/alpasim")
