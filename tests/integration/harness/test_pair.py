"""Whole pairs through the real harness classes, in bubblewrap, with scripted models."""

from __future__ import annotations

from .conftest import PR, SUBMIT, Script


def test_two_agents_message_edit_and_submit(play):
    first = Script(
        [
            "send_message agent2 <<'MSG'\nI take one.txt\nMSG",
            "echo one > one.txt",
            PR,
            SUBMIT,
        ]
    )
    second = Script(["send_message agent1 'I take two.txt'", "echo two > two.txt", PR, SUBMIT])
    run = play(first, second)
    one, two = run.agents
    print(one, two)
    print(first.seen[0][0]["content"][:500], first.seen[0][1]["content"][:300])
    print(first.observations(), second.observations())
    assert (one.status, two.status) == ("Submitted", "Submitted")
    assert one.patch == (
        "diff --git a/one.txt b/one.txt\nnew file mode 100644\nindex 0000000..5626abf\n--- /dev/null\n+++ b/one.txt\n"
        "@@ -0,0 +1 @@\n+one\n"
    )
    assert "two.txt" in two.patch and "one.txt" not in two.patch
    assert one.opened_pr and two.opened_pr
