"""Make one HTML page of a training run: reward, KL, entropy, gradient norm, time, memory, drift.

Reads what the trainer has logged (`trainer_state.json` of the run's last checkpoint, or of its
output_dir after trainer.save_state()). The page holds its plots itself, and can be sent to somebody
as it is. What a run did not log is left out, and the page says so.

  longstraw report out                          writes out/report.html
  longstraw report out --output run7.html
  longstraw report out --json                   numbers instead of a page; needs no matplotlib

Plots need matplotlib: pip install 'longstraw[plot]'
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DataError, LongStrawError

if TYPE_CHECKING:
    from .run_log import RunLog


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longstraw report`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="output_dir, or a checkpoint")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where the page goes (default: RUN_DIR/report.html)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print all series as JSON, and make no page without --output",
    )


def run(args: argparse.Namespace) -> int:
    """Write the page, or print the numbers; 2 if there is nothing to read or to draw with."""
    from .run_log import read_run

    try:
        log = read_run(args.run_dir)
        if args.json:
            series = {
                name: {"steps": s.steps, "values": s.values, **s.summary()}
                for name, s in log.series.items()
            }
            report = {"file": str(log.file), "steps": log.num_steps, "series": series}
            print(json.dumps(report | {"left_out": log.num_left_out}, indent=2))
        if args.output is not None or not args.json:
            output = args.output or args.run_dir / "report.html"
            missing = _write_page(log, output)
            out = sys.stderr if args.json else sys.stdout
            print(f"wrote {output}", file=out)
            if missing:
                print(f"not logged by this run, and left out: {', '.join(missing)}", file=out)
    except LongStrawError as error:
        print(f"longstraw report: {error}", file=sys.stderr)
        return 2
    return 0


def _write_page(log: "RunLog", output: Path) -> list[str]:
    """Draw and write; returns the titles of what could not be drawn."""
    try:
        from .run_plots import draw_panels
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise DataError(
            "matplotlib is not installed, and the plots need it. pip install 'longstraw[plot]', or "
            "print the numbers with --json."
        ) from None
    from .run_page import make_page

    panels = draw_panels(log)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(make_page(log, panels), encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{output} cannot be written: {error.strerror}. Give another --output."
        ) from None
    return [panel.title for panel in panels if not panel.svg]
