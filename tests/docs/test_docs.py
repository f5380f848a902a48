"""All code in README and docs runs, and pages that are made from something are in step with it."""

import importlib
import json
import re

import pytest
from support import ROOT

import retrograde as rg
from retrograde.bench import results

MADE = ("api.md", "results.md", "log.md")  # from docstrings, whose code runs as doctests, from files, and from what was tried
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks or ".integrations }" in page.read_text() or page.name in MADE, "a page without code"
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)


def test_links_of_the_readme():
    """Those of docs are looked at when the site is built."""
    found = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert found
    assert [link for link in found if not (ROOT / link).exists()] == []


def test_the_api_reference_names_everything_public():
    listed = {line.rpartition(".")[2] for line in (ROOT / "docs" / "api.md").read_text().splitlines() if line.startswith("::: ")}
    assert set(rg.__all__) - listed == {"check"}  # a module: what is in it is listed
    assert {"gradients", "drift"} <= listed


def test_the_page_of_results_is_in_step(tmp_path):
    page = tmp_path / "results.md"
    assert results.main([str(ROOT / "benchmarks"), str(page)]) == 0
    now = page.read_text() == (ROOT / "docs" / "results.md").read_text()
    assert now, f"run: {results.PROG} benchmarks docs/results.md"


def test_the_page_of_results_has_the_figures():
    page = results.page([ROOT / "benchmarks" / "2026-11-16-depth-h200.json"])
    assert "NVIDIA H200, torch 2.11.0+cu130, Python 3.12.3, 2026-11-16." in page
    assert "| 48 | reverse | 792.1 MiB | 5.41 GiB | 293.1 (289.2–300.7) |" in page


def test_a_profile_has_columns_of_its_own(tmp_path):
    found = json.loads((ROOT / "benchmarks" / "2026-11-16-bench-captured-h200.json").read_text())
    for row in found["rows"]:
        row["kernels"] = {"attention": 0.0123, "the rest": 0.001}
    path = tmp_path / "2026-11-16-profiled.json"
    path.write_text(json.dumps(found))
    page = results.page([path])
    assert "attention, ms | the rest, ms |" in page
    assert page.count("| 12.3 | 1.0 |") == 4


@pytest.mark.parametrize("name", ["idea", "results"])
def test_what_cannot_be_made_is_told_in_a_line(name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    command = importlib.import_module(f"retrograde.bench.{name}")
    assert command.main([str(tmp_path / "none" / "none")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_drawing(tmp_path):
    pytest.importorskip("matplotlib")
    from retrograde.bench import idea

    assert idea.main([str(tmp_path / "idea.png")]) == 0
    assert (tmp_path / "idea.png").read_bytes().startswith(b"\x89PNG")


def test_the_engine_page_knows_every_file_of_the_engine():
    page = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    missing = {path.stem for path in (ROOT / "src" / "retrograde" / "_engine").glob("*.py")} - {"__init__"}
    missing = {name for name in missing if f"{name}." not in page}
    assert missing == set()
