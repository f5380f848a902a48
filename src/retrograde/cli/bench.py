"""`retrograde bench`: your block under every way to train it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from .._base.given import picture, writable
from .._base.report import origin
from ..bench.compare import Comparison, Measured, compare_gradients, measure_all, versions
from ..bench.setting import setting_of, variants_of
from ..bench.variants import Variant
from ..models.blocks import net_of
from .bench_table import doubts, kernels, notes, table
from .options import Autocast, Device, Dtype, Factory, File, Flag, Names, Number, Numbers, Sizes
from .screen import console, keep, progress


@dataclass
class Options:
    """Compare time, memory and gradients of your block under every way to train it.

    Each variant runs in a process of its own, so one that runs out of memory leaves the others alone. Sizes that are not given
    are small on a CPU and large on a GPU.
    """

    block: Factory = None
    """Your block: a function that takes nothing, the width, or sizes by name (dim, heads); by default, attention and an MLP.
    It returns a pair (f, g), or a module with f and g."""
    dim: Number = None
    """Width of a stream."""
    heads: Number = None
    """Attention heads, of our block."""
    seq: Number = None
    """Tokens in a sequence."""
    batch: Number = None
    """Sequences in a step."""
    shape: Numbers = ()
    """Shape of the input, if it is not (batch, seq, dim)."""
    depth: Numbers = ()
    """Numbers of blocks, one or several."""
    dtype: Dtype = "float32"
    """Precision of parameters and input."""
    autocast: Autocast = "auto"
    """auto is bfloat16 for float32 on a GPU, none elsewhere."""
    device: Device = "auto"
    """auto uses a GPU if there is one."""
    variants: Names = ()
    """Names or patterns, as 'reverse*'; all by default. `ordinary` is always measured, as the others are compared with it."""
    budget: Sizes = ()
    """Measure rg.Budget of this size too, as 3GiB; one or several."""
    rounds: Number = None
    """Timed steps."""
    profile: Flag = False
    """Show where the time of a step goes: matrix products, attention, the rest, and waiting for the host."""
    timeout: float = 900
    """Seconds that one variant may take, compiling included."""
    seed: int = 0
    """Seed of parameters and input."""
    json: File = None
    """Write the report here; - writes it to stdout, instead of the table."""
    plot: File = None
    """Draw time against memory at the largest depth, as .png, .svg or .pdf."""
    plot_depth: File = None
    """Draw memory against depth, as .png, .svg or .pdf."""
    traceback: Flag = False
    """Show the whole traceback of an error in your code."""


def run(options: Options) -> int:
    setting = setting_of(options)
    asked = variants_of(options, setting["device"])
    draw = drawing(options)
    net_of({**setting, "device": "cpu"}, 1)  # a block that cannot be made is reported before anything starts
    found: list[Measured] = []
    interrupted = False
    with progress() as bar:
        task = bar.add_task("", total=len(asked) * len(setting["depth"]))

        def starts(depth: int, variant: Variant) -> None:
            bar.update(task, description=f"{variant.name}, depth {depth}")

        def ends(one: Measured) -> None:
            found.append(one)
            bar.advance(task)

        try:
            measure_all(setting, asked, starts, ends)
        except KeyboardInterrupt:
            interrupted = True
    report = Comparison(
        **origin(setting["device"], "retrograde bench", sys.argv[2:]),
        setting={**setting, "variants": [variant.as_dict() for variant in asked]},
        rows=compare_gradients(found),
        versions=versions(),
    )
    if not keep(options.json, report):
        show(report, options.traceback)
    measured = any(row.failed is None for row in report.rows)
    if measured:
        draw(report)
    if interrupted:
        raise KeyboardInterrupt
    return 0 if measured else 1


def drawing(options: Options) -> Callable[[Comparison], None]:
    """Draws what is asked for; what would stand in the way is reported at once."""
    writable(options.json, "--json")
    picture(options.plot, "--plot")
    picture(options.plot_depth, "--plot-depth")
    if not (options.plot or options.plot_depth):
        return lambda report: None
    from ..bench.frontier import draw_depth, draw_frontier

    def draw(report: Comparison) -> None:
        if options.plot:
            draw_frontier(report, options.plot)
        if options.plot_depth:
            draw_depth(report, options.plot_depth)

    return draw


def show(report: Comparison, traceback: bool) -> None:
    out = console()
    out.print(report.where(), report.what(), sep="\n", soft_wrap=True)
    if report.rows:
        out.print(table(report.rows))
        if any(row.kernels for row in report.rows):
            out.print(kernels(report.rows))
    for line in (*notes(report.rows), *doubts(report)):
        out.print(line, soft_wrap=True, markup=False)
    for text in dict.fromkeys(row.traceback for row in report.rows if row.traceback) if traceback else ():
        out.print("", text.rstrip(), sep="\n", soft_wrap=True, markup=False)
