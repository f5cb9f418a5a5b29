#!/usr/bin/env python3
"""Check what the documents say: commands, links, and where each command was last run.

    python scripts/check_documents.py [PAGE …]

A block of commands has a line above it that no reader sees, and that says how we know that it works:

    <!-- tested by: tests/test_x.py -->            these tests run it, or the same with smaller numbers
    <!-- last run: 2026-11-30, 2 H200 -->          by hand, when and where
    <!-- never run: needs Slurm -->                what was not at hand

Every command is parsed and its overrides are composed; nothing is run. `tests/test_documents.py` holds all pages to it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOREIGN = {
    *("pip", "hf", "huggingface-cli", "wandb", "tensorboard", "carla-driver-interface", "git", "cd", "export", "ls"),
    *("docker", "sudo", "apt-get", "make", "source", "mkdir", "nvidia-smi", "echo", "sbatch", "squeue", "redis-server"),
    *("for", "done", "[", "cp", "cat", "scancel", "sinfo", "srun", "unzip", "cosmos-rl"),
}
"""Programs that are not ours: what follows them is not checked."""
OURS = {"alpagym", "pytest", "python", "python3", "torchrun", "uv", ".ci/run", "mkdocs"}
_BLOCK = re.compile(
    r"(?:<!-- (?P<marker>[^\n]*?) -->\n+)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.M | re.S
)
_COMPOSED = {"train", "evaluate", "rollout", "serve", "doctor", "submit"}


@dataclass(frozen=True)
class Block:
    """Commands of a page.

    Attributes:
        page: where it stands.
        line: number of its first line in the page.
        marker: what is said about it, such as "tested by: tests/test_x.py"; empty if nothing is.
        commands: one a line; continued lines joined, comments left out.

    """

    page: Path
    line: int
    marker: str
    commands: tuple[str, ...]

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every document that people read."""
    found = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("skills/**/*.md"),
        *ROOT.glob("packages/**/*.md"),
    ]
    return sorted(path for path in found if ".venv" not in path.parts and path.name != "CHANGELOG.md")


def blocks(page: Path) -> list[Block]:
    """The page's blocks that hold commands."""
    text, found = page.read_text("utf-8"), []
    for match in _BLOCK.finditer(text):
        if match["language"] not in ("", "bash", "sh"):
            continue
        commands = tuple(_commands(match["text"]))
        if any(_program(command) in OURS for command in commands):
            line = text.count("\n", 0, match.start("text")) + 1
            found.append(Block(page, line, match["marker"] or "", commands))
    return found


def _commands(text: str) -> Iterator[str]:
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        bare = re.sub(r"(^|\s)#.*$", "", line).strip()
        if bare.startswith("$ "):
            yield bare[2:]
        elif "─" not in bare and _program(bare) in OURS | FOREIGN:  # that would be a drawing
            yield bare


def _program(command: str) -> str:
    words = re.sub(r"^(?:\w+=\S* )+", "", command).split()
    return words[0] if words else ""


def block_problems(block: Block) -> list[str]:
    """What is wrong with its marker and its commands."""
    made = made_on(block.page)
    found = [marker_problem(block), *(command_problem(command, made) for command in block.commands)]
    return [text for text in found if text is not None]


def marker_problem(block: Block) -> str | None:
    """What is wrong with what a block says about how it was run."""
    kind, _, text = block.marker.partition(": ")
    if kind == "tested by":
        for name in text.split(", "):
            if (why := test_problem(name)) is not None:
                return why
        return None
    if kind == "never run" and text:
        return None
    if kind == "last run":
        day, _, where = text.partition(", ")
        try:
            date.fromisoformat(day)
        except ValueError:
            return f"`last run: {text}` must begin with a date, such as 2026-11-30"
        return None if where.strip() else f"`last run: {text}` does not say where"
    return "has no line above it that says how it was run, such as <!-- tested by: FILE --> (see this script)"


@cache
def _test_files() -> dict[str, Path]:
    found = [*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("packages/**/tests/test_*.py")]
    return {path.name: path for path in found}


def test_problem(name: str) -> str | None:
    """None if `FILE` or `FILE::test` is there; a test's file may be given by its name alone."""
    file, _, function = name.partition("::")
    path = ROOT / file if "/" in file else _test_files().get(file)
    if path is None or not path.exists():
        return f"{file} is no file of tests"
    if function and function not in _functions(path):
        return f"{file} has no {function}"
    return None


