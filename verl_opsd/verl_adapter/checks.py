"""Start-up checks of the training engine, controls on real rows, and the numbers that the publish guard compares.

Every function is collective: all ranks call it in the same order. Suffixes: P positions, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id

from verl_opsd.distill.chunk import logits
from verl_opsd.distill.head import HeadTask, LossPositionHead
from verl_opsd.distill.signal import Signal
from verl_opsd.errors import OpsdError
from verl_opsd.tokens.rows import FLOAT_FIELDS, padding_fields
from verl_opsd.verl_adapter.engine import OpsdEngine
from verl_opsd.verl_adapter.engine_forwards import worst_of_ranks
from verl_opsd.verl_adapter.loss import COPIES, OpsdLoss
from verl_opsd.verl_adapter.passes import jagged

#: Largest difference in nats between log-probabilities through the head and through the model's own logits.
HEAD_THRESHOLD = {torch.float32: 1e-3, torch.bfloat16: 0.25}
#: Positions that are put through the vocabulary head at once.
HEAD_POSITIONS = 256


class Check(TypedDict):
    """One verdict. ``fatal``: a run must not start when it has not passed; otherwise ``note`` says what was changed instead."""

    name: str
    value: float
    threshold: float
    passed: bool
    fatal: bool
    note: str


def _check(name: str, value: float, threshold: float, passed: bool, note: str = "", fatal: bool = True) -> Check:
    return Check(name=name, value=float(value), threshold=float(threshold), passed=passed, fatal=fatal, note=note)


def require(checks: Sequence[Check]) -> None:
    """Stops where a fatal check has not passed.

    Raises:
        OpsdError: names every such check with its value and threshold.
    """
    failed = [c for c in checks if c["fatal"] and not c["passed"]]
    if failed:
        raise OpsdError(
            "; ".join(f"{c['name']}: {c['value']:g} against {c['threshold']:g} {c['note']}".rstrip() for c in failed),
            "start-up checks fail closed",
            "correct what the named checks measure; verl_opsd.verl_adapter.checks describes each",
        )


def startup_checks(engine: OpsdEngine, loss: OpsdLoss) -> list[Check]:
    """All start-up checks of one engine; the same list on every rank. Takes seconds.

    head                  the output embeddings are the loss-position head
    head_equals_logits    log-probabilities inside the head = the model's own logits; its loss comes back as it is (nats)
    layout                two sequences in one forward = each alone (relative); otherwise one row a forward, not fatal
    equal_forwards        ranks with different numbers of passes make the same number of forwards
    vocabulary            the tokenizer has no id that the head can't predict
    adapters_bound        number of adapter tensors (with an adapter)
    adapters_fp32         adapter tensors that are not float32 (with an adapter)
    sequence_parallel     log-probabilities of a sequence shared by the ranks = of the whole sequence on one rank (nats; 0 without it)
    """
    engine.prepare(loss)
    out = [_check("head", isinstance(engine.head, LossPositionHead), 1, isinstance(engine.head, LossPositionHead))]
    error, limit = _head_error(engine), HEAD_THRESHOLD[engine._autocast_dtype]
    out.append(_check("head_equals_logits", error, limit, error <= limit, "nats"))
    error, apart = engine.measure_layout(), engine.layout_threshold
    note = "packed" if engine.use_remove_padding else "padded"
    note += ": several rows a forward" if error <= apart else " rows see each other: one row a forward"
    out.append(_check("layout", error, apart, error <= apart, note, fatal=False))
    spread = _forward_spread(engine, loss)
    out.append(_check("equal_forwards", spread, 0, spread == 0, "forwards between ranks"))
    tokens, vocabulary = len(engine.model_config.tokenizer), engine.head.out_features
    out.append(_check("vocabulary", tokens, vocabulary, tokens <= vocabulary, "tokenizer entries against head rows"))
    if engine._is_lora:
        adapters = [p for k, p in engine.module.named_parameters() if "lora_" in k and p.requires_grad]
        narrow = sum(p.dtype != torch.float32 for p in adapters)
        out.append(_check("adapters_bound", len(adapters), 1, len(adapters) >= 1, "tensors"))
        out.append(_check("adapters_fp32", narrow, 0, narrow == 0, "tensors in another dtype"))
    error = _sequence_parallel_error(engine)
    note = f"nats, {engine.ulysses_sequence_parallel_size} ranks a sequence against one"
    out.append(_check("sequence_parallel", error, limit, error <= limit, note))
    return out


def _sequence_parallel_error(engine: OpsdEngine) -> float:
    """Largest difference of a log-probability between a sequence that the ranks share and the same one whole on each rank."""
    if not engine.use_ulysses_sp:
        return 0.0
    ids = torch.randint(engine.head.out_features, (23,), generator=torch.Generator().manual_seed(2))
    with engine.frozen():
        shared = engine.run(engine.inputs([ids]))[0].float().log_softmax(-1)
        with engine.one_rank_a_sequence():
            whole = engine.run(engine.inputs([ids]))[0].float().log_softmax(-1)
    return worst_of_ranks((shared - whole).abs().max())


def _head_error(engine: OpsdEngine) -> float:
    """Log-probabilities inside the head against the model's own logits; its loss against the sum of its values."""
    ids = torch.randint(engine.head.out_features, (19,), generator=torch.Generator().manual_seed(1))
    device = get_device_id()
    inputs, labels_N = engine.inputs([ids]), ids[1:].to(device)
    uniform = Signal(hidden_NH=torch.zeros(18, engine.head.in_features, device=device), head_id="student")
    index_N, one_N = torch.arange(18, device=device), torch.ones(18, device=device)
    task = HeadTask("loss", index_N, labels_N=labels_N, teacher=uniform, coef_N=one_N)
    with engine.frozen():
        loss = engine.over_sequence(engine.run(inputs, task).sum())
        logits_NV = engine.run(inputs)[0, :-1].float()
    assert task.result is not None
    theirs_N = logits_NV.log_softmax(-1).gather(-1, labels_N[:, None])[:, 0]
    worst = (task.result.student_logprob_N - theirs_N).abs().max()
    worst = torch.maximum(worst, (loss - task.result.divergence_N.sum()).abs() / 18)
    return worst_of_ranks(worst)


