"""How agents act: one event stream a pair, and metrics over it whose definitions and regular expressions have a version.

``events`` makes the stream from an episode; ``log_tree`` makes episodes from the harness' own log folders; ``metrics`` measures a
pair and sums up; ``table`` sets models side by side.
"""
