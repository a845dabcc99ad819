"""Token ids as segments of a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from memstore.session_log import Segment, SegmentKind


def segments_of(parts: Iterable[Sequence[int]], kind: SegmentKind) -> list[Segment]:
    """A segment for each of the parts."""
    return [Segment(np.asarray(part, dtype=np.int32), kind) for part in parts]
