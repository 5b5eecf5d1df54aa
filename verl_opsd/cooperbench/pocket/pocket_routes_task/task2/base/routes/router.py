"""Routing."""

from routes.paths import split


class NotFound(LookupError):
    """No route matches a path."""


class Router:
    """Handlers by pattern; a part ``<name>`` of a pattern matches any one part of a path."""

    def __init__(self):
        self._routes = []

    def add(self, pattern, handler):
        """Adds a route; of two that match, the one added first wins."""
        self._routes.append((split(pattern), handler))

    def match(self, path):
        """The handler of a path, and the values of the names in its pattern."""
        parts = split(path)
        for pattern, handler in self._routes:
            values = _values(pattern, parts)
            if values is not None:
                return handler, values
        raise NotFound(path)


def _values(pattern, parts):
    """Values of a pattern's names; None where the parts do not match."""
    if len(pattern) != len(parts):
        return None
    values = {}
    for expected, part in zip(pattern, parts):
        if expected.startswith("<") and expected.endswith(">"):
            values[expected[1:-1]] = part
        elif expected != part:
            return None
    return values
