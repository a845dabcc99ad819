"""Records on a Redis server.

Keys
----
`{p}` is the prefix; `{o}` is `{p}:o:` and the owner in base64url of its UTF-8, without padding. Digests are hex.

==========================  ======  ===================================================================================
`{p}:meta`                  hash    `schema_version`, `embedder` (fingerprint), `feed_floor` (last position trimmed)
`{p}:embedders`             hash    digest of a fingerprint -> fingerprint, of those that vectors are from
`{p}:seq`, `{p}:position`   string  counters: last seq, last position of the feed
`{p}:feed`                  stream  `position-0` -> encoded owner, kind, id, seq, version, at; never what a fact says
`{p}:owners`                zset    every owner that has a fact, all with score 0
`{p}:ids`                   hash    id -> encoded owner, of every fact that has a record
`{p}:request:{uuid}`        string  what a write did, without text, for a minute: a repeated write does nothing again
`{p}:sessions`              zset    every session of `memstore.session_log`, its id in hex, all with score 0
`{p}:session:{hex}`         hash    `owner` (encoded), sealed `header` and `used`, `first` and `last` version in the log
`{p}:session-log:{hex}`     hash    version -> sealed entry, with the tokens
`{o}:head`                  hash    `epoch`, `position` of the last change; survives a purge
`{o}:changes`               stream  the owner's part of the feed
`{o}:records`               hash    id -> sealed record (see `memstore.records.codec`): the truth that the rest follows
`{o}:index`                 hash    id -> `seq version state content-digest stream-digest expires text-bytes`
`{o}:current`               zset    id, by seq
`{o}:superseded`            zset    id, by seq
`{o}:streams`               zset    `state:stream-digest:seq:id`, all with score 0
`{o}:digests`               hash    content digest -> id, of current facts
`{o}:expiry`                zset    id, by `expires_at`
`{o}:history`               hash    `id:version` -> sealed record of a former version
`{o}:vectors:{digest}`      hash    seq -> `version:sha1("seq:version:rows"):rows`, of current facts, in their version
`{o}:idempotency`           hash    key -> `digest at id id ...`
`{o}:damaged`               hash    id -> record that a check has set aside
`{o}:sessions`              zset    the owner's sessions, their ids in hex, all with score 0
==========================  ======  ===================================================================================

Every change is one Lua script, which decides before it writes. Records pass through as they are.

Permissions
-----------
What the user of a store has to be allowed, with `memstore` as the prefix:

    ~memstore:* resetchannels -@all +evalsha +script|load +multi +exec +info +select +scan +type +exists +get +set
    +incrby +unlink +hget +hmget +hset +hsetnx +hdel +hlen +hkeys +hvals +hexists +hincrby +hscan +hrandfield
    +zadd +zrem +zcard +zscore +zmscore +zrange +zrangebyscore +zrangebylex +zscan +xadd +xdel +xtrim +xlen +xrange

and, for a purge that reaches the server's files, a `compact`, and a `doctor` that can tell everything:

    +bgrewriteaof +bgsave +memory|purge +config|get
"""

from memstore.records.redis.options import RedisOptions
from memstore.records.redis.store import RedisRecords

__all__ = ["RedisOptions", "RedisRecords"]
