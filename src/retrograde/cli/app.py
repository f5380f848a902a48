"""The command `retrograde`: finds the module of the command that is asked for, and says in one line what went wrong.

A command is a module with a dataclass `Options`, whose docstring and fields are its help, and `run(options) -> exit code`. It may
have `OLD_NAMES`, of options that have another name now.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from .._base.loading import Refused
from .parse import nearest, parsed

COMMANDS = {  # name: what it does; the module has the same name
    "bench": "compare time, memory and gradients of your block under every way to train it",
    "plan": "predict what fits into the memory of a GPU, and whether reversal is worth it, without running anything",
    "train": "train a deep language model on your text, or on the sources of Python's standard library",
    "sample": "generate text from a trained model",
    "check": "check that your block or net is sound: that it repeats exactly and its gradients agree",
    "drift": "measure how far recovered streams and gradients drift, by depth, precision and arithmetic",
}
EXTRAS = {"tyro", "rich", "matplotlib", "PIL"}  # of retrograde[cli]
MISUSED, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no × sees a question mark
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except Refused as refusal:
        if "--traceback" in argv and refusal.__cause__:
            traceback.print_exception(refusal.__cause__)
        return _say(str(refusal), MISUSED)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:  # `retrograde … | head`: nobody listens any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        return _say(f"the command needs {error.name}: pip install 'retrograde[cli]'", MISUSED)


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: retrograde COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "retrograde COMMAND --help lists its options, retrograde --version prints the version",
        ]
    )


def _dispatch(argv: Sequence[str]) -> int:
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"retrograde {__version__}")
        return 0
    if name not in COMMANDS:
        raise Refused(f"there is no command {name!r}, use one of: {', '.join(COMMANDS)}{nearest(name, COMMANDS)}")
    if "--version" in rest:
        print(f"retrograde {__version__}")
        return 0
    import_module("tyro")  # a missing extra is reported before a command loads its own
    command = import_module(f"{__package__}.{name}")
    old_names = getattr(command, "OLD_NAMES", {})
    return command.run(parsed(command.Options, rest, f"retrograde {name}", old_names)) or 0


def _say(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"retrograde: {line}", file=sys.stderr)
    return code
