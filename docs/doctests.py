"""For the API reference: examples in docstrings are shown as code. Used by mkdocstrings, see mkdocs.yml."""

import re
from typing import Any

import griffe


class Doctests(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"(?m)^>>> .*(?:\n.+)*", r"```pycon\n\g<0>\n```", obj.docstring.value)
