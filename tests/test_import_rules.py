"""The one-way imports that keep the packages apart; they are read from the source, so an unused path counts too."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    folder.name: package
    for package in (*ROOT.glob("packages/*"), *ROOT.glob("packages/policies/*"))
    if (package / "pyproject.toml").is_file()
    for folder in (package / "src").iterdir()
    if folder.is_dir()
}
NOT_POLICIES = {"alpagym_plugins", "alpagym_runtime", "alpagym_host", "alpagym_alpasim_configs"}
POLICIES = PACKAGES.keys() - NOT_POLICIES

# What a package may import of ours, besides itself.
MAY_IMPORT: dict[str, set[str]] = {
    "alpagym_plugins": set(),
    "alpagym_alpasim_configs": set(),
    "alpagym_runtime": {"alpagym_plugins"},
    "alpagym_host": {"alpagym_runtime", "alpagym_plugins"},
    **{policy: {"alpagym_runtime", "alpagym_plugins"} for policy in POLICIES},
}
# Layers of alpagym_runtime: a module imports its own layer and those below. `testing` stands above all.
LAYERS = [
    {
        "types",
        "errors",
        "random",
        "telemetry",
        "run_config",
        "deploy_config",
        "slurm_config",
        "children",
        "endpoints",
        "files",
        "kernels",
        "machine",
        "secrets",
        "video",
    },
    {"geometry", "geometry_kernels", "cameras", "pictures", "episodes"},
    {"simulators", "rewards", "policies", "transport"},
    {"envs"},
    {"rollouts"},
    {"trainers"},
    {"testing"},
]
LAYER = {name: depth for depth, names in enumerate(LAYERS) for name in names}

TORCH = {"torch", "torchvision", "transformers", "accelerate", "deepspeed", "flash_attn", "vllm"}
TORCH_ANYWHERE = ("alpagym_runtime.trainers", "alpagym_runtime.transport.nccl", *POLICIES)
TORCH_IN_FUNCTIONS = ("alpagym_runtime.rollouts", "alpagym_runtime.rewards.reasoning", "alpagym_runtime.testing")
GRPC = {"grpc", "grpc_health", "google"}
GRPC_ANYWHERE = re.compile(
    r"alpagym_runtime\.(simulators\.alpasim|simulators\.embedded\.server\w*|testing)(\.|$)",
)
LOADS = ("torch.load", "yaml.load")
CODE_FROM_DATA = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @property
    def is_config(self) -> bool:
        return self.name.rpartition(".")[2] in ("config", "run_config") or self.name.endswith("_config")

    def at(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


@dataclass(frozen=True)
class Import:
    target: str  # dotted; `from a import b` gives a.b, and its a part is what counts if b is no module
    at: str
    in_function: bool

    @property
    def top(self) -> str:
        return self.target.partition(".")[0]


def read_modules() -> list[Module]:
    found = []
    for package in PACKAGES.values():
        for path in sorted((package / "src").rglob("*.py")):
            parts = path.relative_to(package / "src").with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Module(name, path, ast.parse(path.read_text("utf-8"), str(path))))
    return found


MODULES = read_modules()


def imports(module: Module) -> Iterator[Import]:
    """Imports that can run; those under `if TYPE_CHECKING` never do."""
    yield from _imports(module, module.tree, in_function=False)


def _imports(module: Module, parent: ast.AST, in_function: bool) -> Iterator[Import]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, module.at(node), in_function)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.name.split(".")
                up = node.level - (module.path.name == "__init__.py")
                base = ".".join(here[: len(here) - up] + ([base] if base else []))
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", module.at(node), in_function)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from _imports(module, ast.Module([other], []), in_function)
        else:
            inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(module, node, inside)


def is_in(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def is_config_name(target: str) -> bool:
    # The last part may be a class of the module before it.
    return any(part in ("config", "run_config") or part.endswith("_config") for part in target.split(".")[-2:])


def report(violations: list[str]) -> None:
    assert not violations, "\n" + "\n".join(violations)


def test_every_package_is_read():
    assert {module.package for module in MODULES} == set(PACKAGES) >= NOT_POLICIES | {"alpagym_waypoint"}


def test_packages_import_one_way():
    report(
        [
            f"{found.at}: {module.package} may not import {found.target}"
            for module in MODULES
            for found in imports(module)
            if found.top in PACKAGES.keys() - {module.package} - MAY_IMPORT[module.package]
        ]
    )


def test_every_module_of_the_runtime_has_a_layer():
    names = {module.name.split(".")[1] for module in MODULES if module.name.startswith("alpagym_runtime.")}
    assert names <= LAYER.keys()


def test_lower_layers_of_the_runtime_do_not_import_higher_ones():
    violations = []
    for module in MODULES:
        if module.package != "alpagym_runtime" or "." not in module.name:
            continue
        layer = module.name.split(".")[1]
        for found in imports(module):
            parts = found.target.split(".")
            if parts[0] != "alpagym_runtime" or len(parts) < 2 or parts[1] not in LAYER:
                continue
            # The dataclass of a run names the sections of every layer; config modules import nothing heavy.
            if module.is_config and is_config_name(found.target):
                continue
            if LAYER[parts[1]] > LAYER[layer]:
                violations.append(f"{found.at}: {layer} may not import {found.target}")
    report(violations)


def test_torch_is_imported_only_where_it_belongs():
    violations = []
    for module in MODULES:
        for found in imports(module):
            allowed = is_in(module.name, TORCH_ANYWHERE) or (
                found.in_function and is_in(module.name, TORCH_IN_FUNCTIONS)
            )
            if found.top in TORCH and not allowed:
                violations.append(f"{found.at}: {module.name} may not import {found.target} here")
    report(violations)


def test_grpc_is_imported_only_at_the_wire():
    report(
        [
            f"{found.at}: {module.name} may not import {found.target}"
            for module in MODULES
            for found in imports(module)
            if found.top in GRPC and not GRPC_ANYWHERE.match(module.name)
        ]
    )


def test_cosmos_is_imported_only_by_its_trainer():
    report(
        [
            f"{found.at}: {module.name} may not import {found.target}"
            for module in MODULES
            for found in imports(module)
            if found.top == "cosmos_rl" and not is_in(module.name, ("alpagym_runtime.trainers.cosmos",))
        ]
    )


def test_config_modules_import_the_standard_library_and_plugins_only():
    violations = []
    for module in MODULES:
        if not module.is_config:
            continue
        for found in imports(module):
            light = found.top in sys.stdlib_module_names or found.top == "alpagym_plugins"
            ours = found.top in PACKAGES and is_config_name(found.target)
            if not (found.in_function or light or ours):
                violations.append(f"{found.at}: a config module may not import {found.target} at module level")
    report(violations)


def test_plugins_need_the_standard_library_only():
    report(
        [
            f"{found.at}: {found.target}"
            for module in MODULES
            if module.package == "alpagym_plugins"
            for found in imports(module)
            if found.top not in sys.stdlib_module_names | {"alpagym_plugins"}
        ]
    )


def test_data_is_never_run_as_code():
    violations = []
    for module in MODULES:
        violations += [f"{found.at}: imports {found.top}" for found in imports(module) if found.top in CODE_FROM_DATA]
        safe = safe_loads(module.tree)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call):
                violations += [f"{module.at(node)}: {text}" for text in unsafe_call(node)]
            elif isinstance(node, ast.Attribute) and node not in safe and ast.unparse(node) in LOADS:
                violations.append(f"{module.at(node)}: {ast.unparse(node)}")
    report(violations)


def safe_loads(tree: ast.Module) -> list[ast.expr]:
    """`torch.load` where it is called with weights_only=True: that builds tensors and nothing else."""
    return [
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "torch.load"
        and any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
    ]


def test_a_safe_load_is_recognised():
    assert len(safe_loads(ast.parse("torch.load(x, weights_only=True, mmap=True)"))) == 1
    for text in ("torch.load(x)", "torch.load(x, weights_only=False)", "torch.load(x, weights_only=flag)"):
        assert not safe_loads(ast.parse(text)), text


def unsafe_call(call: ast.expr) -> list[str]:
    assert isinstance(call, ast.Call)
    found = []
    if isinstance(call.func, ast.Name) and call.func.id in ("eval", "exec"):
        found.append(f"{call.func.id}()")
    for keyword in call.keywords:
        if keyword.arg in ("shell", "allow_pickle") and not (
            isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        ):
            found.append(f"{keyword.arg}={ast.unparse(keyword.value)}")
    return found


def test_unsafe_calls_are_recognised():
    calls = ["eval(x)", "exec(x)", "run(x, shell=True)", "np.load(x, allow_pickle=True)", "run(x, shell=flag)"]
    for text in calls:
        assert unsafe_call(ast.parse(text, mode="eval").body), text
    for text in ["model.eval()", "np.load(x, allow_pickle=False)"]:
        assert not unsafe_call(ast.parse(text, mode="eval").body), text


def test_third_party_imports_are_declared():
    distributions = packages_distributions()
    violations = []
    for module in MODULES:
        declared = declared_by(module.package) | {
            name for ours in MAY_IMPORT[module.package] for name in declared_by(ours)
        }
        for found in imports(module):
            if found.top in sys.stdlib_module_names or found.top in PACKAGES:
                continue
            providers = {normal(name) for name in distributions.get(found.top, [found.top])}
            if not providers & declared:
                violations.append(f"{found.at}: {found.top} is declared by no dependency of {module.package}")
    report(violations)


def declared_by(package: str) -> set[str]:
    project = tomllib.loads((PACKAGES[package] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project.get("optional-dependencies", {})
    required = [*project["dependencies"], *(item for items in extras.values() for item in items)]
    return {normal(re.split(r"[^\w.-]", item, maxsplit=1)[0]) for item in required}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


HEAVY = ["torch", "transformers", "grpc", "cosmos_rl", "vllm", "ray"]
CONFIG_MODULES = ", ".join(sorted(module.name for module in MODULES if module.is_config))


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param("import alpagym_runtime", id="alpagym_runtime"),
        pytest.param(f"import {CONFIG_MODULES or 'alpagym_plugins'}", id="config modules"),
        pytest.param(
            "import alpagym_plugins as p\n"
            "for group in p.GROUPS.keys() - {'configs'}:\n"
            "    for name in p.names(group):\n        p.load(group, name)",
            id="every plugin",
        ),
        pytest.param(
            "from alpagym_host.cli import main\n"
            "sys.argv = ['alpagym', '--help']\n"
            "try:\n    main()\n"
            "except SystemExit as leave:\n    assert not leave.code, leave.code",
            id="alpagym --help",
        ),
    ],
)
def test_nothing_heavy_is_imported(statements):
    code = f"import sys\n{statements}\nprint('heavy:', *sorted(set({HEAVY!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].strip() == "heavy:"
