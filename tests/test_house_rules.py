"""Who may import whom, which Flax names are in use, and that only one file makes a parameter or names a mesh axis."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
ORDER = ["pallas_kernels", "k3jax", "experiments", "launch"]
NNX = {"Module", "Param", "Variable", "List", "State", "split", "merge", "to_pure_dict"}
NNX |= {"to_flat_state", "from_flat_state"}
COMPOSERS = {"block.py", "transformer.py", "weights.py"}
SHARED = {"layout", "memory"}
FILES = sorted(path for package in ORDER for path in (ROOT / package).rglob("*.py"))


def imported(path: pathlib.Path) -> set[str]:
    """Every module that a file names in an import, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", ORDER)
def test_imports_go_one_way(package):
    above = ORDER[ORDER.index(package) + 1 :]
    for path in (ROOT / package).rglob("*.py"):
        for name in imported(path):
            assert name.split(".")[0] not in above, f"{path.relative_to(ROOT)} imports {name}"


def test_a_component_imports_no_other():
    """Exceptions: the mixture of experts uses the gated activation and the balancers."""
    folder = ROOT / "k3jax" / "model"
    components = {path.stem for path in folder.glob("*.py")} - {"__init__"} - SHARED
    allowed = {("moe", "ffn"), ("moe", "balancing")}
    for path in folder.glob("*.py"):
        if path.name in COMPOSERS:
            continue
        for name in imported(path):
            if name.startswith("k3jax.model."):
                other = name.split(".")[2]
                assert other not in components or (path.stem, other) in allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", [p for p in FILES if "nnx" in p.read_text()], ids=lambda p: p.name)
def test_flax_is_confined_to_a_few_names(path):
    used = set(re.findall(r"\bnnx\.(\w+)", path.read_text()))
    assert used <= NNX, f"{path.relative_to(ROOT)} uses {sorted(used - NNX)}"


def test_only_one_file_makes_parameters_and_one_names_mesh_axes():
    makers = [p.name for p in FILES if re.search(r"nnx\.Param\(", p.read_text())]
    assert makers == ["nn.py"]
    specs = [p.name for p in (ROOT / "k3jax").rglob("*.py") if re.search(r"PartitionSpec\(", p.read_text())]
    assert specs == ["sharding.py"]


def test_the_rules_would_notice(tmp_path):
    """Negative control: imports inside functions and from packages are seen."""
    path = tmp_path / "low.py"
    path.write_text("def f():\n    import launch.render\n    from experiments import run\n")
    assert imported(path) == {"launch.render", "experiments.run"}
