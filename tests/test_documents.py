"""What the documents say holds: commands and links exist, the published recipes are covered, pages and skills run.

The checks themselves are `scripts/check_documents.py`, which an author runs too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from alpagym_host.compose import compose
from alpagym_plugins import ConfigError

ROOT = Path(__file__).parents[1]
SEEDS = ROOT / ".." / "shared" / "seeds"

_spec = importlib.util.spec_from_file_location("check_documents", ROOT / "scripts/check_documents.py")
documents = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = documents
_spec.loader.exec_module(documents)

PAGES = [str(page.relative_to(ROOT)) for page in documents.pages()]
HERE = "tests/test_documents.py"


# ---------------------------------------------------------------- every page


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_links_of_a_page(page):
    problems = documents.link_problems(ROOT / page)
    for block in documents.blocks(ROOT / page):
        problems += [f"{block.place}: {text}" for text in documents.block_problems(block)]
    assert problems == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("alpagym trainx", "no command 'trainx'"),
        ("alpagym pai checkx DIR", "no command 'checkx'"),
        ("uv run alpagym train rollout.slot=8 …", "did you mean rollout.slots"),
        ("alpagym train policy=waypiont", "waypiont"),
        ("alpagym train run.seed=1,x --multirun", "run.seed"),
        ("alpagym report RUN --jsno", "--jsno"),
        ("python -m alpagym_host.cli rollout.slot=8", "did you mean rollout.slots"),
        ("python benchmarks/worldx.py", "is not there"),
        ("python benchmarks/nccl_transport.py --gigabytes 8", "no option --gigabytes"),
        ("torchrun --nproc-per-node 2 -m alpagym_host.launch.torchrn RUN_DIR", "no module"),
        ("pytest tests/test_gone.py", "no test here"),
        ("uv sync --extra colour", "no extra colour"),
        (".ci/run lnit", "no stage lnit"),
    ],
)
def test_a_wrong_command_is_found(command, problem):
    assert problem in documents.command_problem(command)


@pytest.mark.parametrize(
    "command",
    [
        "alpagym logs RUN_DIR [NAME] [-f]",
        "alpagym train simulator=… trainer.minibatch=$((512 * n))   # a comment",
        "uv run --with highway-env python benchmarks/world.py --agents 8 16",
        "alpagym pai check DIR --camera a b",
        "pytest -m 'slow or not slow' tests/test_torchrun.py",
    ],
)
def test_a_right_command_passes(command):
    assert documents.command_problem(*documents._commands(command)) is None


@pytest.mark.parametrize(
    ("marker", "problem"),
    [
        ("", "no line above it"),
        ("tested by: tests/test_gone.py", "no file of tests"),
        ("tested by: test_documents.py::test_gone", "has no test_gone"),
        ("last run: yesterday, here", "must begin with a date"),
        ("last run: 2026-11-30", "does not say where"),
        ("tested by: test_documents.py::test_a_wrong_command_is_found", None),
        ("last run: 2026-11-30, 2 cores", None),
        ("never run: needs Slurm", None),
    ],
)
def test_a_block_says_how_it_was_run(marker, problem, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        f"Text.\n\n<!-- {marker} -->\n```bash\nalpagym doctor\n```\n" if marker else "```\nalpagym doctor\n```\n"
    )
    (block,) = documents.blocks(page)
    found = documents.marker_problem(block)
    assert found is None if problem is None else problem in found


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# One, two\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#one-two) [b](gone.md) [c](other.md#three) `[d](x)` [e](https://x.org)\n")
    assert documents.link_problems(page) == ["gone.md is not there", "other.md#three: other.md has no such heading"]


# ---------------------------------------------------------------- docs/seed-commands.md


def rows(*statuses):
    return [row for row in documents.seed_rows() if row.status in statuses]


def test_every_row_has_a_status_and_what_that_asks_for():
    for row in documents.seed_rows():
        assert row.status in documents.STATUSES, row
        assert row.ours, row
        tests = re.findall(r"`([^`]+)`", row.seen_by)
        assert bool(tests) == (row.status == "works") or row.status == "untried", row
        for name in tests:
            why = None if name == ".ci/run" else documents.test_problem(name)
            assert why is None, f"line {row.line}: {why}"


def test_what_rows_name_is_there():
    codes = [(row.line, code) for row in rows("works", "untried") for code in row.codes]
    # Overrides alone are composed together: one by one that takes ten times as long.
    alone = [(line, code) for line, code in codes if documents.is_override(code)]
    assert len(alone) > 50
    together = documents.command_problem(shlex.join(["alpagym", "train", *(w for _, c in alone for w in c.split())]))
    for line, code in codes if together is not None else [pair for pair in codes if pair not in alone]:
        assert (why := documents.code_problem(code)) is None, f"line {line}: {why}"
    assert together is None


def test_what_rows_wait_for():
    waiting = rows("not yet")
    found = [row for row in waiting if row.codes and not any(map(documents.code_problem, row.codes))]
    lines = ", ".join(str(row.line) for row in found) or "none"
    assert all(row.codes for row in waiting)
    if waiting:
        pytest.skip(f"{len(waiting)} rows of docs/seed-commands.md wait; there by name already, run and flip: {lines}")


def named_in_the_seeds() -> set[str]:
    """Programs with their scripts, options, variables, keys and files that the three documents name."""
    text = "\n".join(path.read_text("utf-8") for path in sorted(SEEDS.glob("*.txt")))
    found = set(re.findall(r"(?<![\w.])\$?\{?\b([A-Z][A-Z0-9]*_[A-Z0-9_]+)\b", text))
    files = re.findall(r"[\w/]*\w\.(?:py|toml|yaml|json|parquet|pth|log|safetensors|ipynb|sh)\b", text)
    found |= {file.rpartition("/")[2] for file in files}
    found |= set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+(?:_[a-z]+)*", text))
    sections = "train|policy|rollout|custom|logging|trainer|data|model|evaluate|paths|wandb|reward"
    found |= set(re.findall(rf"(?<![\w/.@-])(?:{sections})\.[a-z_0-9{{}},.]*[a-z_0-9]", text))
    found |= {"".join(pair) for pair in re.findall(r"(\[[a-z_.]+\])(\.[a-z_0-9]+)", text)}
    programs = (
        "curl|git clone|uv venv|uv sync|uv run|uv pip \\w+|torchrun|cosmos-rl|hf \\w+|huggingface-cli \\w+|npx \\w+"
    )
    found |= set(re.findall(rf"(?m)(?:^|`)(?:{programs})\b", text)) and {
        match.strip("`\n") for match in re.findall(rf"(?m)(?:^|`)((?:{programs})\b)", text)
    }
    found |= set(re.findall(r"(?m)^python (?:scripts/\w+\.py|-c \"(?:import|from) [\w.]+)", text))
    return found | set(re.findall(r"packages/\w+", text))


# What the expressions above take for a file, a key or a variable and is none; or stands under a longer name.
NO_ITEM = {
    "PERMISSION_ERROR",  # a field of W&B's answer
    "--version",  # a word of a sentence's flag, not a command's
    "_entry.py", "_reasoning_entry.py", "_with_reasoning.toml", "_local_test_with_reasoning.toml",  # ends of names
    "entry_script.py", "install.sh",
    "wandb.errors", "wandb.errors.errors", "wandb.init",  # Python names
    "model.safetensors.index.json", "model_rank_", "trainer.py", "model.safetensors.index",
    "data.train_dataset", "data.train_dataset...", "train.optm_lr",
}  # fmt: skip


def test_every_item_of_the_published_documents_has_a_row():
    if not SEEDS.is_dir():
        pytest.skip("needs the three documents in ../shared/seeds")
    theirs = "\n".join(row.theirs for row in documents.seed_rows())
    named = named_in_the_seeds()
    # 40 variables, 39 options, 60 keys and more: an expression that finds nothing would pass otherwise.
    assert len(named) > 200
    assert sorted(name for name in named - NO_ITEM if name not in theirs) == []


def test_every_failure_of_the_published_documents_has_a_row():
    if not SEEDS.is_dir():
        pytest.skip("needs the three documents in ../shared/seeds")
    first, second, _ = (path.read_text("utf-8") for path in sorted(SEEDS.glob("*.txt")))
    table = first.partition("Symptom\tRoot cause\tFix\n")[2].partition("\n---")[0]
    symptoms = [line.partition("\t")[0] for line in table.strip().splitlines() if line]
    table = second.partition("| Symptom | Root cause | Fix |")[2].partition("\n---")[0]
    symptoms += [line.split(" | ")[0].strip("| ") for line in table.strip().splitlines()[1:] if line]
    assert len(symptoms) == 15 + 17
    page = documents.SEED_PAGE.read_text("utf-8").partition("## Failures")[2]
    listed = [cells.split(" | ")[0].strip("| ") for cells in page.splitlines() if cells.startswith("| ")][1:]
    assert len(listed) == len(symptoms)
    for symptom, row in zip(symptoms, listed, strict=True):
        # The row's words, in their order, are the symptom's.
        words = iter(re.findall(r"\w+", symptom))
        assert all(word in words for word in re.findall(r"\w+", row)), f"{row!r} is not {symptom!r}"


# ---------------------------------------------------------------- what is run

SMALL = (
    *("dataset.train_scenes=4", "dataset.val_scenes=2", "dataset.test_scenes=3", "expected_valid_steps=6"),
    *("rollout.slots=8", "rollout.group_size=2", "rollout.scenes_per_step=2", "trainer.updates=1", "trainer.epochs=1"),
    *("trainer.warm_start.epochs=1", "trainer.warm_start.drives_per_scene=1", "trainer.drives_per_scene=1"),
    *("evaluation.bootstrap=100", "evaluation.every_updates=0", "evaluation.videos=false"),
    *("evaluation.references=false", "rollout.groups=2"),
)
PLACEHOLDER = re.compile(r"(?:^|[=/ \[])[A-Z][A-Z_0-9]+(?:$|[/ \]])|…")


def smaller(words: list[str]) -> list[str]:
    """The command with few scenes and steps, as far as its config has such keys."""
    if words[0] not in ("train", "evaluate", "rollout") or "--dry-run" in words:
        return words
    overrides = [word for word in words[1:] if "=" in word and not word.startswith("-")]
    own = {word.partition("=")[0] for word in overrides if "." in word} if "dataset=pai" in words else set()
    kept: list[str] = []
    for override in SMALL:
        with contextlib.suppress(ConfigError):
            single = [word for word in overrides if "," not in word or "[" in word or "{" in word]
            compose([*single, *kept, override])
            kept += [override] if override.partition("=")[0] not in own else []
    return [*words, *kept]


def shell(script: str, folder: Path, **variables: str) -> str:
    """Run lines as a reader would who types them."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=os.environ | {"PATH": path, "WANDB_MODE": "disabled"} | variables,
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


