-- Uses every command of the other scripts once, on keys that it removes: a user who lacks one of them in the middle of a
-- script would leave half of a change. KEYS: `{p}:meta`.

local text, hash, zset, stream = root .. 'probe:1', root .. 'probe:2', root .. 'probe:3', root .. 'probe:4'
local refused
local function try(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err and not refused then refused = reply end
end
try('UNLINK', text, hash, zset, stream)
if refused then return refused end
try('SET', text, 1, 'PX', 1000)
try('INCRBY', text, 1)
try('GET', text)
try('TYPE', text)
try('HSET', hash, 'a', 1)
try('HINCRBY', hash, 'a', 1)
try('HGET', hash, 'a')
try('HEXISTS', hash, 'a')
try('HLEN', hash)
try('HKEYS', hash)
try('HRANDFIELD', hash, 1, 'WITHVALUES')
try('HDEL', hash, 'b')
try('ZADD', zset, 1, 'a')
try('ZCARD', zset)
try('ZSCORE', zset, 'a')
try('ZRANGEBYSCORE', zset, 1, 1)
try('ZRANGEBYLEX', zset, '-', '+')
try('ZREM', zset, 'b')
try('XADD', stream, '1-0', 'a', 1)
try('XLEN', stream)
try('XRANGE', stream, '-', '+')
try('XDEL', stream, '2-0')
try('XTRIM', stream, 'MINID', '1')
try('UNLINK', text, hash, zset, stream)
return refused or 'ok'
