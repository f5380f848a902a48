"""The loop: batches, steps, evaluations, checkpoints; and what stops it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OutOfRange
from ..models.language import Language
from ..optimizer import step_in_backward
from . import checkpoints
from .checkpoints import Kept
from .data import END, Data, open_data
from .errors import TrainingError, reason
from .folder import Folder
from .memory import peak_bytes
from .metrics import Metrics
from .parallel import Alone, processes
from .settings import Settings, differences
from .signals import Asked
from .state import make_optimizer, put, random_state, set_random_state, tensors

OnEvent = Callable[[str, dict[str, Any]], object]  # what: "start", "note", "step", "evaluated" or "saved"; and its record


@dataclass
class Outcome:
    step: int
    loss: float
    seconds: float
    signal: int  # that stopped it, 0 for none
    checkpoint: Path | None
    sample: bytes
    model: Language
    data: Data


def train(settings: Settings, on_event: OnEvent = lambda what, record: None) -> Outcome:
    """Train to the end, or until a signal. Only the first process says anything."""
    with Asked() as asked, processes(settings.parallel, settings.device) as parallel:
        on_event = on_event if parallel.rank == 0 else lambda what, record: None
        try:
            with Folder(settings.out, settings.resume, parallel) as folder:
                return Trainer(settings, parallel, folder, on_event).run(asked)
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"{reason(error)} A smaller batch, or more pieces of it with accumulate, needs less; so does memory reverse"
            ) from error
        except RuntimeError as error:
            if parallel.world > 1 and "Connection" in str(error):  # gloo's word for it
                raise TrainingError("another process has stopped, and says why") from error
            raise


def build(settings: Settings) -> Language:
    """The model of these settings, seeded."""
    torch.manual_seed(settings.seed)
    s = settings
    more = {"memory": s.memory, "arithmetic": s.arithmetic, "streams": s.streams, "bits": s.bits}
    with torch.device(s.device):
        model = Language(s.depth, s.width, s.heads, s.context, dropout=s.dropout, **more)
    if settings.compile:
        for block in model.net.blocks:
            block.f.compile()  # type: ignore[union-attr]
            block.g.compile()  # type: ignore[union-attr]
    return model


class Trainer:
    """One run in one process: everything is made or loaded here, before the first step."""

    def __init__(self, settings: Settings, parallel: Alone, folder: Folder, on_event: OnEvent):
        self.settings, self.parallel, self.folder, self.on_event = settings, parallel, folder, on_event
        pieces = parallel.world * settings.accumulate
        if settings.batch % pieces:
            raise TrainingError(f"batch {settings.batch} does not divide into {pieces} pieces (processes × accumulate)")
        self.rows, self.context = settings.batch // pieces, settings.context
        self.data = open_data(settings.data, self.context)
        self.raw = build(settings)
        self.model = parallel.wrap(self.raw)
        self.optimizer = make_optimizer(self.raw, settings.lr, settings.weight_decay)
        self.step, self.seconds, self.loss = 0, 0.0, math.nan
        self.saved: Path | None = None
        if settings.resume:
            self.load()

    def run(self, asked: Asked) -> Outcome:
        self.metrics = Metrics(self.folder.metrics, self.step) if self.parallel.rank == 0 else None
        inside = step_in_backward(self.optimizer) if self.settings.step_in_backward else nullcontext()
        with self.metrics or nullcontext(), inside:
            stop = self.steps(asked)
        return Outcome(self.step, self.loss, self.seconds, stop, self.saved, b"" if stop else self.sample(), self.raw, self.data)

    def steps(self, asked: Asked) -> int:
        """All steps that are left; the signal that stopped them, 0 for none."""
        s = self.settings
        parameters = sum(p.numel() for p in self.raw.parameters())
        self.on_event("start", {"parameters": parameters, "first": self.step + 1, "text": self.data.summary()})
        if self.step == 0:
            self.evaluate()
        began, before, stop = time.perf_counter(), self.seconds, 0
        while self.step < s.steps and not stop:
            started = time.perf_counter()
            self.step += 1
            norm = self.advance()
            now = time.perf_counter()
            self.seconds = before + now - began
            rate = s.batch * self.context / (now - started)
            record = {"step": self.step, "loss": self.loss, "lr": s.lr_at(self.step), "norm": norm, "tokens_per_second": rate}
            self.record("step", {**record, "seconds": self.seconds, "peak_bytes": peak_bytes(s.device)})
            if self.step % s.look_every == 0 or self.step == s.steps:
                self.evaluate()
            stop = self.parallel.largest(asked.signal)
            if stop or self.step == s.steps or (s.save_every and self.step % s.save_every == 0):
                self.save()
        return stop

    def sample(self) -> bytes:
        """How a file begins. All processes write the same, as each has a part of the model."""
        self.model.eval()
        return self.raw.extend(bytes([END]), self.settings.sample, generator=torch.Generator().manual_seed(self.settings.seed))

    def advance(self) -> float | None:
        """One step of the optimizer; the norm of the gradients where they are clipped."""
        s = self.settings
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = s.lr_at(self.step)
        self.optimizer.zero_grad()
        losses = torch.zeros((), device=s.device)
        try:
            for piece in range(s.accumulate):
                self.seed(piece)
                with self.parallel.piece(self.model, piece == s.accumulate - 1):
                    loss = self.forward(self.model, self.batch(piece)) / s.accumulate
                    losses += loss.detach()
                    if s.step_in_backward:  # weights move during backward: the last moment to look
                        self.heard(losses)
                    loss.backward()
        except OutOfRange as error:
            raise self.failed(f"step {self.step}: {error}") from error
        self.heard(losses)
        if s.step_in_backward:
            return None
        norm = None
        if s.clip:
            norm = whole(nn.utils.clip_grad_norm_(self.raw.parameters(), s.clip))
            if not math.isfinite(norm):
                raise self.failed(f"the norm of the gradients is {norm} at step {self.step}")
        self.optimizer.step()
        return norm

    def heard(self, losses: Tensor) -> None:
        self.loss = self.parallel.mean(losses).item()
        if not math.isfinite(self.loss):
            raise self.failed(f"the loss is {self.loss} at step {self.step}")

    def failed(self, what: str) -> TrainingError:
        last = checkpoints.found(self.folder.checkpoints)[-1:]
        left = f"the last good state is {last[0]}" if last else "no checkpoint had been written yet"
        return TrainingError(f"{what}; {left}. A smaller lr or a longer warmup helps as a rule, with resume to go on")

    def forward(self, model: Any, tokens_BL: Tensor) -> Tensor:
        s = self.settings
        with torch.autocast(s.device, torch.bfloat16, enabled=s.precision == "bf16"):
            return model(tokens_BL[:, :-1], tokens_BL[:, 1:])

    def seed(self, piece: int) -> None:
        """What dropout and noise draw follows from seed, step and part of the batch, and from nothing drawn before."""
        s = self.settings
        if s.dropout or s.bits:
            number = (s.seed * 1_000_003 + self.step) * self.parallel.world * s.accumulate + self.part(piece)
            torch.manual_seed(number % 2**63)

    def part(self, piece: int) -> int:
        """Which part of the batch this process works on: all processes have one in each piece."""
        return piece * self.parallel.world + self.parallel.rank

    def batch(self, piece: int) -> Tensor:
        """This process's rows of a piece of the batch."""
        s, first = self.settings, self.part(piece) * self.rows
        mine = slice(first, first + self.rows)
        return self.data.train.batch(s.seed, self.step, s.batch, self.context, mine).to(s.device)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Held-out bits per byte."""
        self.model.eval()
        s, text = self.settings, self.data.held_out
        starts = text.spread(s.windows, self.context)
        mine = starts[self.parallel.rank :: self.parallel.world][: max(1, len(starts) // self.parallel.world)] or starts[:1]
        total = torch.zeros((), device=s.device)
        for i in range(0, len(mine), self.rows):
            rows = torch.stack([text.window(start, self.context + 1) for start in mine[i : i + self.rows]])
            total += self.forward(self.model, rows.to(s.device)).float() * len(rows)
        bits = self.parallel.mean(total / len(mine)).item() / math.log(2)
        self.record("evaluated", {"step": self.step, "held_out_bits": bits})

    def record(self, what: str, record: dict[str, Any]) -> None:
        if self.metrics:
            self.metrics.add(record)
        self.on_event(what, record)

    def save(self) -> None:
        """A checkpoint, unless the weights are spoilt."""
        self.parallel.at_rest(self.model)
        good = all(bool(torch.isfinite(local(p)).all()) for p in self.raw.parameters())
        if self.parallel.largest(not good):
            raise self.failed(f"weights are not finite after step {self.step}")
        s = self.settings
        kept = Kept(self.step, self.seconds, s.plain(), self.data.mark, random_state(s.device), tensors(self.raw, self.optimizer))
        if s.parallel == "fsdp":
            from .sharded import write_folder

            self.saved = write_folder(self.folder.checkpoints, kept, self.parallel)
        else:
            error = None
            try:
                if self.parallel.rank == 0:
                    self.saved = checkpoints.write(self.folder.checkpoints, kept)
            except TrainingError as found:
                error = found
            self.parallel.together(error)
        self.on_event("saved", {"step": self.step, "path": str(self.saved)})

    def load(self) -> None:
        """The last whole checkpoint, whatever number of processes wrote it; nothing where there is none."""
        found = checkpoints.found(self.folder.checkpoints)
        if not found:
            self.on_event("note", {"text": f"no checkpoint in {self.folder.checkpoints}: starting at step 1"})
            return
        kept = checkpoints.read(found[-1])
        others = differences(kept.settings, self.settings.plain())
        if kept.step > self.settings.steps:
            raise TrainingError(f"the run is at step {kept.step} already, steps {self.settings.steps} are behind it")
        if kept.data != self.data.mark:
            raise TrainingError(f"the data is not that of {found[-1]}: files were added, removed or changed in size")
        if kept.tensors is None:
            from .sharded import load_folder

            load_folder(found[-1], tensors(self.raw, self.optimizer))
        else:
            put(kept.tensors, self.raw, self.optimizer, str(found[-1]))
        self.step, self.seconds, self.saved = kept.step, kept.seconds, found[-1]
        set_random_state(kept.random, self.settings.device)
        self.on_event("note", {"text": f"resumed from {found[-1]}{': ' + ', '.join(others) if others else ''}"})


def whole(norm: Tensor) -> float:
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()  # type: ignore[operator]


def local(p: Tensor) -> Tensor:
    return p.to_local() if hasattr(p, "to_local") else p  # type: ignore[operator]