def _forward_spread(engine: OpsdEngine, loss: OpsdLoss) -> int:
    """Scores as many rows as the data-parallel rank's number + 1; most minus fewest forwards over ranks."""
    n = engine.get_data_parallel_rank() + 1
    ids = torch.arange(7) % engine.head.out_features
    row = padding_fields(ids) | {k: torch.tensor([2]) for k in ("opsd_position", "opsd_class", "opsd_turn", "opsd_view_pos")}
    row |= {k: torch.zeros(1) for k in FLOAT_FIELDS} | {
        "input_ids": ids,
        "position_ids": torch.arange(7),
    }
    data = TensorDict({k: jagged([v] * n) for k, v in row.items()}, batch_size=n)
    before = engine.forwards
    engine.score(data, loss)
    made = torch.tensor([engine.forwards - before, before - engine.forwards], device=get_device_id())
    dist.all_reduce(made, op=dist.ReduceOp.MAX)
    return int(made.sum())


def control(
    engine: OpsdEngine,
    data: TensorDict,
    loss: OpsdLoss,
    teacher: Literal["own", "view", "device"],
    shift: int = 0,
    adapters: Literal["off", "on"] = "off",
) -> TensorDict:
    """Per-token values of real rows through the training path, without a gradient.

    Args:
        data: this rank's rows, with verl's micro-batching settings.
        teacher: ``own``: the loss's weights (``OpsdEngine.frozen``) on the student's own ids (identity); ``view``: on the teacher's view;
            ``device``: the device teacher's signal that the rows bring.
        shift: tokens by which the teacher's positions are moved (negative control).
        adapters: student side: ``off``: the same weights; ``on``: the trained weights.

    Returns:
        One field for each of ``step.TOKEN_VALUES``, ``value_<name>`` (never a row field: verl writes outputs back into the queue), float32 jagged by row, on the CPU.
    """
    data = data.clone(recurse=False)
    if teacher == "device":
        if loss.teacher != "device" or shift:
            raise OpsdError(
                f"control with teacher=device, shift={shift} under a loss with teacher={loss.teacher}",
                "a device teacher's signal is measured as it is, under the head that the loss names",
                "use shift 0 and a loss with teacher=device",
            )
    else:
        loss = loss if loss.teacher in COPIES else loss.of_reference
        data["opsd_signal"] = jagged(engine.score(data, loss, teacher, shift))
    if loss.anchor:
        data["opsd_base"] = jagged(engine.score(data, loss.of_reference, "own"))
    with engine.frozen(loss if adapters == "off" else None):
        out = engine.forward_backward_batch(data, loss, forward_only=True)["model_output"]
    return TensorDict({k: v.cpu() for k, v in out.items()}, batch_size=len(data))


