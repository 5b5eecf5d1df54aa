"""Counting."""

from collections import Counter

from textkit.cases import words


def most_common(text, n):
    """The ``n`` most frequent words with their counts; equal counts in alphabetical order."""
    counts = Counter(words(text))
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:n]
