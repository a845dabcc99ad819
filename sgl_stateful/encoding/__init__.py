"""How facts are encoded: what text stands before a fact while its KV is computed."""

from .ladder import Ladder, parse_ladder, policies_of
from .policies import AnchorList, EncodeJob, EncodingPolicy, StreamWindow, parse_policy

__all__ = [
    "AnchorList",
    "EncodeJob",
    "EncodingPolicy",
    "Ladder",
    "StreamWindow",
    "parse_ladder",
    "parse_policy",
    "policies_of",
]
