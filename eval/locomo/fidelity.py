"""How far one next-token distribution is from another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def kl_divergence(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """KL(reference || other), nats, from log probabilities of the tokens that each side lists.

    What either side does not list is pooled into one outcome, which can only make the result smaller (data-processing
    inequality).
    """
    shared = sorted(reference.keys() & other.keys())
    log_p = np.array([reference[token] for token in shared])
    log_q = np.array([other[token] for token in shared])
    p, q = np.exp(log_p), np.exp(log_q)
    rest_p, rest_q = max(1.0 - float(p.sum()), 0.0), max(1.0 - float(q.sum()), 1e-12)
    pooled = rest_p * np.log(rest_p / rest_q) if rest_p > 0 else 0.0
    return float((p * (log_p - log_q)).sum() + pooled)


def mean_kl(reference: Sequence[Mapping[int, float]], other: Sequence[Mapping[int, float]]) -> float:
    """Mean over steps."""
    return float(np.mean([kl_divergence(p, q) for p, q in zip(reference, other, strict=True)]))


def top1(distribution: Mapping[int, float]) -> int:
    """The most likely token."""
    return max(distribution, key=lambda token: distribution[token])