@cache
def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


# ---------------------------------------------------------------- one command


def made_on(page: Path) -> frozenset[str]:
    """Plugins that the page makes with `alpagym new`; what names them cannot be composed without them."""
    return frozenset(
        name.replace("-", "_") for name in re.findall(r"alpagym new \w+ ([\w-]+)", page.read_text("utf-8"))
    )


def command_problem(command: str, made: Set[str] = frozenset()) -> str | None:
    """What would make a command fail before it does anything; None where nothing is known to.

    Args:
        command: as a reader types it.
        made: plugins that are not installed here; overrides that name them are left out.

    """
    # What a shell, or a reader, fills in: a name in capitals may be anything, others are numbers.
    text = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", command).replace("…", "")
    text = re.sub(r"\$\{?([A-Z_]+)\}?", r"\1", re.sub(r"\$\(\(.*?\)\)|\$\{?[a-z]\w*\}?", "1", text))
    try:
        words = shlex.split(text)
    except ValueError as err:
        return str(err)
    words = [word for word in words if not (word.endswith("=") and "." not in word and word.count("=") == 1)]
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    for end in ("|", "&&", ">", ";", "&"):
        words = words[: words.index(end)] if end in words else words
    if words[:2] == ["uv", "run"]:
        words = _without_options(words[2:], {"--with", "--extra", "--group", "--package", "--directory"})
    if not words:
        return None
    if words[0] == "alpagym":
        return _alpagym_problem([_plain(word) for word in words[1:] if not _names(word, made)])
    if words[0] == "pytest":
        return _pytest_problem(words[1:])
    if words[0] == "uv":
        return _extras_problem(words)
    if words[0] in ("python", "python3", "torchrun"):
        return _python_problem(words)
    if words[0] == ".ci/run":
        stages = re.search(r'^STAGES="(.*)"', (ROOT / ".ci/run").read_text(), re.M)
        unknown = set(words[1:]) - set(stages[1].split() if stages else ())
        return f"no stage {', '.join(unknown)}" if unknown else None
    return None


def _plain(word: str) -> str:
    """`[-f]` and `[NAME]`, as help writes what may be left out."""
    return word.strip("[]") if "=" not in word and (word.startswith("[") or word.endswith("]")) else word


def _names(word: str, made: Set[str]) -> bool:
    key, _, value = word.partition("=")
    return value in made or any(key.startswith(f"reward.terms.{name}.") for name in made)


def _without_options(words: list[str], valued: set[str]) -> list[str]:
    while words and words[0].startswith("-"):
        words = words[2 if words[0] in valued else 1 :]
    return words


def _alpagym_problem(words: Sequence[str]) -> str | None:
    import typer

    from alpagym_host.cli import app
    from alpagym_plugins import ConfigError, PluginError

    if not words:
        return None
    # Not click's own names: newer versions of typer bring a click of theirs.
    usage_error = typer.BadParameter.__mro__[1]
    command, name, rest = typer.main.get_command(app), "alpagym", list(words)
    while hasattr(command, "get_command"):
        rest = _without_options(rest, set()) if name == "alpagym" else rest
        if not rest or rest[0].startswith("-"):
            return None
        name, *rest = rest
        found = command.get_command(command.context_class(command), name)
        if found is None:
            return f"alpagym has no command {name!r}"
        command = found
    try:
        context = command.make_context(name, [word for word in rest if word != "--traceback"])
    except typer.Exit:
        return None
    except usage_error as err:
        # A page's files need not be there, and a command that is only named has no arguments.
        if "does not exist" in err.message or not rest:
            return None
        return f"{err.format_message()} (alpagym {' '.join(words)})"
    if name not in _COMPOSED:
        return None
    given = context.params.get("overrides") or ()
    overrides = [text for text in given if not re.fullmatch(r"[A-Z_]*", text)]
    try:
        for one in _expanded(overrides) if context.params.get("multirun") else [overrides]:
            _compose(tuple(one))
    except (ConfigError, PluginError) as err:
        if "does not exist" in str(err):
            return None
        return f"{err} (alpagym {' '.join(words)})"
    return None


def _expanded(overrides: list[str]) -> list[list[str]]:
    from alpagym_host.sweep import expand

    return expand(overrides)


