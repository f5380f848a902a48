"""What can go wrong, said once: every message names the update, the cause and the way out."""

from __future__ import annotations


class RetrogradeError(Exception):
    """Base of all errors that this library raises on purpose."""


class ProgramError(RetrogradeError, ValueError):
    """The updates, the streams, the side inputs or an argument do not fit together."""


class ReplayError(RetrogradeError, RuntimeError):
    """Backward cannot repeat the forward pass, so its gradients would be wrong."""


def at(index: int, update: object, cause: str, way_out: str) -> str:
    """The one form of a message about an update: "update 7: x1 += f(x2): cause. Way out."."""
    return f"update {index}: {update}: {cause}. {way_out}"


def known(what: str, got: object, names: object) -> ProgramError:
    """An unknown name, with the ones that exist."""
    return ProgramError(f"unknown {what} {got!r}; known: {', '.join(map(str, names))}")  # type: ignore[call-overload]


def edited_by_fn(index: int, update: object, what: str) -> ProgramError:
    return ProgramError(
        at(index, update, f"fn edited {what} in place", "Let fn work on a copy (`x = x.clone()`, or `x + 1` for `x += 1`)")
    )


def edited_since(index: int, update: object, what: str) -> ReplayError:
    return ReplayError(
        at(
            index,
            update,
            f"{what} was changed in place between the forward pass and backward, so fn cannot be run again as it was",
            "Call backward first, or change a copy",
        )
    )


def edited_inside(index: int, update: object, shape: object) -> ReplayError:
    return ReplayError(
        at(
            index,
            update,
            f"fn changed in place a tensor of shape {tuple(shape)} that its own gradient needs",  # type: ignore[arg-type]
            "Use the out-of-place form of that operation; ordinary autograd refuses it as well",
        )
    )


def edited_output(what: str) -> ReplayError:
    return ReplayError(
        f"{what} was edited in place after the forward pass; backward recovers every activation from it. "
        "Edit a copy (`y = y + 1` for `y += 1`), or run the net with memory='store'"
    )


def other_path(index: int, update: object, difference: str) -> ReplayError:
    return ReplayError(
        at(
            index,
            update,
            f"fn did not do in backward what it did in the forward pass: {difference}",
            "Usual causes: random numbers from outside torch's generators, a cache or a counter inside fn, a flag that "
            "was changed. Make fn depend on its inputs alone (rg.replaying() tells it when it is run again), or use memory='store'",
        )
    )
