"""Case conversion."""

import re


def words(text):
    """Lower-case words of a text; everything but letters and digits separates words."""
    return re.findall(r"[a-z0-9]+", text.lower())


def slugify(text):
    """Words of a text joined by dashes, for use in a URL."""
    return "-".join(words(text))


def title(text):
    """Words of a text, each with a capital letter, joined by spaces."""
    return " ".join(word.capitalize() for word in words(text))
