"""Writes ``golden.json``: values and gradients of every divergence on every support for one frozen batch, in float64, from the
definitions in ``reference.py``.

    python tests/parity/golden.py

The numbers change only if a definition does: a difference after an edit of the library, of torch or of the machine is a fault there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

PATH = Path(__file__).with_suffix(".json")
SIDES = ("full", "student_topk", "teacher_topk", "union_topk")
#: Logits of 3 positions over 7 tokens; position 1 is nearly learnt, position 2 disagrees about almost everything.
STUDENT = [[1.5, 0.2, -0.3, 0.9, -2.0, 0.0, 0.4], [4.0, 1.0, 0.5, -1.0, 0.0, -3.0, 2.0], [8.0, -4.0, 0.0, 1.0, -6.0, 2.0, -1.0]]
TEACHER = [
    [0.3, 1.1, -0.8, 0.6, -1.0, 0.7, -0.2],
    [4.001, 1.0, 0.499, -1.0, 0.0, -3.0, 2.0],
    [-5.0, 6.0, 1.0, 0.0, 3.0, -2.0, 0.5],
]
LABELS, TOP_K = [3, 0, 2], 2


def compute() -> dict[str, Any]:
    """``{"divergence-support": {"value": [N], "gradient": [N, V]}}``; the gradient is that of the sum, by the student's logits."""
    from parity import reference

    out = {}
    for name, function in reference.DIVERGENCES.items():
        for side in SIDES:
            student = torch.tensor(STUDENT, dtype=torch.float64, requires_grad=True)
            p, q = reference.softmax(student), reference.softmax(torch.tensor(TEACHER, dtype=torch.float64))
            values = []
            for i, label in enumerate(LABELS):
                if side == "full":
                    values.append(function(p[i], q[i]))
                else:
                    ids = reference.support_of(side, p[i].detach(), q[i], label, TOP_K)
                    values.append(function(reference.outcomes(p[i], ids), reference.outcomes(q[i], ids)))
            value = torch.stack(values)
            (gradient,) = torch.autograd.grad(value.sum(), student)
            out[f"{name}-{side}"] = {"value": value.tolist(), "gradient": gradient.tolist()}
    return out


if __name__ == "__main__":
    sys.path.insert(0, str(PATH.parents[1]))
    PATH.write_text(json.dumps(compute(), indent=1) + "\n")
