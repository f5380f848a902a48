"""All code in README and docs runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks, "a page without code"
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
