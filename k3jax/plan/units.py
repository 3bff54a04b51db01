"""Bytes and seconds for people: four digits, and the unit that suits a laptop's model as well as a pod's."""


def size(count: float) -> str:
    """Bytes: ``3.622 GB``."""
    return _scaled(count, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (0, "B")))


def seconds(time: float) -> str:
    """Seconds: ``12.3 ms``."""
    return _scaled(time, ((1, "s"), (1e-3, "ms"), (0, "us")), least=1e-6)


def _scaled(value: float, units: tuple[tuple[float, str], ...], least: float = 1.0) -> str:
    unit, name = next((unit, name) for unit, name in units if abs(value) >= 0.9995 * unit)
    return f"{value / (unit or least):.4g} {name}"