@cache
def _compose(overrides: tuple[str, ...]) -> None:
    from alpagym_host.compose import compose

    compose(overrides)


def _pytest_problem(words: Sequence[str]) -> str | None:
    for word in _without_values(words, {"-m", "-n", "-k", "-p", "-W"}):
        if not word.startswith("-") and not (ROOT / word.partition("::")[0]).exists():
            return f"{word} is no test here"
    return None


def _without_values(words: Sequence[str], valued: set[str]) -> list[str]:
    return [word for i, word in enumerate(words) if word not in valued and (i == 0 or words[i - 1] not in valued)]


def _python_problem(words: Sequence[str]) -> str | None:
    if "-c" in words:
        return None
    if "-m" in words:
        module = words[words.index("-m") + 1]
        try:
            there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            there = False
        if not there:
            return f"no module {module}"
        if module == "alpagym_host.cli":
            rest = list(words[words.index("-m") + 2 :])
            return _alpagym_problem(rest if not rest or "=" not in rest[0] else ["train", *rest])
        return None
    files = [word for word in words[1:] if word.endswith(".py")]
    for file in files[:1]:
        if not (ROOT / file).is_file():
            return f"{file} is not there"
        source = (ROOT / file).read_text("utf-8")
        for option in (word for word in words if word.startswith("--")):
            if f'"{option.partition("=")[0]}"' not in source:
                return f"{file} has no option {option}"
    return None


def _extras_problem(words: Sequence[str]) -> str | None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    for i, word in enumerate(words[:-1]):
        if word == "--extra" and words[i + 1] not in project["project"]["optional-dependencies"]:
            return f"no extra {words[i + 1]}"
        if word == "--group" and words[i + 1] not in project["dependency-groups"]:
            return f"no dependency group {words[i + 1]}"
    return None


# ---------------------------------------------------------------- links


def link_problems(page: Path) -> list[str]:
    """Links to files and headings that are not there; the web is not asked."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    found = []
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        file, _, anchor = target.partition("#")
        if "://" in file or file.startswith("mailto:"):
            continue
        path = (page.parent / file).resolve() if file else page
        if not path.exists():
            found.append(f"{target} is not there")
        elif anchor and path.suffix == ".md" and anchor not in _anchors(path):
            found.append(f"{target}: {path.name} has no such heading")
    return found


@cache
def _anchors(page: Path) -> set[str]:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


# ---------------------------------------------------------------- docs/seed-commands.md

SEED_PAGE = ROOT / "docs/seed-commands.md"
STATUSES = ("works", "untried", "not yet", "same", "none")


@dataclass(frozen=True)
class SeedRow:
    """A row of a table of `docs/seed-commands.md`; cells as they are written."""

    line: int
    theirs: str
    ours: str
    status: str
    seen_by: str

    @property
    def codes(self) -> list[str]:
        """What the second column writes as code."""
        return re.findall(r"`([^`]+)`", self.ours)


def seed_rows() -> list[SeedRow]:
    """All rows, of all tables with four columns."""
    rows = []
    for number, line in enumerate(SEED_PAGE.read_text("utf-8").splitlines(), 1):
        cells = [cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and not set(cells[0]) <= {"-"} and cells[2] != "status":
            rows.append(SeedRow(number, *cells))
    return rows


def is_override(code: str) -> bool:
    """Whether it is `key=value`, or several of them."""
    return re.match(r"[~+]?[a-z_][\w.]*=", code) is not None


def code_problem(code: str) -> str | None:
    """Whether a piece of code is there: a command, overrides, a file of this repository."""
    words = code.split()
    if words and words[0] in OURS and len(words) > 1:
        return command_problem(code)
    if is_override(code):
        return _alpagym_problem(["train", *words])
    if re.match(r"(packages|docs|skills|scripts|tests|benchmarks)/", code) or code in ("pyproject.toml", "uv.lock"):
        return None if (ROOT / code).exists() else f"{code} is not there"
    return None


def main(names: Sequence[str]) -> int:
    """Print every problem; 1 if there is one."""
    count = 0
    for page in [Path(name).resolve() for name in names] or pages():
        problems = [f"{page.relative_to(ROOT)}: {text}" for text in link_problems(page)]
        problems += [f"{block.place}: {text}" for block in blocks(page) for text in block_problems(block)]
        print(*problems, sep="\n", end="\n" * bool(problems))
        count += len(problems)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
