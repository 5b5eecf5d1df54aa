"""Tables of the commands."""

from __future__ import annotations

from typing import Any

import rich.table


class Table(rich.table.Table):
    """A table that cuts nothing: a word that is wider than its column goes on in the next line. Names are there to be given back."""

    def __init__(self, *headers: rich.table.Column | str, **kwargs: Any) -> None:
        # a column holds its cells: one that is given to two tables would show the first one's in the second
        super().__init__(*(h if isinstance(h, str) else h.copy() for h in headers), **kwargs)
        for column in self.columns:
            column.overflow = "fold"

    def add_column(self, *args: Any, **kwargs: Any) -> None:
        """As rich's own, with another default."""
        super().add_column(*args, **{"overflow": "fold", **kwargs})
