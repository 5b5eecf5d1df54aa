"""No `send_message` is lost in silence: what is not refused reaches the harness' own parser whole."""

from __future__ import annotations

import subprocess

import pytest
from cooperbench.agents.mini_swe_agent_v2.agents.default import _parse_send_messages
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_opsd.cooperbench.sends import account

ACCEPTED = [
    ("ls -la", 0),
    ("echo my_send_message_helper", 0),
    ("send_message agent2 <<'MSG'\nhello\nMSG", 1),
    ("send_message --wait agent2 <<MSG\n  indented\n\nlast\nMSG\nls", 1),
    ("send_message agent2 --wait 'it is'", 1),
    ('cd src && send_message agent2 "it\'s $5" && ls', 1),
    ("send_message agent2 \"a\"\nsend_message agent2 'b'", 2),
    ('send_message agent2 "answer with send_message, please"', 1),
    ('send_message agent2 "hi" 2>&1', 1),
    ("send_message agent2 'hi' # tell them", 1),
]
REFUSED = [
    ("send_message agent2 <<'MSG'\na\nMSG\nsend_message agent2 \"b\"", 2),  # the quoted one would vanish
    (r'send_message agent2 "say \"yes\" now"', 1),  # cut at the first inner quote
    (r"send_message agent2 'it'\''s'", 1),
    ('send_message agent2 "a" "b"', 1),
    ("send_message agent2 hello", 1),
    ("send_message agent2", 1),
    ("send_message agent2 << 'MSG'\nx\nMSG", 1),
    ("send_message agent2 <<-'EOF'\nx\nEOF", 1),
    ("send_message agent2 <<'MSG'\nnever ends", 1),
    ("send_message agent2 <<'MSG' && git push\nx\nMSG\nsend_message agent2 'y'", 2),
    ("send_message agent2 <<'MSG'\nbody\nMSGS are fine\nMSG", 1),  # the harness would stop at "MSGS"
    ("send_message agent2 \"use send_message agent1 'x' to answer\"", 1),  # the harness would send the inner one too
    ("send_message agent2 < notes.txt", 1),
    ("send_message --wait 60 agent2 'x'", 1),
    ("grep -rn send_message .", 1),
    ('send_message agent2 "x"; bash -c "$(echo send_message) agent2 y"', 2),
]


@pytest.mark.parametrize(("command", "occurrences"), ACCEPTED)
def test_accepted(command, occurrences):
    sends = account(command)
    assert (sends.occurrences, sends.rejected) == (occurrences, False)
    assert "send_message agent" not in sends.residue


@pytest.mark.parametrize(("command", "occurrences"), REFUSED)
def test_refused(command, occurrences):
    sends = account(command)
    assert (sends.occurrences, sends.rejected) == (occurrences, True)


# What the shell itself would hand to a program `send_message`: one body a call, each ended by a NUL.
# What is left beside the calls succeeds, as the harness sends whether it does or not.
RECORDER = r"""
command_not_found_handle() { return 0; }
send_message() {
    local body
    [ "$1" = --wait ] && shift
    shift
    if [ $# -gt 0 ]; then body="$*"; else IFS= read -r -d '' body; body="${body%$'\n'}"; fi
    printf '%s\0' "$body"
}
"""
TEXT = st.text(alphabet="ab \n'\";&MSG", max_size=12)


def in_the_shell(command: str) -> list[str]:
    """Bodies that bash delivers."""
    done = subprocess.run(
        ["/bin/bash", "--norc", "--noprofile", "-c", RECORDER + command],
        env={"PATH": "/nowhere"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return done.stdout.decode().split("\0")[:-1]


def is_syntax(command: str) -> bool:
    return subprocess.run(["/bin/bash", "-n", "-c", command], stderr=subprocess.DEVNULL).returncode == 0


@st.composite
def calls(draw):
    """Shell text that may or may not be a well-formed call."""
    body, wait = draw(TEXT), draw(st.sampled_from(["", "--wait "]))
    forms = [f"<<'MSG'\n{body}\nMSG\n", f'"{body}"', f"'{body}'", f"<<'END'\n{body}\nEND\n", body]
    return f"send_message {wait}agent2 {draw(st.sampled_from(forms))}"


@example(['send_message agent2 ""&&"', 'send_message agent2 "";"'], "\n")  # the second one is text of a string
@settings(max_examples=500, deadline=None)
@given(st.lists(st.one_of(calls(), st.sampled_from(["true", ":"])), max_size=3), st.sampled_from(["\n", "; ", " && "]))
def test_an_accepted_command_delivers_what_the_shell_would_deliver(parts, separator):
    command = separator.join(parts)
    sends = account(command)
    if sends.occurrences and not sends.rejected and is_syntax(sends.residue) and is_syntax(command):
        delivered = _parse_send_messages(command)
        assert len(delivered) == sends.occurrences
        # The harness drops blank lines that lead a body, and nothing else.
        assert sorted(body.lstrip() for _, body, _ in delivered) == sorted(b.lstrip() for b in in_the_shell(command))
