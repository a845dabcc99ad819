-- Goes ahead of every script. KEYS: `{p}:meta`, and `{p}:o:{owner}:head` where the script is about one owner; all other
-- names follow from these two. A script decides first and writes then: Redis keeps what a script that fails has done.

if redis.replicate_commands then redis.replicate_commands() end

local call = redis.call
local root = string.sub(KEYS[1], 1, -5)
local own = KEYS[2] and string.sub(KEYS[2], 1, -5)

local taken = 0
local function take()
  taken = taken + 1
  return ARGV[taken]
end

local function digits(number) return string.format('%.0f', number) end

-- ---- writes, many at once: most of the time of a script goes into calling ----

local PAIRS_AT_ONCE = 500
local buffers, buffered = {}, {}

-- HSET key a b, or ZADD key a b, at the next flush().
local function put(command, key, a, b)
  local name = command .. ' ' .. key
  local buffer = buffers[name]
  if not buffer then
    buffer = {command = command, key = key}
    buffers[name] = buffer
    buffered[#buffered + 1] = buffer
  end
  buffer[#buffer + 1] = a
  buffer[#buffer + 1] = b
end

-- Whatever reads or removes has to come after one.
local function flush()
  for _, buffer in ipairs(buffered) do
    for start = 1, #buffer, 2 * PAIRS_AT_ONCE do
      local stop = math.min(start + 2 * PAIRS_AT_ONCE - 1, #buffer)
      call(buffer.command, buffer.key, unpack(buffer, start, stop))
    end
  end
  buffers, buffered = {}, {}
end

local function vector_keys()
  local keys = {}
  for _, digest in ipairs(call('HKEYS', root .. 'embedders')) do keys[#keys + 1] = own .. 'vectors:' .. digest end
  return keys
end

-- Writing to a key of another type fails in the middle: refuse it before.
local function refuse_foreign_keys()
  local types = {
    head = 'hash', changes = 'stream', records = 'hash', index = 'hash', current = 'zset', superseded = 'zset',
    streams = 'zset', digests = 'hash', expiry = 'zset', history = 'hash', idempotency = 'hash', damaged = 'hash',
  }
  local function check(key, kind)
    local found = call('TYPE', key)['ok']
    if found ~= 'none' and found ~= kind then error('WRONGTYPE ' .. key .. ' is a ' .. found) end
  end
  for name, kind in pairs(types) do check(own .. name, kind) end
  local shared = {
    feed = 'stream', owners = 'zset', ids = 'hash', embedders = 'hash', seq = 'string', position = 'string',
  }
  for name, kind in pairs(shared) do check(root .. name, kind) end
  for _, key in ipairs(vector_keys()) do check(key, 'hash') end
end

-- ---- sealed records and vectors ----

local function seal(seq, body) return seq .. ':' .. redis.sha1hex(seq .. ':' .. body) .. ':' .. body end

local function is_intact(record)
  local seq, digest, start = string.match(record, '^(%d+):(%x+):()')
  return seq and redis.sha1hex(seq .. ':' .. string.sub(record, start)) == digest
end

local function seal_rows(seq, version, rows)
  return version .. ':' .. redis.sha1hex(seq .. ':' .. version .. ':' .. rows) .. ':' .. rows
end

local function drop_vectors(seq)
  for _, key in ipairs(vector_keys()) do call('HDEL', key, seq) end
end

-- What they are made of is the same, only the version is new. What is damaged goes, and is made anew: those of a current
-- fact are always of its present version.
local function carry_vectors(seq, version, new_version)
  for _, key in ipairs(vector_keys()) do
    local value = call('HGET', key, seq)
    local start = value and string.match(value, '^%d+:%x+:()')
    local rows = start and string.sub(value, start)
    if rows and value == seal_rows(seq, version, rows) then
      call('HSET', key, seq, seal_rows(seq, new_version, rows))
    elseif value then
      call('HDEL', key, seq)
    end
  end
end

-- ---- the index: `seq version state content-digest stream-digest expires text-bytes` ----

local function parse(raw, id)
  local seq, version, state, digest, stream, expires, bytes =
    string.match(raw, '^(%d+) (%d+) ([cs]) (%x+) (%x+) (%S+) (%d+)$')
  if not seq then error('DAMAGED index entry of fact ' .. id) end
  return {seq = seq, version = version, state = state, digest = digest, stream = stream, expires = expires,
    bytes = bytes}
end

local function take_entry()
  return {seq = take(), version = take(), state = take(), digest = take(), stream = take(), expires = take(),
    bytes = take()}
end

local function member(id, e)
  return e.state .. ':' .. e.stream .. ':' .. string.rep('0', 16 - #e.seq) .. e.seq .. ':' .. id
end

local function by_state(e) return own .. (e.state == 'c' and 'current' or 'superseded') end

local function link(id, e)
  local line = {e.seq, e.version, e.state, e.digest, e.stream, e.expires, e.bytes}
  put('HSET', own .. 'index', id, table.concat(line, ' '))
  put('ZADD', by_state(e), e.seq, id)
  put('ZADD', own .. 'streams', 0, member(id, e))
  if e.state == 'c' then put('HSET', own .. 'digests', e.digest, id) end
  if e.expires ~= '-' then put('ZADD', own .. 'expiry', e.expires, id) end
end

local function unlink(id, e)
  call('HDEL', own .. 'index', id)
  call('ZREM', by_state(e), id)
  call('ZREM', own .. 'streams', member(id, e))
  if call('HGET', own .. 'digests', e.digest) == id then call('HDEL', own .. 'digests', e.digest) end
  call('ZREM', own .. 'expiry', id)
end

-- ---- the feed ----

local next_position

-- A server without memory refuses the first write of a script unless it removes something, and then allows all: of what
-- gives back memory, the first write removes nothing in particular.
local function write_despite_full_memory() call('UNLINK', root .. 'probe:1') end

-- How many changes there will be. The first write of other scripts: one that is refused has done nothing.
local function announce(changes)
  next_position = call('INCRBY', root .. 'position', changes) - changes + 1
end

local function change(now, encoded, kind, id, seq, version)
  local position = digits(next_position)
  next_position = next_position + 1
  local fields = {'kind', kind, 'id', id, 'seq', seq, 'version', version, 'at', now}
  -- A feed that is ahead of the counter refuses it, before anything else is written.
  call('XADD', root .. 'feed', position .. '-0', 'owner', encoded, unpack(fields))
  call('XADD', own .. 'changes', position .. '-0', unpack(fields))
end

local function note_position() call('HSET', own .. 'head', 'position', digits(next_position - 1)) end

-- Not at every write: `retention` changes stay, or up to a tenth more.
local function trim_feed(retention)
  local last = tonumber(call('GET', root .. 'position') or '0')
  local floor = tonumber(call('HGET', KEYS[1], 'feed_floor') or '0')
  if last - floor <= retention * 1.1 then return end
  floor = digits(last - retention)
  local affected, from = {}, '-'
  repeat
    local entries = call('XRANGE', root .. 'feed', from, floor, 'COUNT', 1000)
    for _, entry in ipairs(entries) do affected[entry[2][2]] = true end
    if #entries > 0 then from = '(' .. entries[#entries][1] end
  until #entries < 1000
  call('HSET', KEYS[1], 'feed_floor', floor)
  local after = digits(tonumber(floor) + 1)
  call('XTRIM', root .. 'feed', 'MINID', after)
  for encoded in pairs(affected) do
    local key = root .. 'o:' .. encoded .. ':changes'
    call('XTRIM', key, 'MINID', after)
    if call('XLEN', key) == 0 then call('UNLINK', key) end
  end
end

-- An id is one owner's; what another has is left alone.
local function free_id(id, encoded)
  if call('HGET', root .. 'ids', id) == encoded then call('HDEL', root .. 'ids', id) end
end

local function list_owner(owner)
  if call('HLEN', own .. 'records') > 0 then
    call('ZADD', root .. 'owners', 0, owner)
  else
    call('ZREM', root .. 'owners', owner)
  end
end

-- ---- repeated requests ----

-- A reply that was lost is given again. It holds no text, and is forgotten after a minute.
local REMEMBER_MS = 60000

local function remember(request, answer) call('SET', root .. 'request:' .. request, answer, 'PX', REMEMBER_MS) end

local function remembered(request) return call('GET', root .. 'request:' .. request) end
