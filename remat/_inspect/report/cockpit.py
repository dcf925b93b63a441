"""The page that `Explanation.save` writes: pictures and tables in one file, drawn by `cockpit.js`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from remat._core import Page, save_html

_STYLE = """
#cockpit { margin-bottom: 2em; --chosen: #fbe9dd; --box: #fff }
#cockpit h1 { font-size: 1.3em; margin: 0 0 .3em }
#cockpit h2 { font-size: 1em; margin: .8em 0 .2em }
#cockpit canvas { width: 100%; height: 214px; display: block }
#cockpit canvas.map { flex: 1 1 22em; width: 22em; max-width: 34em; height: 260px; cursor: pointer }
#cockpit .split { display: flex; flex-wrap: wrap; gap: .5em 2em; align-items: start }
#cockpit .split .wide { flex: 1 1 auto }
#cockpit input[type=range] { width: min(22em, 60vw); vertical-align: middle; accent-color: #d55e00 }
#cockpit output { font-weight: 600 }
#cockpit tr.chosen td { background: var(--chosen) }
#cockpit td button { all: unset; cursor: pointer }
#cockpit td button:focus-visible { outline: 2px solid #0072b2 }
#cockpit canvas:focus-visible { outline: 2px solid #0072b2 }
#cockpit .bar { display: flex; flex-wrap: wrap; gap: .4em 1.5em; align-items: center; margin: .5em 0 }
#cockpit .bar input[type=number] { width: 5em }
#cockpit .key { display: inline-flex; align-items: center; gap: .4em }
#cockpit .key i { width: 1em; height: 1em; border: 1px solid #444 }
#cockpit .yes::before { content: "\\2713\\a0"; font-weight: 700 }
#cockpit .no::before { content: "\\2717\\a0"; font-weight: 700 }
#cockpit #tip { position: absolute; pointer-events: none; background: var(--box); border: 1px solid #888 }
#cockpit #tip { padding: .3em .6em; font-size: 12px; white-space: pre; display: none; z-index: 1 }
#cockpit table { border-collapse: collapse; margin: .3em 0 1em }
#cockpit th, #cockpit td { padding: .15em .7em; border-bottom: 1px solid var(--line); text-align: left }
#cockpit th:first-child, #cockpit td:first-child { padding-left: 0 }
#cockpit th { white-space: nowrap }
#cockpit .wide { overflow-x: auto }
#cockpit .r { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
#cockpit th button { all: unset; cursor: pointer; font-weight: 600 }
#cockpit th button:focus-visible { outline: 2px solid #0072b2 }
@media (prefers-color-scheme: dark) { #cockpit { --chosen: #5a3213; --box: #2b2c31 } }
@media (max-width: 48em) {
  /* A row is a few lines of figures with their names: no column is off the screen. */
  #cockpit table, #cockpit tbody { display: block }
  #cockpit thead { display: none }
  #cockpit tr { display: flex; flex-wrap: wrap; gap: 0 1em; border-bottom: 1px solid var(--line) }
  #cockpit td { border: 0; padding: .1em 0; overflow-wrap: anywhere }
  #cockpit td:empty { display: none }
  #cockpit td::before { content: attr(data-head) " "; opacity: .65 }
}
"""


def save_cockpit(page: Page, record: dict[str, Any], path: str | Path) -> None:
    """Write the page with `record` drawn above its tables."""
    large = [choice.pop("data") for choice in record["choices"]]
    scripts = [_data("cockpit-data", record)]
    scripts += [_data(f"cockpit-choice-{i}", choice) for i, choice in enumerate(large)]
    here = Path(__file__).parent
    code = "".join((here / name).read_text(encoding="utf-8") for name in ("numbers.js", "cockpit.js"))
    above = (
        '<div id="cockpit"><noscript>The pictures need JavaScript, the report does not.</noscript></div>'
        f"{''.join(scripts)}<script>{code}</script>"
    )
    save_html(page, path, style=_STYLE, above=above)


def _data(name: str, record: dict[str, Any]) -> str:
    # Inside a script element HTML is not read, except for its end: no text of the user's may look like one.
    data = json.dumps(record, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")
    return f'<script type="application/json" id="{name}">{data}</script>'
