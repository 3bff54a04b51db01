"""The HTML page: one file, nothing loaded from elsewhere. Its script only shows values under the pointer."""

import html
import math
import pathlib

from k3jax.report import catalog, svg
from k3jax.report.axis import Axis
from k3jax.report.charts import Card
from k3jax.report.differences import differences, flatten
from k3jax.report.evaluation import source_rows
from k3jax.report.marks import describe, marks
from k3jax.report.numbers import MISSING, NUMBERS, count, duration, percent, status
from k3jax.report.palette import COLORS, DARK, LIGHT
from k3jax.report.run import Event, Run

MAX_SAMPLE = 20_000  # characters shown
MAX_ROWS = 400  # of a table


def render(runs: list[Run], axis: Axis, cards: list[Card]) -> str:
    """The whole page as text."""
    sections = {name: "".join(shown) for name, shown in _sections(runs, axis, cards).items() if shown}
    words = {**catalog.SECTIONS, "numbers": "Results", "sample": "Sample", "settings": "Settings and events"}
    body = "".join(f'<h2 id="{key}">{words[key]}</h2><div class=cards>{shown}</div>' for key, shown in sections.items())
    links = "".join(f'<a href="#{name}">{words[name]}</a>' for name in sections)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    folder = pathlib.Path(__file__).parent
    return _PAGE.format(
        title=html.escape(f"{title} · k3jax"),
        style=_colors() + (folder / "page.css").read_text(encoding="utf-8"),
        script=(folder / "page.js").read_text(encoding="utf-8"),
        body=f"{_header(runs)}<nav>{links}</nav>{body}",
    )


def _sections(runs: list[Run], axis: Axis, cards: list[Card]) -> dict[str, list[str]]:
    happened = [marks(run, axis) for run in runs]
    sections: dict[str, list[str]] = {name: [] for name in ("numbers", *catalog.SECTIONS, "sample", "settings")}
    if len(runs) > 1:
        sections["numbers"].append(_results(runs))
        sections["numbers"].append(_several("Configuration differences", differences(runs), runs))
    for card in cards:
        sections[card.section].append(svg.card(card, happened, axis.quantity))
    sections["loss"].append(_compression(runs))
    sections["speed"] += [_clock(run, several=len(runs) > 1) for run in runs]
    sections["evaluation"].insert(0, _sources(runs))
    sections["sample"] += [_sample(run, several=len(runs) > 1) for run in runs]
    sections["settings"] += [_events(run, several=len(runs) > 1) for run in runs]
    if len(runs) == 1:
        sections["settings"].append(_table("Configuration", flatten(runs[0].config)))
        sections["settings"].append(_table("Environment", flatten(runs[0].environment), opened=True))
    else:
        sections["settings"].append(_several("Environment", _side_by_side(runs), runs))
    return {name: [part for part in parts if part] for name, parts in sections.items()}


def _header(runs: list[Run]) -> str:
    single = len(runs) == 1
    title = html.escape(runs[0].name) if single else f"{len(runs)} runs"
    lines = []
    for number, run in enumerate(runs):
        state = status(run)
        name = "" if single else f'<b class="chip c{number % COLORS}">{html.escape(run.name)}</b>'
        lines.append(f"<p class='status {state.word}'>{name}<em>{state.word}</em>{html.escape(state.text)}</p>")
    tiles = ""
    if single:
        values = [(number.name, number.text(runs[0])) for number in NUMBERS]
        tiles = "".join(
            f"<div class=tile><b>{value}</b><span>{name}</span></div>" for name, value in values if value != MISSING
        )
        tiles = f"<div class=tiles>{tiles}</div>"
    return f"<header><p class=brand>k3jax</p><h1>{title}</h1>{''.join(lines)}{tiles}</header>"


