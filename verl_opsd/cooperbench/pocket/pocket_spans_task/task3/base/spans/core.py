"""Sets of whole numbers as spans ``(start, stop)``: the start belongs to the set, the stop does not."""


def normalize(spans):
    """Sorted spans; those that overlap or touch are made one, empty ones are dropped."""
    merged = []
    for start, stop in sorted(spans):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def contains(spans, number):
    """Whether a number is in a set."""
    return any(start <= number < stop for start, stop in spans)


def union(a, b):
    """The numbers that are in one of two sets, or in both."""
    return normalize([*a, *b])
