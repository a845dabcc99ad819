-- Goes ahead of every script. KEYS: `{p}:sessions`; all other names follow from it. Session ids come in hex, owners encoded
-- (see `memstore.records.redis.keys`). A script decides first and writes then, and does no harm when it runs twice.

if redis.replicate_commands then redis.replicate_commands() end

local call = redis.call
local root = string.sub(KEYS[1], 1, -9)

local taken = 0
local function take()
  taken = taken + 1
  return ARGV[taken]
end

local function session_key(id) return root .. 'session:' .. id end
local function log_key(id) return root .. 'session-log:' .. id end
local function owned_key(owner) return root .. 'o:' .. owner .. ':sessions' end

-- `used` is the time as text, a space and a checksum. One that is damaged is left to be found.
local function note_use(id, stamp)
  local before = call('HGET', session_key(id), 'used')
  before = before and tonumber(string.match(before, '^%S*'))
  if before and before < tonumber(string.match(stamp, '^%S+')) then call('HSET', session_key(id), 'used', stamp) end
end

-- A reply that was lost is given again; it is forgotten after a minute.
local REMEMBER_MS = 60000

local function remember(request, answer) call('SET', root .. 'request:' .. request, answer, 'PX', REMEMBER_MS) end

local function remembered(request)
  local before = call('GET', root .. 'request:' .. request)
  return before and tonumber(before)
end
