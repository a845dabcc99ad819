"""A session's content: segments of token ids, each linked to what stands before it.

Links never change, so sessions share what they have in common: a fork begins with its parent's links, and two sessions
of one owner that begin with the same tokens in the same segments have links of the same key. The radix cache shares
their KV in just the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from memstore.session_log import Segment, TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """A segment behind those before it.

    Attributes
    ----------
    key
        16 bytes that stand for the owner and every token so far, and where the segments end.
    end
        Tokens so far, those of ``segment`` included.
    depth
        Segments so far, this one included.
    root_key
        The key of the first link.
    """

    parent: Link | None
    segment: Segment
    key: bytes
    end: int
    depth: int
    root_key: bytes


Head = Link | None
"""The last link of a session; None for one without content."""


def extend(head: Head, segments: Iterable[Segment], *, owner: str) -> Head:
    """The content of ``head`` with further segments behind it."""
    for segment in segments:
        before = hashlib.blake2b(owner.encode(), digest_size=16).digest() if head is None else head.key
        tokens = np.ascontiguousarray(segment.token_ids, dtype="<i4").tobytes()
        key = hashlib.blake2b(before + tokens, digest_size=16).digest()
        root = key if head is None else head.root_key
        head = Link(head, segment, key, num_tokens(head) + len(segment), num_segments(head) + 1, root)
    return head


def links(head: Head) -> Iterator[Link]:
    """Every link, the last one first."""
    while head is not None:
        yield head
        head = head.parent


def segments(head: Head) -> list[Segment]:
    """Every segment, in order."""
    return [link.segment for link in links(head)][::-1]


def first(head: Head, count: int) -> Head:
    """The content of the first ``count`` segments."""
    assert 0 <= count <= num_segments(head), (count, num_segments(head))
    while head is not None and head.depth > count:
        head = head.parent
    return head


def root_key(head: Head) -> bytes:
    """Stands for the owner and the first segment: contents that begin alike have it in common; empty without any."""
    return b"" if head is None else head.root_key


def beyond(heads: Iterable[Head], others: Iterable[Head]) -> Iterator[Link]:
    """Every link of ``heads`` that ``others`` do not have, once; looks only at what they do not have in common."""
    known = list(others)
    for head in heads:
        at = list(known)
        for link in links(head):
            at = [first(other, min(link.depth, num_segments(other))) for other in at]
            if any(other is not None and other.key == link.key for other in at):
                break  # and so is all before it
            yield link
        known.append(head)


def num_tokens(head: Head) -> int:
    """Tokens of the content."""
    return 0 if head is None else head.end


def num_segments(head: Head) -> int:
    """Segments of the content."""
    return 0 if head is None else head.depth


def token_ids(head: Head) -> TokenIds:
    """The ids of the whole content ``[num_tokens]``."""
    parts = [segment.token_ids for segment in segments(head)]
    return np.concatenate(parts, dtype=np.int32) if parts else np.empty(0, np.int32)
