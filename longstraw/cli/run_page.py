"""A run as one HTML page that needs nothing else: scripts, styles or pictures from elsewhere."""

import base64
import html
from collections.abc import Iterator

from .run_log import RunLog
from .run_plots import Panel

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 72rem;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; }
h2 { font-size: 1.1rem; margin: 0 0 .2rem; }
.note { color: #666; font-size: .85rem; margin: 0 0 .4rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(26rem, 1fr));
          gap: 1.6rem; }
.panels img { width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .9rem .15rem 0; text-align: right; border-bottom: 1px solid #e6e6e6; }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace; }
section { margin-top: 2rem; }
"""
_COLUMNS = ("first", "last", "min", "max", "mean")


def make_page(log: RunLog, panels: list[Panel]) -> str:
    """The page's text. Names from the log are escaped."""
    name = html.escape(str(log.file.parent))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>LongStraw: {name}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{name}</h1>",
            f'<p class="note">{log.num_steps:,} optimizer steps, from '
            f"{html.escape(str(log.file))}. A point is the mean since the point before.</p>",
            '<div class="panels">',
            *(_panel(panel) for panel in panels if panel.svg),
            "</div>",
            *_missing(log, panels),
            *_table(log),
            "</body></html>",
        ]
    )


def _panel(panel: Panel) -> str:
    picture = base64.b64encode(panel.svg.encode()).decode()
    title = html.escape(panel.title)
    return (
        f'<div><h2>{title}</h2><p class="note">{html.escape(panel.note)}</p>'
        f'<img alt="{title}" src="data:image/svg+xml;base64,{picture}"></div>'
    )


def _missing(log: RunLog, panels: list[Panel]) -> Iterator[str]:
    absent = [panel for panel in panels if not panel.svg]
    if not absent and not log.num_left_out:
        return
    yield "<section><h2>Left out</h2><ul>"
    for panel in absent:
        names = ", ".join(f"<code>{html.escape(name)}</code>" for name in panel.missing)
        note = html.escape(panel.note)
        yield f"<li>{html.escape(panel.title)}: the run did not log {names}. {note}</li>"
    for name, count in log.num_left_out.items():
        yield f"<li><code>{html.escape(name)}</code>: {count} values that are no finite number</li>"
    yield "</ul></section>"


def _table(log: RunLog) -> Iterator[str]:
    yield "<section><h2>Everything that was logged</h2><table><tr><th>metric</th><th>points</th>"
    yield "".join(f"<th>{column}</th>" for column in _COLUMNS) + "</tr>"
    for name, series in log.series.items():
        summary = series.summary()
        cells = "".join(f"<td>{summary[column]:,.5g}</td>" for column in _COLUMNS)
        count = len(series.values)
        yield f"<tr><td>{html.escape(name)}</td><td>{count}</td>{cells}</tr>"
    yield "</table></section>"
