"""How the package is laid out: which way imports go, where torch's private names stand, how long files are."""

import ast
import re
from pathlib import Path

import pytest
from support import ROOT

import retrograde as rg

TESTS = ROOT / "tests"
SOURCE = Path(rg.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
# From the ground up: a package imports from itself and from those before it. Those in one entry know nothing of each other.
ORDER = [
    {"errors"},
    {"_base"},
    {"rules"},
    {"update"},
    {"wirings", "memory"},
    {"_exact", "_memory"},
    {"_engine"},
    {"modules"},
    {"sequence", "ordinary", "optimizer"},
    {"transformer"},
    {"_compile", "check"},
    {"compat", "models", "integrations"},
    {"training", "planning"},
    {"bench"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def package_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_by(path):
    """Names in this package that a file imports from, wherever in the file it does."""
    package = ["retrograde", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            around = package[: len(package) - node.level + 1] if node.level else []
            full = [*around, *(node.module.split(".") if node.module else [])]
            if full[:1] == ["retrograde"]:
                yield from [full[1]] if len(full) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("retrograde."))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_imports_go_down(path):
    own = package_of(path)
    if own == "__init__":
        return  # it says what is public, and stands above all
    for name in imported_by(path):
        if name in LEVEL:
            assert name == own or LEVEL[name] < LEVEL[own], f"{own} imports {name}, which stands above it or beside it"


def test_every_file_has_a_level():
    assert {package_of(path) for path in FILES} - {"__init__"} == set(LEVEL)


PRIVATE = re.compile(
    r"torch(?!\.ops\b)(\.\w+)*\._[a-z]\w*|from torch(\.\w+)*\._|from torch(\.\w+)* import .*\b_[a-z]"
    r"|_execution_engine|\._cdata\b|\._schema\b"
)


def test_private_names_of_torch_stand_in_one_file():
    found = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in FILES
        if package_of(path) != "_compile" and path.name != "torch_private.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if PRIVATE.search(line.partition("#")[0])
    ]
    assert not found, "move these to _base/torch_private.py, with the reason:\n" + "\n".join(found)


def lines_of(paths, root=SOURCE):
    return {path.relative_to(root).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}


def test_files_are_short(capsys):
    sizes = lines_of(FILES)
    engine = sum(lines_of((SOURCE / "_engine").glob("*.py")).values())
    root = sum(lines_of(SOURCE.glob("*.py")).values())
    with capsys.disabled():
        print(f"\nlines: _engine {engine}, root {root}, longest file {max(sizes.values())}")
    assert {name: size for name, size in sizes.items() if size > 350} == {}
    assert engine <= 2000
    assert root <= 1900


def test_test_files_are_short():
    sizes = lines_of(TESTS.rglob("*.py"), TESTS)
    assert len(sizes) > 50
    assert {name: size for name, size in sizes.items() if size > 600} == {}


def test_test_files_have_names_of_their_own():
    """They are imported by their names alone: no two may share one."""
    names = [path.name for path in TESTS.rglob("*.py") if path.name not in ("__init__.py", "conftest.py")]
    assert sorted(names) == sorted(set(names))
