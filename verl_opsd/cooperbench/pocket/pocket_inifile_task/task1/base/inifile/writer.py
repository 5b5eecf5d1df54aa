"""Writing."""


def dump(sections):
    """Text of ``{section: {key: value}}``: one block a section, blocks separated by a blank line."""
    blocks = []
    for section, settings in sections.items():
        lines = [f"[{section}]"] if section else []
        for key, value in settings.items():
            lines.append(f"{key} = {value}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"
