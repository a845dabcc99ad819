-- Looks at up to `batch` current facts with seq > after, until `limit` are found. Replies the last seq of them (false at the
-- end), then pairs id, record of up to `limit` facts without vectors of this embedder in their present version.
-- A value of a hash is read as a whole; inside the server that costs less than asking for each from the client.

local made_by, after, batch, limit = take(), take(), tonumber(take()), tonumber(take())
local found = call('ZRANGEBYSCORE', own .. 'current', '(' .. after, '+inf', 'WITHSCORES', 'LIMIT', 0, batch)
local reply = {found[#found] or false}
for i = 1, #found, 2 do
  if #reply > 2 * limit then break end
  local id = found[i]
  local raw = call('HGET', own .. 'index', id)
  local e = raw and parse(raw, id)
  local value = e and call('HGET', own .. 'vectors:' .. made_by, e.seq)
  if e and not (value and string.match(value, '^%d+') == e.version) then
    reply[#reply + 1] = id
    reply[#reply + 1] = call('HGET', own .. 'records', id)
  end
end
return reply