def _results(runs: list[Run]) -> str:
    """Rows of numbers, a column per run, the better one in bold."""
    rows = []
    for number in NUMBERS:
        values = [number.value(run) for run in runs]
        known = [value for value in values if value is not None and math.isfinite(value)]
        if not known:
            continue
        best = {"low": min, "high": max}[number.better](known) if number.better and len(set(known)) > 1 else None
        cells = "".join(
            f"<td{' class=best' if best is not None and value == best else ''}>{number.text(run)}</td>"
            for run, value in zip(runs, values)
        )
        rows.append(f"<tr><th>{number.name}</th>{cells}</tr>")
    for name in {name: None for run in runs for name in run.baselines}:
        sizes = [run.baselines.get(name) for run in runs]
        cells = "".join(f"<td>{MISSING if size is None else format(size['whole'], '.3f')}</td>" for size in sizes)
        rows.append(f"<tr><th>{html.escape(name)} on the held-out files</th>{cells}</tr>")
    return (
        f"<section class='card wide'><h3>Final numbers</h3><div class=scroll><table class=several>{_head(runs)}"
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _head(runs: list[Run]) -> str:
    names = "".join(
        f'<th><span class="chip c{i % COLORS}">{html.escape(run.name)}</span></th>' for i, run in enumerate(runs)
    )
    return f"<thead><tr><th></th>{names}</tr></thead>"


def _several(title: str, rows: list[tuple[str, list[str]]], runs: list[Run]) -> str:
    """A table with a column per run."""
    if not rows:
        none = "The runs have the same configuration." if all(run.config for run in runs) else "Not every run has one."
        return f"<section class='card wide'><h3>{title}</h3><p>{none}</p></section>" if "Conf" in title else ""
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td class=code>{html.escape(v)}</td>' for v in values)}</tr>"
        for name, values in rows[:MAX_ROWS]
    )
    more = f"<p>{len(rows) - MAX_ROWS} more are in the runs' folders.</p>" if len(rows) > MAX_ROWS else ""
    return (
        f"<section class='card wide'><h3>{title}</h3><div class=scroll><table class=several>{_head(runs)}"
        f"<tbody>{cells}</tbody></table></div>{more}</section>"
    )


def _side_by_side(runs: list[Run]) -> list[tuple[str, list[str]]]:
    tables = [dict(flatten(run.environment)) for run in runs]
    names = {name: None for table in tables for name in table}
    return [(name, [table.get(name, MISSING) for table in tables]) for name in names]


def _sources(runs: list[Run]) -> str:
    rows = source_rows(runs)
    if not rows:
        return ""
    cells = [(name, [MISSING if value is None else f"{value:.3f}" for value in values]) for name, values in rows]
    return _several("Held-out bits per byte by source", cells, runs)


def _clock(run: Run, *, several: bool) -> str:
    """Bars: what the wall-clock time went into."""
    rows = sorted(((seconds, name) for name, seconds in run.clock.items() if seconds), reverse=True)
    total = sum(seconds for seconds, _ in rows)
    bars = "".join(
        f'<div class="bar other"><span>{html.escape(name.replace("_", " "))}</span>'
        f'<i style="width:{100 * seconds / rows[0][0]:.1f}%"></i>'
        f"<b>{duration(seconds)}, {percent(seconds / total)}</b></div>"
        for seconds, name in rows
    )
    title = f"Wall-clock time of {html.escape(run.name)}" if several else "Wall-clock time"
    return f"<section class='card half'><h3>{title}</h3><div class=bars>{bars}</div></section>" if bars else ""


