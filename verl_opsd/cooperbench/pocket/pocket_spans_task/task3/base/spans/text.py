"""Text form of a set: ``1-3,7`` holds 1, 2, 3 and 7."""

from spans.core import normalize


def show(spans):
    """Text of a set."""
    parts = []
    for start, stop in normalize(spans):
        last = stop - 1
        parts.append(f"{start}" if start == last else f"{start}-{last}")
    return ",".join(parts)
