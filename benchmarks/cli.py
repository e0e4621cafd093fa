"""What the programs that measure share: their options, and the record that a run fills or an earlier one left."""

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.peers import load
from benchmarks.records import MeasuredRow, Record, new_record

P = TypeVar("P")
R = TypeVar("R")
M = TypeVar("M", bound=MeasuredRow[Any])


def positive(convert: type[int] | type[float]) -> Callable[[str], float]:
    """The type of an option whose values are positive numbers."""

    def parse(text: str) -> float:
        value = convert(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"must be positive, got {text}")
        return value

    # Argparse names the type when the text is no number at all.
    parse.__name__ = convert.__name__
    return parse


def new_parser(prog: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """A parser that shows its texts as they are written."""
    return argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [options]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_choices(parser: argparse.ArgumentParser, name: str, options: Sequence[str], default: Sequence[str]) -> None:
    """Adds `--name`, which takes one or more of the options."""
    listed = ", ".join(repr(option) if " " in option else option for option in options)
    metavar = name.removesuffix("s").upper()
    parser.add_argument(
        f"--{name}", nargs="+", choices=options, default=default, metavar=metavar, help=f"among {listed}"
    )


def add_measurement_options(
    parser: argparse.ArgumentParser, *, seconds: float, device_clock: str, call_clock: bool = False
) -> None:
    """Adds how to measure and where results go.

    Args:
        parser: gets the options.
        seconds: default budget of one measurement.
        device_clock: what the device's clock measures, for the help text.
        call_clock: whether it can also measure calls one by one.
    """
    parser.add_argument("--seed", type=int, default=0, help="of operands and group sizes")
    parser.add_argument(
        "--seconds",
        type=positive(float),
        default=seconds,
        help=f"budget of one measurement (default: {seconds:g})",
    )
    parser.add_argument("--calls", type=positive(int), help="calls per block (default: what fits in the budget)")
    parser.add_argument(
        "--clock",
        choices=("host", "device", *(("call",) if call_clock else ())),
        default="host",
        help=f"the host's clock, or the GPU's own by a profile of {device_clock}"
        f"{', or of calls one by one' if call_clock else ''} (default: host)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rows into this PNG")
    parser.add_argument("--load", type=Path, metavar="FILE", help="measure nothing, show the rows of an earlier run")


def load_peers(names: list[str], loaders: Mapping[str, Callable[[], P]]) -> dict[str, P]:
    """The peers that can run here; prints why the others can't."""
    peers, reasons = load(names, loaders)
    for name, reason in reasons.items():
        print(f"skipped {name}: {reason}")
    return peers


def obtain(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    parse: Callable[[dict[str, Any]], R],
    measure: Callable[[argparse.Namespace], Record[R]],
) -> Record[R]:
    """The rows of the run that `--load` names, parsed one by one, or else of this run.

    Ends the program if there are none, or if a file can't be read or written.
    """
    for path in (arguments.json, arguments.plot):
        if path and not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}")
    # Read when JAX first looks for devices, which nothing has done yet.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if arguments.load:
        try:
            record = Record.read(arguments.load, parse)
        except (OSError, ValueError, TypeError, KeyError) as error:
            parser.error(f"--load: {error}")
    else:
        record = measure(arguments)
    if not record.rows:
        parser.error("nothing was measured: none of the chosen peers can run here")
    return record


def how(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the plan of every program takes from `add_measurement_options`."""
    options = {name: getattr(arguments, name) for name in ("seed", "seconds", "calls")}
    return options | {"device_clock": arguments.clock == "device"}


def show(
    arguments: argparse.Namespace, record: Record[R], plot: Callable[[Record[R], Path], None], *texts: str | None
) -> None:
    """Prints the texts that there are, and draws the record where `--plot` says."""
    for text in filter(None, texts):
        print(f"\n{text}")
    if arguments.plot:
        plot(record, arguments.plot)


def collect(arguments: argparse.Namespace, rows: Iterable[M]) -> Record[M]:
    """A record of the rows; each is printed, and written to `--json`, as soon as it is there."""
    record: Record[M] = new_record({name: getattr(arguments, name) for name in ("seed", "seconds", "calls", "clock")})
    for row in rows:
        record.rows.append(row)
        result = row.reason or f"{row.milliseconds:.3f} ms"
        print(f"{', '.join(row.labels)}: {result}", flush=True)
        if arguments.json:
            record.write(arguments.json)  # After every row: a run that is cut short leaves what it measured.
    return record
