"""Reading."""


class ParseError(ValueError):
    """A line that is neither a section, a setting, a comment nor blank."""


def parse(text):
    """Settings of a text as ``{section: {key: value}}``; those before the first section are in ``""``."""
    sections = {}
    section = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith(";"):
            continue
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
            sections.setdefault(section, {})
            continue
        if "=" not in line:
            raise ParseError(f"line {number}: {line}")
        key, value = line.split("=", 1)
        sections.setdefault(section, {})[key.strip()] = value.strip()
    return sections


def get(sections, section, key, default=None):
    """One value, or the default where the section or the key is absent."""
    return sections.get(section, {}).get(key, default)
