"""Line wrapping."""


def wrap(text, width):
    """Breaks a text into lines of at most ``width`` characters; a longer word gets a line of its own."""
    lines = []
    line = ""
    for word in text.split():
        candidate = f"{line} {word}" if line else word
        if line and len(candidate) > width:
            lines.append(line)
            line = word
        else:
            line = candidate
    if line:
        lines.append(line)
    return lines
