-- Replies up to `limit` pairs id, record with seq > after, by seq. An empty stream digest stands for all streams.

local stream, after, limit, superseded = take(), take(), tonumber(take()), take() == '1'

local function ids_of(state)
  if stream == '' then
    local key = own .. (state == 'c' and 'current' or 'superseded')
    return call('ZRANGEBYSCORE', key, '(' .. after, '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
  end
  local start = state .. ':' .. stream .. ':'
  local found = {}
  for _, member in ipairs(call('ZRANGEBYLEX', own .. 'streams',
    '(' .. start .. string.rep('0', 16 - #after) .. after .. ';', '(' .. start .. ';', 'LIMIT', 0, limit)) do
    local seq, id = string.match(string.sub(member, #start + 1), '^(%d+):(.+)$')
    found[#found + 1] = id
    found[#found + 1] = seq
  end
  return found
end

local sources = {ids_of('c')}
if superseded then sources[2] = ids_of('s') end
local rows = {}
for _, found in ipairs(sources) do
  for i = 1, #found, 2 do rows[#rows + 1] = {found[i], tonumber(found[i + 1])} end
end
table.sort(rows, function(a, b) return a[2] < b[2] end)

local reply = {}
for i = 1, math.min(limit, #rows) do
  local id = rows[i][1]
  reply[#reply + 1] = id
  reply[#reply + 1] = call('HGET', own .. 'records', id)
end
return reply
