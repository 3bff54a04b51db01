"""The HTML page: one file, no script, nothing loaded from elsewhere."""

import html
import math
import pathlib

from k3jax.report.charts import DARK, LIGHT, page_charts
from k3jax.report.run import Run

MAX_SAMPLE = 20_000  # characters shown
MAX_ROWS = 400  # of a table

NOTES = {
    "loss": "Bits needed per byte of text, on a log scale; lower is better. The strong line is a running mean of the "
    "pale one, the training batches. Dashed: what a general compressor needs for all held-out files as one.",
    "grad_norm": "Before clipping.",
    "update_rms": "Root mean square of one step's change, by kind of parameter.",
    "balance": "Tokens of the busiest expert over the mean of its layer, one row per MoE layer. 1x is an even load.",
    "dead_share": "Share of a layer's experts that received no token in a step.",
}


def render(run: Run) -> str:
    """The whole page as text."""
    charts = page_charts(run)
    parts = (
        _header(run),
        _compression(run),
        _card("Loss", "loss", charts),
        _halves(charts),
        _card("Expert balance", "balance", charts),
        _card("Experts without a token", "dead_share", charts),
        _sample(run),
        _table("Configuration", _flatten(run.config), opened=False),
        _table("Environment", _flatten(run.environment), opened=True),
    )
    return _PAGE.format(title=html.escape(f"{run.name} · k3jax"), style=_style(), body="\n".join(filter(None, parts)))


def _header(run: Run) -> str:
    size = [run.config.get(name) for name in ("batch", "seq_len")]
    tokens = run.train[-1]["step"] * size[0] * size[1] if all(isinstance(x, int) for x in size) else None
    tiles = {
        "held-out bits per byte": _number(run.bits_per_byte),
        "from start to finish" if run.finished else "so far": _duration(run.seconds),
        "steps": f"{run.train[-1]['step']:,}",
        "tokens read": _count(tokens),
        "parameters": _count(run.summary.get("parameters")),
        "active per token": _count(run.summary.get("active_parameters")),
    }
    shown = "".join(
        f"<div class=tile><b>{value}</b><span>{name}</span></div>" for name, value in tiles.items() if value
    )
    state = "" if run.finished else "<p class=note>The run had not finished when this page was made.</p>"
    name = html.escape(run.name)
    return f"<header><p class=brand>k3jax</p><h1>{name}</h1>{state}<div class=tiles>{shown}</div></header>"


def _compression(run: Run) -> str:
    """Bars: the model against gzip and xz on the same held-out files."""
    if not run.baselines or run.bits_per_byte is None:
        return ""
    rows = [("this model", run.bits_per_byte, "model")]
    for name, sizes in run.baselines.items():
        rows.append((f"{name}, all files as one", sizes["whole"], "other"))
        rows.append((f"{name}, each file alone", sizes["per_file"], "other"))
    longest = max(value for _, value, _ in rows)
    bars = "".join(
        f'<div class="bar {kind}"><span>{html.escape(name)}</span>'
        f'<i style="width:{100 * value / longest:.1f}%"></i><b>{value:.3f}</b></div>'
        for name, value, kind in sorted(rows, key=lambda row: row[1])
    )
    text = _verdict(run)
    return f"<section class=card><h2>Against gzip and xz</h2><div class=bars>{bars}</div><p>{text}</p></section>"


def _verdict(run: Run) -> str:
    size = run.summary.get("held_out_bytes")
    where = f"the same {_count(size)}B of held-out files" if size else "the same held-out files"
    text = f"Bits per byte on {where}, with gzip at -9 and xz at -9e. "
    for name, sizes in run.baselines.items():
        ratio = run.bits_per_byte / sizes["whole"]
        text += f"The model needs {abs(1 - ratio):.0%} {'fewer' if ratio < 1 else 'more'} bits than {name}. "
    return html.escape(
        text + "It has learned from other files and its weights are not counted; the compressors start from nothing, "
        "but over all files as one they can look back at every earlier file, where the model sees one row."
    )


def _card(title: str, name: str, charts: dict[str, str], kind: str = "wide") -> str:
    if name not in charts:
        return ""
    note = f"<p>{NOTES[name]}</p>" if name in NOTES else ""
    return f'<section class="card {kind}"><h2>{title}</h2><div class=chart>{charts[name]}</div>{note}</section>'


def _halves(charts: dict[str, str]) -> str:
    titles = {
        "grad_norm": "Gradient norm",
        "update_rms": "Update size by role",
        "lr": "Learning rate",
        "tokens_per_second": "Tokens per second",
    }
    cards = "".join(_card(title, name, charts, "half") for name, title in titles.items())
    return f"<div class=halves>{cards}</div>" if cards else ""


def _sample(run: Run) -> str:
    if not run.sample:
        return ""
    prompt = run.config.get("sample_prompt") or ""
    prompt = prompt if run.sample.startswith(prompt) else ""
    notes = ["Written by the model after the highlighted prompt."] if prompt else []
    notes += ["Shortened; the whole text is in sample.txt."] if len(run.sample) > MAX_SAMPLE else []
    text = f"<b>{_visible(prompt)}</b>{_visible(run.sample[len(prompt) : MAX_SAMPLE])}"
    return f"<section class=card><h2>Sample</h2><pre>{text}</pre><p>{' '.join(notes)}</p></section>"


def _visible(text: str) -> str:
    """Escaped, with control characters but line breaks and tabs as their pictures."""
    pictures = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: "\u2421"}
    return html.escape(text.translate(pictures))


def _flatten(value, path: str = "") -> list[tuple[str, str]]:
    """Dotted path and text of every leaf."""
    if isinstance(value, dict) and value:
        return [row for key, item in value.items() for row in _flatten(item, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        return [row for number, item in enumerate(value) for row in _flatten(item, f"{path}[{number}]")]
    if isinstance(value, list):
        return [(path, ", ".join(map(str, value)))]
    return [(path, "none" if value is None else str(value))]


def _table(title: str, rows: list[tuple[str, str]], *, opened: bool) -> str:
    rows = [(name, value) for name, value in rows if name]
    if not rows:
        return ""
    cells = "".join(f"<tr><th>{html.escape(n)}</th><td>{html.escape(v)}</td></tr>" for n, v in rows[:MAX_ROWS])
    more = f"<p>{len(rows) - MAX_ROWS} more are in the run's folder.</p>" if len(rows) > MAX_ROWS else ""
    return (
        f"<section class=card><details{' open' if opened else ''}><summary><h2>{title}</h2>"
        f"<span>{len(rows)} values</span></summary><table>{cells}</table>{more}</details></section>"
    )


def _number(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.3f}"


def _count(value: int | None) -> str:
    """1234 is 1,234 and 5312448 is 5.31 M."""
    if value is None:
        return ""
    for size, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= size and value >= 10**4:
            return f"{value / size:.3g} {unit}"
    return f"{value:,}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def _style() -> str:
    light, dark = ("".join(f"--{name}:{color};" for name, color in theme.items()) for theme in (LIGHT, DARK))
    rules = pathlib.Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return f":root{{{light}}}\n@media(prefers-color-scheme:dark){{:root{{{dark}}}}}\n{rules}"


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
</body>
</html>
"""