def _compression(runs: list[Run]) -> str:
    """Bars: the models against gzip and xz on the same held-out files."""
    baselines = next((run.baselines for run in runs if run.baselines), {})
    models = [(run.name if len(runs) > 1 else "this model", run.bits_per_byte) for run in runs]
    kinds = [f"model c{i % COLORS}" if len(runs) > 1 else "model" for i in range(len(runs))]
    rows = [(*model, kind) for model, kind in zip(models, kinds) if model[1] is not None and math.isfinite(model[1])]
    if not baselines or not rows:
        return ""
    for name, sizes in baselines.items():
        rows.append((f"{name}, all files as one", sizes["whole"], "other"))
        rows.append((f"{name}, each file alone", sizes["per_file"], "other"))
    longest = max(value for _, value, _ in rows)
    bars = "".join(
        f'<div class="bar {kind}"><span>{html.escape(name)}</span>'
        f'<i style="width:{100 * value / longest:.1f}%"></i><b>{value:.3f}</b></div>'
        for name, value, kind in sorted(rows, key=lambda row: row[1])
    )
    text = _verdict(runs[0]) if len(runs) == 1 else "Bits per byte on the held-out files of the first run."
    return f"<section class='card wide'><h3>Against gzip and xz</h3><div class=bars>{bars}</div><p>{text}</p></section>"


def _verdict(run: Run) -> str:
    size = run.summary.get("held_out_bytes")
    amount = f"{count(size)}{'B' if size >= 10**4 else ' bytes'} of " if size else ""
    where = f"the same {amount}held-out files"
    text = f"Bits per byte on {where}, with gzip at -9 and xz at -9e. "
    for name, sizes in run.baselines.items():
        ratio = run.bits_per_byte / sizes["whole"]
        text += f"The model needs {abs(1 - ratio):.0%} {'fewer' if ratio < 1 else 'more'} bits than {name}. "
    return html.escape(
        text + "It has learned from other files and its weights are not counted; the compressors start from nothing, "
        "but over all files as one they can look back at every earlier file, where the model sees one row."
    )


def _sample(run: Run, *, several: bool) -> str:
    if not run.sample:
        return ""
    prompt = str(run.config.get("sample_prompt") or "")
    prompt = prompt if run.sample.startswith(prompt) else ""
    notes = ["Written by the model after the highlighted prompt."] if prompt else []
    notes += ["Shortened; the whole text is in sample.txt."] if len(run.sample) > MAX_SAMPLE else []
    text = f"<b>{_visible(prompt)}</b>{_visible(run.sample[len(prompt) : MAX_SAMPLE])}"
    title = f"<h3>{html.escape(run.name)}</h3>" if several else ""
    return f"<section class='card wide'>{title}<pre>{text}</pre><p>{' '.join(notes)}</p></section>"


def _visible(text: str) -> str:
    """Escaped, with control characters but line breaks and tabs as their pictures."""
    pictures = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: "\u2421"}
    return html.escape(text.translate(pictures))


def _events(run: Run, *, several: bool) -> str:
    def row(event: Event) -> str:
        name, details = html.escape(event.name.replace("_", " ")), html.escape(describe(event))
        return f"<tr><th>step {event.step:,}</th><td>{name}</td><td>{details}</td></tr>"

    title = f"Events of {html.escape(run.name)}" if several else "Events"
    return _details(title, [row(event) for event in run.events], "events", opened=len(run.events) <= 12)


def _table(title: str, rows: list[tuple[str, str]], *, opened: bool = False) -> str:
    cells = [f"<tr><th>{html.escape(n)}</th><td class=code>{html.escape(v)}</td></tr>" for n, v in rows if n]
    return _details(title, cells, "values", opened=opened)


def _details(title: str, rows: list[str], what: str, *, opened: bool) -> str:
    if not rows:
        return ""
    more = f"<p>{len(rows) - MAX_ROWS} more are in the run's folder.</p>" if len(rows) > MAX_ROWS else ""
    return (
        f"<section class='card wide'><details{' open' if opened else ''}><summary><h3>{title}</h3>"
        f"<span>{len(rows)} {what}</span></summary><table><tbody>{''.join(rows[:MAX_ROWS])}</tbody></table>{more}"
        "</details></section>"
    )


def _colors() -> str:
    light, dark = ("".join(f"--{name}:{color};" for name, color in theme.items()) for theme in (LIGHT, DARK))
    return f":root{{{light}}}\n@media(prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
<script>
{script}</script>
</body>
</html>
"""
