"""Colors, by the names of the CSS variables that carry them."""

from typing import Literal

from matplotlib import colors

COLORS = 8  # of series
LIGHT = {
    "ink": "#1d2329",
    "soft": "#5f6973",
    "line": "#dfe3e8",
    "page": "#f6f7f6",
    "card": "#fffffe",
    "c0": "#2563c9",
    "c1": "#d4582a",
    "c2": "#128068",
    "c3": "#8649c0",
    "c4": "#a97c08",
    "c5": "#bf3a76",
    "c6": "#4d8f1e",
    "c7": "#5b6f85",
}
DARK = {
    "ink": "#e8eaed",
    "soft": "#9fa9b4",
    "line": "#31373e",
    "page": "#15181b",
    "card": "#1c2024",
    "c0": "#74a7ff",
    "c1": "#ff9166",
    "c2": "#4fd0b0",
    "c3": "#c39af0",
    "c4": "#e2bd4e",
    "c5": "#f58bb8",
    "c6": "#97cf63",
    "c7": "#a3b4c6",
}
SERIES = [LIGHT[f"c{i}"] for i in range(COLORS)]

Scale = Literal["plain", "bad", "good"]  # of a heat map: neither end is better, high values are bad, or good
_BAD = ("#2c7d8c", "#8fbf9f", "#f0cf6a", "#e0733e", "#b3203c")
STOPS: dict[Scale, tuple[str, ...]] = {
    "plain": ("#3b2d68", "#2f6690", "#3a9d8f", "#96c863", "#f3e14b"),
    "bad": _BAD,
    "good": _BAD[::-1],
}
HEAT = {name: colors.LinearSegmentedColormap.from_list(name, stops) for name, stops in STOPS.items()}
