"""What stops a training run, in one line: what happened, what is left, and the way out."""

from __future__ import annotations

from ..errors import TrainingError as TrainingError


def reason(error: BaseException) -> str:
    """The cause in a few words: the operating system's where it has one, which torch hides behind its own."""
    failures = getattr(error, "failures", None)  # of torch.distributed.checkpoint, by process
    if failures:
        return reason(next(iter(failures.values()))[0])
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:160]}" if first else type(error).__name__
