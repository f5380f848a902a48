"""The kinds of options that commands share, so that their help reads alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

Number = Annotated[int | None, arg(metavar="INT", help_behavior_hint="")]
Real = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")]
Numbers = Annotated[tuple[int, ...], arg(metavar="INT ...", help_behavior_hint="")]
Names = Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="")]
Size = Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="")]
Sizes = Annotated[tuple[str, ...], arg(metavar="SIZE ...", help_behavior_hint="")]
Text = Annotated[str, arg(metavar="TEXT", help_behavior_hint="")]
Policy = Annotated[str | None, arg(metavar="POLICY", help_behavior_hint="")]
File = Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")]
Paths = Annotated[tuple[Path, ...], arg(metavar="PATH ...", help_behavior_hint="")]
Factory = Annotated[str | None, arg(metavar="MODULE:FACTORY", help_behavior_hint="")]
Net = Annotated[Positional[str | None], arg(metavar="[MODULE:FACTORY]", help_behavior_hint="")]
Flag = Annotated[bool, arg(help_behavior_hint="")]

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Autocast = Literal["auto", "none", "bfloat16", "float16"]
Arithmetic = Literal["auto", "float", "exact"]
