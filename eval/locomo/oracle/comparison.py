"""How far the server's distributions are from the reference's.

The server gives log probabilities, not logits. Logits are defined up to one constant a position, which softmax takes
out: a model's log probabilities *are* its logits, in the one form in which their exponentials add up to one. So with
``d_i`` the difference of the logits of token ``i``, and ``c`` that of the two normalisers (a weighted mean of the
``d_i``, hence between the least and the greatest), what is compared here is ``d_i - c``. If that is at most `t` for
every token of the vocabulary, the logits differ by at most `t` but for a constant that no probability and no sampler
can see; if the logits differ by at most `t`, it is at most `2 t`. Where the server listed the whole vocabulary, as it
is asked to for the tokens that it decodes, nothing is left out. At the other positions it lists the likeliest tokens;
their log probabilities hold the normaliser too, and with it the sum over all the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Distribution:
    """What the server lists of the distribution of the token behind ``position`` of the prompt.

    ``token_ids`` and ``log_probs`` are ``[n]``, in the server's order, the likeliest first.
    """

    position: int
    token_ids: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Difference:
    """Over all distributions of one prompt; differences are absolute, of log probabilities, in nats.

    ``argmax_agreement`` is the share of positions whose likeliest token is the same.
    """

    max: float
    mean: float
    argmax_agreement: float
    positions: int
    entries: int


def compare(served: Sequence[Distribution], reference: npt.NDArray[np.float64], rows: Sequence[int]) -> Difference:
    """Compare what the server lists with the reference.

    Parameters
    ----------
    reference
        Log probabilities ``[num_rows, vocab]``.
    rows
        The row of ``reference`` for each of ``served``.
    """
    assert served, "nothing to compare"
    differences = []
    agreements = []
    for distribution, row in zip(served, rows, strict=True):
        theirs = reference[row]
        differences.append(np.abs(distribution.log_probs - theirs[distribution.token_ids]))
        agreements.append(int(theirs.argmax()) == int(distribution.token_ids[distribution.log_probs.argmax()]))
    every = np.concatenate(differences)
    # A value that is no number is as far away as can be: it must not get lost in a comparison.
    worst = float("inf") if np.isnan(every).any() else float(every.max())
    return Difference(worst, float(every.mean()), float(np.mean(agreements)), len(served), len(every))
