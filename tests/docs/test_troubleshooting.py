"""docs/troubleshooting.md knows every message: those that the library raises or warns with are read off its source."""

import ast
import re

from support import ROOT

SOURCE = ROOT / "src" / "retrograde"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
FOLDERS = (".", "errors", "_base", "_exact", "_memory", "_engine", "ordinary", "_compile", "compat", "models", "training")
FILES = [path for folder in FOLDERS for path in sorted((SOURCE / folder).glob("*.py"))]
CLASSES = {
    "RetrogradeError",
    "ProgramError",
    "OutOfRange",
    "ReplayError",
    "NotRepeated",
    "Freed",
    "Edited",
    "EditedInBackward",
    "OffloadError",
    "TrainingError",
}
TELLING = CLASSES | {"refuse", "warn", "failed", "_damaged"}  # functions that are given a message first, or a path and a message
HEAD = re.compile(r"(?:…: )*(.*?)(?:\. |; |$)")


def text_of(node):
    """A string as written, with … where something is put in; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def headline(text):
    """Its first sentence, without the update that it is about."""
    found = HEAD.match(re.sub(r"…+", "…", text))
    return found[1].rstrip(".") if found else ""


def messages():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args:
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in TELLING:
                    texts = [text for arg in node.args if (text := text_of(arg))]
                    yield from ((path, headline(text)) for text in texts[:1])
            if isinstance(node, ast.Return) and (text := text_of(node.value)) and _is_message(path, text):
                yield path, headline(text)


def _is_message(path, text):
    """Texts that another function raises, or warns with."""
    return text.startswith("fn ") or (path.name == "messages.py" and not text.startswith("update "))


HEADLINES = sorted({(path.relative_to(SOURCE).as_posix(), text) for path, text in messages() if text.strip("… :")})


def test_messages_were_found():
    assert len(HEADLINES) > 100
    for one in ("fn edited … in place", "fn returned shape …, the stream has … (nothing is broadcast)", "no sources"):
        assert one in {text for _, text in HEADLINES}


def test_every_message_is_listed():
    missing = [f"{file}: {text}" for file, text in HEADLINES if text not in PAGE]
    assert not missing, "say in docs/troubleshooting.md what causes these, and the way out:\n" + "\n".join(missing)


def test_every_error_class_is_listed():
    kinds = [
        node.name
        for path in SOURCE.glob("**/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and any(re.search(r"Error|\bException", ast.unparse(b)) for b in node.bases)
    ]
    assert set(kinds) >= CLASSES
    for name in kinds:
        assert f"`{name}`" in PAGE, name
