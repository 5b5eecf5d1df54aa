"""The behaviour metrics' definitions, in the order of tables. P: scored pairs; S: delivered sends; A: agents of scored pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["share", "mean", "median"]


@dataclass(frozen=True)
class Definition:
    """One metric; see ``shapes.BehaviourMetric`` for the fields. A median's ``definition`` names what it is over."""

    key: str
    title: str
    group: str
    kind: Kind
    unit: str
    definition: str


#: key | title | group | kind | unit | definition
_TABLE = """
messages_per_pair | messages a pair | communication | mean | messages | S / P
messages_median | messages a pair, median | communication | median | messages | median over P of the pair's S
message_chars | median message | communication | median | characters | median length over S, white space at both ends left out
near_duplicate_share | near-duplicates | communication | share | share | S with a Jaccard similarity of 5-character shingles of at least 0.8 to an earlier one of the same sender in the pair / S
division_share | division of work | communication | share | share | S that match the division pattern / S
question_share | questions | communication | share | share | S with a question mark outside of code and addresses / S
answer_rate | questions answered | communication | share | share | questions with a delivered send back after they were delivered, each reply used once for the earliest / questions
answered_promptly | answered within 5 steps | communication | share | share | S whose recipient sends back within 5 steps, the one that reads it being the first, and unread ones never / S
wait_share | with --wait | communication | share | share | S that wait for a reply / S
undelivered_share | not delivered | communication | share | share | sends that were refused, or whose peer had gone / all sends
opening_division | opening division claim | method | share | share | agents whose first delivered send matches the division pattern / agents with a delivered send
protocol_share | Intent and Approach | method | share | share | S with the labels `Intent:` and `Approach:` / S
plan_first | plan first | method | share | share | agents with a delivered division send that names a path or symbol before their first command that writes / A
follow_through | follow-through | method | share | share | claimed paths (agent, path) that the agent's patch touches and the peer's does not, or more than three lines away / claimed paths
peer_mention_share | steps that speak of the peer | method | share | share | steps whose text names the peer / steps
commitment_share | mention to commitment | method | share | share | steps that say they will write to the peer / steps that name the peer
acted_share | commitment to action | method | share | share | steps that say they will write to the peer, with a send in the same or the next step / such steps
intention_gap | intention without action | method | share | share | steps that say they will write to the peer, without a send in the same or the next step / such steps
claims_per_pair | CLAIM messages a pair | protocol | mean | messages | S with the word CLAIM / P
boards_per_pair | boards a pair | protocol | mean | messages | S with at least two numbered or bulleted items / P
split_stated | split stated in 10 steps | protocol | share | share | pairs with a delivered division send that names a path or symbol in its sender's first 10 steps / P
reviewer_wrote_nothing | agent2 wrote nothing | protocol | share | share | pairs whose agent2 ran no command that writes / P (expected of a reviewer or navigator)
handoff_identical | handoff diff empty | protocol | share | share | pairs whose two patches are equal and not empty / P (expected of a handoff)
action_coordinate | coordinate | actions | share | share | executed commands with the label coordinate / executed commands; a command may have several labels
action_git_publish | git publish | actions | share | share | executed commands with the label git_publish / executed commands; a command may have several labels
action_git_inspect | git inspect | actions | share | share | executed commands with the label git_inspect / executed commands; a command may have several labels
action_test | test | actions | share | share | executed commands with the label test / executed commands; a command may have several labels
action_write | write | actions | share | share | executed commands with the label write / executed commands; a command may have several labels
action_explore | explore | actions | share | share | executed commands with the label explore / executed commands; a command may have several labels
action_other | other | actions | share | share | executed commands with the label other / executed commands; a command may have several labels
merge_clean_both | clean both | merges | share | share | pairs whose merge is clean_both / P
merge_clean_one_empty | clean one empty | merges | share | share | pairs whose merge is clean_one_empty / P
merge_both_empty | both empty | merges | share | share | pairs whose merge is both_empty / P
merge_identical | identical | merges | share | share | pairs whose merge is identical / P
merge_conflicts | conflicts | merges | share | share | pairs whose merge is conflicts / P
merge_missing_input | missing input | merges | share | share | pairs whose merge is missing_input / P
merge_error | error | merges | share | share | pairs whose merge is error / P
dry_runs | merge dry-runs an agent | merges | mean | commands | commands that try a merge / A
saw_conflict | saw a conflict | merges | share | share | agents with an observation `CONFLICT (` / A
shim_warned | warned by gh | merges | share | share | agents that gh warned of a conflict / A
conflict_acted_on | conflict acted on | merges | share | share | agents that wrote a file after the first conflict they saw / agents that saw one
opened_pr | opened a pull request | endgame | share | share | agents that opened one / A
published | published | endgame | share | share | agents with a pull request, or a pushed branch that differs from the base / A
late_merge_check | merge check in the last 15 steps | endgame | share | share | agents with a dry run or `gh pr create` in their last 15 steps / agents that ever wrote
rechecks | re-checks after a conflict | endgame | mean | commands | dry runs after the first conflict seen / agents that saw one
reverified | re-verified a clean merge | endgame | share | share | agents with a clean dry run after the first conflict seen / agents that saw one
repeated_commands | repeated commands | loops | share | share | commands equal to an earlier one of the agent with no write in between / commands
same_error | same error, most times | loops | mean | commands | an agent's most frequent last line of a failed command (digits as 0), how often; mean over A
reverts | reverts an agent | loops | mean | commands | commands that take back work (checkout --, restore, reset --hard, stash) / A
longest_without_edit | longest run without an edit | loops | mean | steps | most steps in a row without a command that writes; mean over A
features_passed | features passed | outcome | share | share | features passed / 2 P
pairs_passed | pairs passed | outcome | share | share | pairs with both features passed / P
pairs_any | pairs with a pass | outcome | share | share | pairs with at least one feature passed / P
submitted | submitted | outcome | share | share | agents with status Submitted / A
limits_exceeded | limits exceeded | outcome | share | share | agents with status LimitsExceeded / A
ended_in_error | ended in an error | outcome | share | share | agents with status Error / A
empty_patches | empty patches | outcome | share | share | agents whose patch is empty, or of test files alone / A
patch_bytes | median patch | outcome | median | bytes | median over A, empty patches as 0
patch_bytes_non_empty | median non-empty patch | outcome | median | bytes | median over agents with a patch
patch_kb_per_pair | patch a pair | outcome | mean | kB | bytes of both patches / 1000 P
minutes_per_pair | minutes a pair | outcome | mean | minutes | minutes from start to end / P
steps | median steps | outcome | median | steps | model calls, median over A
"""

DEFINITIONS = {d.key: d for d in (Definition(*line.split(" | ")) for line in _TABLE.strip().splitlines())}  # type: ignore[arg-type]
assert all(d.kind in get_args(Kind) for d in DEFINITIONS.values())
