"""Writes time spans for people."""

_UNITS = (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1))
"""Unit, its seconds, the next smaller unit, and that one's seconds."""


def duration_text(ms: float | None) -> str:
    """Return a time span for people, rounded down.

    Args:
        ms: the span in ms. A negative one counts as 0.

    Returns:
        `unknown` for None; `250 ms` below a second; `1.5 s` below a minute; above, at most two units, of which the
        second is left out if it is zero: `2 min 3 s`, `12 min`, `3 h`, `2 d 4 h`.
    """
    if ms is None:
        return "unknown"
    ms = max(ms, 0)
    if ms < 1_000:
        return f"{int(ms) if ms >= 1 else ms:.3g} ms"
    if ms < 60_000:
        return f"{int(ms / 100) / 10:g} s"
    seconds = int(ms / 1_000)
    unit, unit_s, next_unit, next_s = next(row for row in _UNITS if seconds >= row[1])
    whole, rest = divmod(seconds, unit_s)
    return f"{whole} {unit} {rest // next_s} {next_unit}" if rest >= next_s else f"{whole} {unit}"
