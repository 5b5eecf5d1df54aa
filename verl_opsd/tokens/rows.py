"""The contract of training rows: what a branch becomes in TransferQueue, and how padding rows look.

A row is one branch of one agent. Beside verl's own fields (prompts, responses, response_mask, loss_mask, input_ids,
position_ids, rollout_log_probs, rm_scores, ...) it carries the fields named here, each a ragged 1-D tensor.

Every per-token field has one entry for each *loss position* n of the row, not for each token of the sequence, so none of
them has to follow verl's padding, packing or splitting of sequences:

    opsd_position   int64[N]    index t into the row's input_ids; the scored token is input_ids[t + 1]
    opsd_coef       float32[N]  final coefficient of this position's divergence in the loss of its optimizer step: static
                                weight divided by the denominator over the whole global mini-batch. 0 where masked.
    opsd_anchor     float32[N]  the same for the anchor's divergence; all 0 when the anchor is off
    opsd_behaviour  float32[N]  log-probability of the scored token under the policy that sampled it, nats
    opsd_reward     float32[N]  task reward: coefficient in the loss times the episode's advantage; all 0 when it is off
    opsd_class      int64[N]    token class (tokens.records.TOKEN_CLASSES)
    opsd_turn       int64[N]    turn index
    opsd_view_ids   int64[T']   teacher view: the passes of this row, one after another
    opsd_view_len   int64[P]    length of each pass; sum = T'
    opsd_view_pos   int64[N]    index into opsd_view_ids of the predicting position; opsd_view_ids[p + 1] is the same token

Beside them opsd_name, int64[L], the UTF-8 bytes of ``episode/agent/branch`` (``row_name``): telemetry names its rows by it.

The loss of one optimizer step is ``sum over ranks and rows of coef_n * divergence_n``; with FSDP's mean over ranks the
engine multiplies by the data-parallel size. Because the denominator is inside ``opsd_coef`` the loss does not depend on
micro-batches, gradient accumulation or the number of ranks.

Padding rows: verl clones a real row and resizes only the fields that it knows. A padding row therefore must be rewritten:
no loss position (N = 0), and its own input_ids as its single pass. ``padding_fields`` gives exactly that.
"""

from __future__ import annotations

import torch

from verl_opsd.errors import OpsdError

POSITION_FIELDS = (
    "opsd_position",
    "opsd_coef",
    "opsd_anchor",
    "opsd_behaviour",
    "opsd_reward",
    "opsd_class",
    "opsd_turn",
    "opsd_view_pos",
)
VIEW_FIELDS = ("opsd_view_ids", "opsd_view_len")
FIELDS = POSITION_FIELDS + VIEW_FIELDS
FLOAT_FIELDS = ("opsd_coef", "opsd_anchor", "opsd_behaviour", "opsd_reward")


def row_name(episode_id: str, agent_id: str, branch: int) -> torch.Tensor:
    """The field ``opsd_name`` of a branch's row."""
    return torch.tensor(list(f"{episode_id}/{agent_id}/{branch}".encode()), dtype=torch.int64)


def padding_fields(input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Fields of a padding row: no loss position, its own ids as the single pass of its view."""
    empty = {k: torch.zeros(0, dtype=torch.float32 if k in FLOAT_FIELDS else torch.int64) for k in POSITION_FIELDS}
    return {
        **empty,
        "opsd_view_ids": input_ids.to(torch.int64).clone(),
        "opsd_view_len": torch.tensor([input_ids.numel()], dtype=torch.int64),
    }


def check_row(input_ids: torch.Tensor, row: dict[str, torch.Tensor]) -> None:
    """Asserts the contract of one row.

    Args:
        input_ids: int64[T].
        row: the fields of :data:`FIELDS`.

    Raises:
        OpsdError: a field is missing, has another dtype or length, points outside its sequence, or a token of the
            teacher view differs from the student's token at the same loss position.
    """

    def refuse(what: str) -> None:
        raise OpsdError(what, "verl_opsd.tokens.rows describes the fields of a row", "rebuild the row with tokens.rows")

    missing = [k for k in FIELDS if k not in row]
    if missing:
        refuse(f"row lacks {missing}")
    n = row["opsd_position"].numel()
    for k in FIELDS:
        want = torch.float32 if k in FLOAT_FIELDS else torch.int64
        if row[k].dtype != want or row[k].dim() != 1:
            refuse(f"{k} is {row[k].dtype} with {row[k].dim()} dimensions, expected 1-D {want}")
        if k in POSITION_FIELDS and row[k].numel() != n:
            refuse(f"{k} has {row[k].numel()} entries for {n} loss positions")
    if int(row["opsd_view_len"].sum()) != row["opsd_view_ids"].numel():
        refuse(f"passes of {row['opsd_view_len'].tolist()} tokens do not sum to {row['opsd_view_ids'].numel()}")
    if n == 0:
        return
    pos, view = row["opsd_position"], row["opsd_view_pos"]
    if int(pos.min()) < 0 or int(pos.max()) + 1 >= input_ids.numel():
        refuse(f"loss positions {int(pos.min())}..{int(pos.max())} of a sequence of {input_ids.numel()} tokens")
    ends = row["opsd_view_len"].cumsum(0) - 1
    if int(view.min()) < 0 or int(view.max()) + 1 >= row["opsd_view_ids"].numel() or bool(torch.isin(view, ends).any()):
        refuse("a view position is the last token of its pass or lies outside the view")
    if not torch.equal(input_ids[pos + 1], row["opsd_view_ids"][view + 1]):
        bad = int((input_ids[pos + 1] != row["opsd_view_ids"][view + 1]).nonzero()[0])
        refuse(
            f"loss position {bad}: the student's token {int(input_ids[pos[bad] + 1])} is scored against "
            f"{int(row['opsd_view_ids'][view[bad] + 1])}"
        )
