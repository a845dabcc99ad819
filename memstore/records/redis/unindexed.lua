-- Looks at up to `batch` current facts with seq > after. Replies the last seq looked at (false at the end), then pairs
-- id, record of up to `limit` facts without vectors of this embedder in their present version.

local made_by, after, batch, limit = take(), take(), tonumber(take()), tonumber(take())
local found = call('ZRANGEBYSCORE', own .. 'current', '(' .. after, '+inf', 'WITHSCORES', 'LIMIT', 0, batch)
local reply = {found[#found] or false}
for i = 1, #found, 2 do
  local id = found[i]
  local raw = call('HGET', own .. 'index', id)
  local e = raw and parse(raw, id)
  local value = e and call('HGET', own .. 'vectors:' .. made_by, e.seq)
  if e and not (value and string.match(value, '^%d+') == e.version) and #reply <= 2 * limit then
    reply[#reply + 1] = id
    reply[#reply + 1] = call('HGET', own .. 'records', id)
  end
end
return reply
