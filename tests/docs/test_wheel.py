"""What is in the wheel and the sdist; `make dist` tries them."""

import tarfile
import zipfile

import pytest
from support import ROOT


def test_wheel_and_sdist_have_all_files(tmp_path):
    """Each module, the mark that it is typed, and the command; in the sdist what `make test` needs."""
    wheels = pytest.importorskip("hatchling.builders.wheel")
    sdists = pytest.importorskip("hatchling.builders.sdist")
    (wheel,) = wheels.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    (sdist,) = sdists.SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
        (commands,) = (archive.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
    source = ROOT / "src" / "retrograde"
    wanted = {f"retrograde/{path.relative_to(source).as_posix()}" for path in source.rglob("*.py")} | {"retrograde/py.typed"}
    assert {name for name in names if name.startswith("retrograde/")} == wanted
    assert "retrograde = retrograde.cli.app:main" in commands
    assert "Requires-Dist: torch>=2.11\n" in metadata
    with tarfile.open(sdist) as archive:
        parts = {name.partition("/")[2].partition("/")[0] for name in archive.getnames()}
    wanted = {"src", "tests", "docs", "benchmarks", "examples", "Makefile", "constraints.txt", "mkdocs.yml", "pyproject.toml"}
    assert parts >= wanted