def logprobs(engine: OpsdEngine, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Log-probabilities of the next token under the trained weights (adapters on).

    Args:
        sequences: token ids, the same on every rank.
        positions: for each sequence the predicting positions.

    Returns:
        float32[P, V] each, in nats.
    """
    out = []
    with engine.frozen():
        weight_VH = engine.head_weight()
        for ids, places in zip(sequences, positions, strict=True):
            (hidden_PH,) = engine.hidden([torch.tensor(ids)], [torch.tensor(places, dtype=torch.int64)])
            logits_PV = logits(hidden_PH, weight_VH.to(hidden_PH.dtype), torch.float32)
            out.append(logits_PV.log_softmax(-1).cpu().numpy())
    return out


def token_logprobs(
    engine: OpsdEngine, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """:func:`logprobs` of each position's next token in the sequence alone.

    Returns:
        float64[P] each, in nats.
    """
    out = []
    with engine.frozen():
        weight_VH = engine.head_weight()
        for ids, places in zip(sequences, positions, strict=True):
            ids_T, places_P = torch.tensor(ids), torch.tensor(places, dtype=torch.int64)
            (hidden_PH,) = engine.hidden([ids_T], [places_P])
            next_P = ids_T[places_P + 1].to(hidden_PH.device)
            found = [
                logits(h, weight_VH.to(h.dtype), torch.float32).log_softmax(-1).gather(-1, n[:, None])[:, 0]
                for h, n in zip(hidden_PH.split(HEAD_POSITIONS), next_P.split(HEAD_POSITIONS), strict=True)
            ]
            out.append(torch.cat(found).double().cpu().numpy())
    return out


def adapter_stats(engine: OpsdEngine) -> dict[str, Any]:
    """``tensors``: number of adapter tensors; ``dtypes``: theirs; ``max_abs_B``: largest entry of any lora_B, over ranks;
    ``parameters``: number of all parameters, one for tied ones; ``compute``: the dtype of a forward."""
    adapters = {k: p.detach() for k, p in engine.module.named_parameters() if "lora_" in k}
    shards = [p.to_local() if isinstance(p, DTensor) else p for k, p in adapters.items() if "lora_B" in k]
    largest = max((float(s.abs().max()) for s in shards if s.numel()), default=0.0)
    over_ranks = torch.tensor(largest, device=get_device_id())
    dist.all_reduce(over_ranks, op=dist.ReduceOp.MAX)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in adapters.values()})
    parameters = sum(1 for _ in engine.module.parameters())
    compute = str(engine._autocast_dtype).removeprefix("torch.")
    return {
        "tensors": len(adapters),
        "dtypes": dtypes,
        "max_abs_B": float(over_ranks),
        "parameters": parameters,
        "compute": compute,
    }
