"""Paths."""


def split(path):
    """The parts of a path, without empty ones."""
    return [part for part in path.split("/") if part]


def join(*paths):
    """One path out of several."""
    parts = []
    for path in paths:
        parts += split(path)
    return "/" + "/".join(parts)
