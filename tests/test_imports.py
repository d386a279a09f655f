"""The import directions of docs/architecture.md, read from the sources."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "nanoflow_jax", "search", "serve")

# Layers of nanoflow_jax, lowest first; a module may import its own layer and those below.
LAYERS = (
    {"config", "plan", "plan_files", "workload"},
    {"batch", "kernels", "kv_cache", "parallel", "tokenizer"},
    {"models"},
    {"operations", "sampling", "checkpoints"},
    {"executor"},
    {"runtime"},
    {"convert", "bench", "bench_predicted", "bench_transformers", "compare"},
)
FORBIDDEN = {
    "pallas_kernels": ("nanoflow_jax", "search", "serve", "flax", "msgspec", "ortools"),
    "nanoflow_jax": ("search", "serve"),
    "search": ("serve", "nanoflow_jax.runtime"),
    "serve": ("search", "nanoflow_jax.executor", "nanoflow_jax.models", "nanoflow_jax.operations", "pallas_kernels"),
}
WITHOUT_JAX = (
    *("nanoflow_jax.config", "nanoflow_jax.plan", "nanoflow_jax.plan_files", "nanoflow_jax.workload", "nanoflow_jax.tokenizer"),
    *("serve.protocol", "serve.client", "search"),
)


def modules() -> list[tuple[str, pathlib.Path]]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def imports(path: pathlib.Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_directions(module: str, path: pathlib.Path) -> None:
    package = module.split(".")[0]
    for name in imports(path):
        broken = [target for target in FORBIDDEN[package] if within(name, target)]
        assert not broken, f"{module} imports {name}"
        if name.split(".")[-1] == "bench" or ".bench." in name:
            assert ".bench" in module or module.endswith("tune"), f"{module} imports the benchmark {name}"


def layer_of(module: str) -> int | None:
    parts = module.split(".")
    if parts[0] != "nanoflow_jax" or len(parts) == 1:
        return None
    return next(i for i, names in enumerate(LAYERS) if parts[1] in names)


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_layers_of_nanoflow_jax(module: str, path: pathlib.Path) -> None:
    own = layer_of(module)
    for name in imports(path):
        other = layer_of(name) if within(name, "nanoflow_jax") else None
        assert own is None or other is None or other <= own, f"{module} imports {name}, which lies above it"


@pytest.mark.parametrize("module", WITHOUT_JAX)
def test_imports_without_jax(module: str) -> None:
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