RUN_PAGES = [
    page
    for page in PAGES
    if not page.startswith("skills/") and any(HERE in b.marker for b in documents.blocks(ROOT / page))
]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("page", RUN_PAGES)
def test_the_commands_of_a_page_run(page, tmp_path):
    """Those blocks of it that name this file, one after the other in one folder, on few scenes."""
    count = 0
    for block in documents.blocks(ROOT / page):
        if HERE not in block.marker:
            continue
        for command in block.commands:
            words = shlex.split(command.removeprefix("uv run "))
            if words[0] != "alpagym" or any(PLACEHOLDER.search(word) for word in words):
                continue
            if words[1] in ("drive", "serve", "doctor"):  # they stay, or judge this machine
                continue
            shell(shlex.join(["alpagym", *smaller(words[1:])]), tmp_path)
            count += 1
    assert count > 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["alpagym-rl", "alpagym-sft"])
def test_a_skill_runs_from_top_to_bottom(name, tmp_path):
    """All blocks that name this file as one script, with other answers than the defaults: few scenes."""
    page = ROOT / f"skills/{name}/SKILL.md"
    blocks = re.findall(rf"<!-- tested by: {HERE} -->\n```bash\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    assert len(blocks) >= 4
    trainer = "trainer=sft" if name == "alpagym-sft" else "trainer=grpo"
    choices = smaller(["train", "policy=waypoint_actors", trainer])[1:]
    # The skill names the trainer itself; no value holds a blank.
    answers = {"CHOICES": " ".join(word for word in choices if word != trainer), "GROUPS_DRIVEN": "4"}
    shell("\n".join(blocks), tmp_path, **answers)
    runs = {path.parent.name for path in tmp_path.glob("tmp/alpagym-runs/*/summary.json")}
    assert runs >= {"alpagym-rl": {"rl-1", "pai"}, "alpagym-sft": {"sft-1", "tokens", "expert", "stored"}}[name]


def test_a_skill_is_named_as_its_folder():
    for page in ROOT.glob("skills/*/SKILL.md"):
        head = page.read_text("utf-8").split("---")[1]
        assert f"name: {page.parent.name}\n" in head
        assert "description:" in head
