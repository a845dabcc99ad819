"""What one forward has to attend to, worked out once and shared by all its layers.

A plan is a list of spans. A span is one scaled-dot-product call: some query rows of the batch, the keys they read and
the mask between them. Nothing here depends on a layer; nothing here knows SGLang.

Slots of a sequence often form one range of the pool. Such keys are a slice, which costs nothing; others are gathered
by index. A sequence without a cached prefix reads the keys just computed and never touches the pool.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import torch
from torch import Tensor

__all__ = ["Span", "plan_decode", "plan_extend"]

# Rows of one masked call: bounds the mask's memory and skips keys that no row of the block may see.
_BLOCK_ROWS = 1024

# Runs of one sequence share a call where that is less work, in products of one query and one key: what a call costs
# however small it is, and what gathering a key costs. Both as measured, with 9 heads of 64 in bf16 on one core.
_CALL_PRODUCTS = 4000
_GATHER_PRODUCTS = 6

# Sequences of a decode batch share one padded call while padding adds no more than a third, or this many keys.
_PAD_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Span:
    """One attention call over `batch` sequences of `num_queries` queries and `num_keys` keys each.

    Attributes
    ----------
    queries: rows of the forward's query tensor, `batch * num_queries` of them: a slice or an int64 index.
    keys: slots of the pool, a slice or an int64 index of `batch * num_keys`; None reads this forward's own keys, rows
        `queries`.
    mask: additive, in the model's dtype: `[num_queries, num_keys]` for one sequence, `[batch, 1, 1, num_keys]` for a
        decode; None where every query sees every key, or where `causal` says it all.
    causal: query i sees keys [0, i]; only with as many keys as queries.
    """

    queries: slice | Tensor
    keys: slice | Tensor | None
    batch: int
    num_queries: int
    num_keys: int
    mask: Tensor | None = None
    causal: bool = False
    _grouped: dict[int, Tensor] = field(default_factory=dict)

    def grouped_mask(self, group: int) -> Tensor | None:
        """The mask with each query row repeated for the `group` query heads of one KV head, made once per forward."""
        if self.mask is None or self.num_queries == 1:
            return self.mask
        if group not in self._grouped:
            self._grouped[group] = self.mask.repeat_interleave(group, 0)
        return self._grouped[group]


def plan_extend(
    req_to_token: Tensor,
    rows: Sequence[int],
    *,
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    dtype: torch.dtype,
) -> list[Span]:
    """Plan an extend: sequence i adds tokens [prefix_lens[i], prefix_lens[i] + extend_lens[i]) of its row.

    Consecutive sequences of one row are ascending runs of one sequence. Neighbours share one gather and one mask by
    position where that is less work than a call for each, which reads no keys behind its own last one.

    Parameters
    ----------
    req_to_token
        `[num_rows, max_context]` int, slot of each token of each row.
    rows
        The row of each sequence, in the order of the query rows.
    prefix_lens, extend_lens
        Tokens before and within the extend.
    dtype
        Of the queries, hence of the additive masks.
    """
    spans: list[Span] = []
    start = 0
    runs = list(zip(rows, prefix_lens, extend_lens, strict=True))
    for row, members in groupby(runs, key=lambda run: run[0]):
        parts = [(prefix, extend) for _, prefix, extend in members if extend > 0]
        for group in _groups(parts):
            num_queries = sum(extend for _, extend in group)
            if group[0][0] == 0 and len(group) == 1:
                rows_ = slice(start, start + num_queries)
                spans.append(Span(rows_, None, 1, num_queries, num_queries, causal=True))
            else:
                positions = torch.cat([torch.arange(prefix, prefix + extend) for prefix, extend in group])
                spans.extend(_masked_spans(req_to_token[row], positions, start=start, dtype=dtype))
            start += num_queries
    return spans


def _groups(parts: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
    """Divide ascending runs ``(prefix, extend)`` of one sequence into those that share a call, for the least work."""
    queries = [0, *accumulate(extend for _, extend in parts)]
    least, begins = [0], [0]  # of the first `stop` runs: the least work, and where their last call begins
    for stop in range(1, len(parts) + 1):
        num_keys = sum(parts[stop - 1])

        def work(begin: int, stop: int = stop, num_keys: int = num_keys) -> int:
            return least[begin] + _CALL_PRODUCTS + num_keys * (_GATHER_PRODUCTS + queries[stop] - queries[begin])

        begins.append(min(range(stop), key=work))
        least.append(work(begins[stop]))
    groups: list[Sequence[tuple[int, int]]] = []
    stop = len(parts)
    while stop:
        groups.append(parts[begins[stop] : stop])
        stop = begins[stop]
    return groups[::-1]


def _masked_spans(slots: Tensor, positions: Tensor, *, start: int, dtype: torch.dtype) -> Iterator[Span]:
    """Spans of at most `_BLOCK_ROWS` queries at `positions` over the keys of one row of slots."""
    for at in range(0, positions.numel(), _BLOCK_ROWS):
        block = positions[at : at + _BLOCK_ROWS]
        num_queries, num_keys = block.numel(), int(block.max()) + 1
        first = int(block.min())
        mask = torch.zeros(num_queries, num_keys, dtype=dtype)
        hidden = torch.arange(first, num_keys) > block[:, None]
        mask[:, first:].masked_fill_(hidden, float("-inf"))
        rows = slice(start + at, start + at + num_queries)
        yield Span(rows, _keys(slots[:num_keys]), 1, num_queries, num_keys, mask=mask if num_queries > 1 else None)


def plan_decode(
    req_to_token: Tensor, rows: Sequence[int], *, seq_lens: Sequence[int], dtype: torch.dtype
) -> list[Span]:
    """Plan a decode: one query per sequence, over all `seq_lens[i]` of its tokens.

    Sequences of similar length share one call, padded to the longest. Padding repeats the sequence's own first slot,
    so that nothing unallocated is ever read, and is masked out.
    """
    order = sorted(range(len(rows)), key=lambda i: -seq_lens[i])
    spans: list[Span] = []
    while order:
        num_keys = seq_lens[order[0]]
        floor = min(num_keys - _PAD_TOKENS, num_keys * 3 // 4)
        members = sorted(i for i in order if seq_lens[i] >= floor)
        order = [i for i in order if seq_lens[i] < floor]
        spans.append(_decode_span(req_to_token, rows, members, seq_lens=seq_lens, dtype=dtype))
    return spans


def _decode_span(
    req_to_token: Tensor, rows: Sequence[int], members: list[int], *, seq_lens: Sequence[int], dtype: torch.dtype
) -> Span:
    lens = torch.tensor([seq_lens[i] for i in members])
    num_keys = int(lens.max())
    slots = req_to_token[torch.tensor([rows[i] for i in members]), :num_keys]
    padding = torch.arange(num_keys) >= lens[:, None]
    mask = None
    if bool(padding.any()):
        slots = torch.where(padding, slots[:, :1], slots)
        mask = torch.zeros(padding.shape, dtype=dtype).masked_fill_(padding, float("-inf"))[:, None, None]
    consecutive = members == list(range(members[0], members[-1] + 1))
    queries = slice(members[0], members[-1] + 1) if consecutive else torch.tensor(members)
    return Span(queries, _keys(slots.reshape(-1)), len(members), 1, num_keys, mask=mask)


def _keys(slots: Tensor) -> slice | Tensor:
    """`slots [num_keys]` as a slice where they ascend by one, else as an int64 index."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first == slots.numel() - 1 and bool((slots[1:] - slots[:-1] == 1).all()):
        return slice(first, last + 1)
    return slots.long()
