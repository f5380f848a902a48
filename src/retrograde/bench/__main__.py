"""`retrograde bench` where torch is all there is: the same options, the same report, and no pictures.

python -m retrograde.bench --device cuda --depth 12 24 --variants 'reverse*' --json bench.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .._base.given import writable
from .._base.loading import Refused
from .._base.report import origin, save, size
from ..models.blocks import DTYPES, net_of
from .compare import Comparison, Found, Measured, compare_gradients, measure_all, versions
from .depth import Parser
from .setting import setting_of, variants_of

PROG = "python -m retrograde.bench"


def make_parser() -> Parser:
    parser = Parser(PROG, description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--block", metavar="MODULE:FACTORY", help="your block, as for `retrograde bench`")
    for name, what in (
        ("dim", "width of a stream"),
        ("heads", "attention heads, of our block"),
        ("seq", "tokens in a sequence"),
        ("batch", "sequences in a step"),
        ("rounds", "timed steps"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="INT", help=what)
    parser.add_argument("--shape", type=int, nargs="+", default=(), metavar="INT", help="of the input, if not (batch, seq, dim)")
    parser.add_argument("--depth", type=int, nargs="+", default=(), metavar="INT", help="numbers of blocks")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="precision of parameters and input")
    parser.add_argument("--autocast", choices=["auto", "none", "bfloat16", "float16"], default="auto")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--variants", nargs="+", default=(), metavar="NAME", help="names or patterns, as 'reverse*'")
    parser.add_argument("--budget", nargs="+", default=(), metavar="SIZE", help="measure rg.Budget of this size too, as 3GiB")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes, in the report")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one variant may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here")
    return parser


def measure(options: argparse.Namespace, argv: Sequence[str]) -> Comparison:
    """The report; each row is printed when it is there."""
    setting = setting_of(options)
    asked = variants_of(options, setting["device"])
    writable(options.json, "--json")
    net_of({**setting, "device": "cpu"}, 1)  # a block that cannot be made is reported before anything starts
    found: list[Measured] = []

    def ends(one: Measured) -> None:
        found.append(one)
        print(line(one.row), flush=True)

    measure_all(setting, asked, lambda depth, variant: None, ends)
    return Comparison(
        **origin(setting["device"], PROG, argv),
        setting={**setting, "variants": [variant.as_dict() for variant in asked]},
        rows=compare_gradients(found),
        versions=versions(),
    )


def line(row: Found) -> str:
    start = f"{row.depth:>4}  {row.variant:<26}"
    if row.seconds is None:
        return f"{start} {row.failed}: {row.detail}"
    t = row.seconds
    times = f"{t.median * 1e3:>9.1f} ms ({t.low * 1e3:.1f} to {t.high * 1e3:.1f})"
    return f"{start} {times:<36} activations {size(row.activation_bytes or 0):>10}, whole peak {size(row.peak_bytes or 0):>10}"


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    options = parser.parse_args(argv)
    try:
        report = measure(options, argv)
    except Refused as refusal:
        parser.error(str(refusal))
    print(report.where(), report.what(), sep="\n")
    if options.json:
        save(options.json, report)
    return 0 if any(row.failed is None for row in report.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
