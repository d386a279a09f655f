"""The import directions of docs/architecture.md, read from the sources."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "nanoflow_jax", "search", "serve")

# What a module, or every module of a package, may import besides the standard library and its own package. The lists of all
# that a module lies in count together, and a name stands for everything in it.
MAY_IMPORT = {
    "pallas_kernels": ("jax", "jaxlib", "jaxtyping", "numpy"),
    "pallas_kernels.power": ("pynvml",),
    "nanoflow_jax": ("jax", "jaxtyping", "msgspec", "numpy", "tqdm"),
    "nanoflow_jax.bench_transformers": ("torch", "transformers"),
    "nanoflow_jax.checkpoints": ("gguf", "ml_dtypes", "orbax.checkpoint", "safetensors"),
    "nanoflow_jax.compare": ("flax.nnx", "matplotlib", "pallas_kernels.power"),
    "nanoflow_jax.executor": ("flax.nnx",),
    "nanoflow_jax.executor.streams": ("pallas_kernels.streams",),
    "nanoflow_jax.kernels": ("pallas_kernels",),
    "nanoflow_jax.models": ("flax.nnx",),
    "nanoflow_jax.tokenizer": ("jinja2", "tokenizers"),
    "search": (
        *("matplotlib", "msgspec", "ortools"),
        *("nanoflow_jax.config", "nanoflow_jax.plan", "nanoflow_jax.plan_files", "nanoflow_jax.workload"),
    ),
    "search.profiler": ("jax", "nanoflow_jax.parallel", "pallas_kernels"),
    "search.profiler_programs": (
        *("jax", "numpy", "nanoflow_jax.executor.step", "nanoflow_jax.executor.streams"),
        *("nanoflow_jax.kernels", "nanoflow_jax.parallel", "pallas_kernels.programs"),
    ),
    "serve": (
        *("msgspec", "nanoflow_jax.checkpoints", "nanoflow_jax.config", "nanoflow_jax.plan", "nanoflow_jax.plan_files"),
        *("nanoflow_jax.runtime", "nanoflow_jax.tokenizer"),
    ),
    "serve.startup": ("jax", "nanoflow_jax.kv_cache", "tqdm"),
}

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


def modules() -> dict[str, str]:
    """Source of every module by its name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


MODULES = modules()
WITHOUT_JAX = {
    "nanoflow_jax": [f"nanoflow_jax.{name}" for name in ("config", "plan", "plan_files", "workload", "tokenizer")],
    "serve": ["serve.protocol", "serve.client"],
    "search": [name for name in MODULES if name.split(".")[0] == "search" and "jax" not in MAY_IMPORT.get(name, ())],
}


def imports(source: str) -> list[str]:
    """What `source` imports, at its top or when a function is called."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def is_benchmark(name: str) -> bool:
    return name == "pallas_kernels.tune" or any("bench" in part.split("_") for part in name.split("."))


def allowed(module: str) -> list[str]:
    """What `module` may import, but for the standard library."""
    return [module.split(".")[0], *(name for package, names in MAY_IMPORT.items() if within(module, package) for name in names)]


def forbidden(module: str, source: str) -> list[str]:
    """What `module` imports and must not."""
    standard = sys.stdlib_module_names
    return [
        name
        for name in imports(source)
        if (name.split(".")[0] not in standard and not any(within(name, one) for one in allowed(module)))
        or (is_benchmark(name) and not is_benchmark(module))
    ]


@pytest.mark.parametrize("module", MODULES)
def test_directions(module: str) -> None:
    assert not forbidden(module, MODULES[module])


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("pallas_kernels.gemm", "import scipy", ["scipy"]),
        ("pallas_kernels.gemm", "import scipy.linalg as linalg, math", ["scipy.linalg"]),
        ("pallas_kernels.gemm", "def f():\n  if True:\n    from scipy import linalg", ["scipy.linalg"]),
        ("pallas_kernels.gemm", "import jaxlib.mlir\nfrom jax import lax", []),
        ("pallas_kernels.gemm", "import pynvml", ["pynvml"]),
        ("pallas_kernels.power", "import pynvml", []),
        ("pallas_kernels.bench.gemm", "import nanoflow_jax.config", ["nanoflow_jax.config"]),
        ("pallas_kernels.gemm", "from pallas_kernels.bench import timing", ["pallas_kernels.bench.timing"]),
        ("pallas_kernels.tune", "from pallas_kernels.bench import timing", []),
        ("nanoflow_jax.operations", "import pallas_kernels", ["pallas_kernels"]),
        ("nanoflow_jax.compare.measure", "from pallas_kernels import gemm, power", ["pallas_kernels.gemm"]),
        ("nanoflow_jax.runtime.llm", "from nanoflow_jax.bench_predicted import main", ["nanoflow_jax.bench_predicted.main"]),
        ("nanoflow_jax.runtime.load_bench", "from nanoflow_jax.runtime.bench import main", []),
        ("search.structure", "import jax, ortools", ["jax"]),
        ("search.profiler", "import jax\nfrom nanoflow_jax import runtime", ["nanoflow_jax.runtime"]),
        ("search.command", "from serve import client", ["serve.client"]),
        ("serve.startup", "import jax\nfrom nanoflow_jax.executor import runner", ["nanoflow_jax.executor.runner"]),
        ("serve.server", "import jax, asyncio\nimport nanoflow_jax", ["jax", "nanoflow_jax"]),
        ("serve.planner", "import nanoflow_jax.planner", ["nanoflow_jax.planner"]),
    ],
)  # fmt: skip
def test_what_must_not_be_imported_is_found(module: str, source: str, found: list[str]) -> None:
    assert forbidden(module, source) == found


def test_nothing_is_allowed_that_nobody_imports() -> None:
    used = {
        (package, one)
        for module, source in MODULES.items()
        for package, names in MAY_IMPORT.items()
        for one in names
        if within(module, package) and any(within(name, one) for name in imports(source))
    }
    assert {(package, one) for package, names in MAY_IMPORT.items() for one in names} == used


def layer_of(module: str) -> int | None:
    parts = module.split(".")
    if parts[0] != "nanoflow_jax" or len(parts) == 1:
        return None
    return next(i for i, names in enumerate(LAYERS) if parts[1] in names)


@pytest.mark.parametrize("module", MODULES)
def test_layers_of_nanoflow_jax(module: str) -> None:
    own = layer_of(module)
    for name in imports(MODULES[module]):
        other = layer_of(name) if within(name, "nanoflow_jax") else None
        assert own is None or other is None or other <= own, f"{module} imports {name}, which lies above it"


@pytest.mark.parametrize("package", WITHOUT_JAX)
def test_imports_without_jax(package: str) -> None:
    code = f"import sys, {', '.join(WITHOUT_JAX[package])}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
