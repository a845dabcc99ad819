"""How facts are encoded: what text stands before a fact while its KV is computed."""

from .policies import AnchorList, EncodeJob, EncodingPolicy, StreamWindow, parse_policy

__all__ = ["AnchorList", "EncodeJob", "EncodingPolicy", "StreamWindow", "parse_policy"]
