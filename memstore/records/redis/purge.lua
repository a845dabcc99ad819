-- Removes everything of one owner. Replies {facts, history, vectors, changes, idempotency keys, epoch}.

local request, now, encoded, owner, retention = take(), take(), take(), take(), tonumber(take())

local function answer(line)
  local reply = {}
  for number in string.gmatch(line, '%d+') do reply[#reply + 1] = tonumber(number) end
  return reply
end

local before = remembered(request)
if before then return answer(before) end
refuse_foreign_keys()

local vectors, keys = 0, vector_keys()
for _, key in ipairs(keys) do vectors = vectors + call('HLEN', key) end
local counts = {
  call('HLEN', own .. 'records') + call('HLEN', own .. 'damaged'),
  call('HLEN', own .. 'history'),
  vectors,
  call('XLEN', own .. 'changes'),
  call('HLEN', own .. 'idempotency'),
}

-- Two owner streams cannot hold the same position, so the new entry comes first and survives the rest.
local old = {}
local from = '-'
repeat
  local entries = call('XRANGE', own .. 'changes', from, '+', 'COUNT', 1000)
  for _, entry in ipairs(entries) do old[#old + 1] = entry[1] end
  if #entries > 0 then from = '(' .. entries[#entries][1] end
until #entries < 1000
write_despite_full_memory()
announce(1)
change(now, encoded, 'purged', '', '', '')
note_position()
for start = 1, #old, 1000 do
  local stop = math.min(start + 999, #old)
  call('XDEL', root .. 'feed', unpack(old, start, stop))
  call('XDEL', own .. 'changes', unpack(old, start, stop))
end

for _, id in ipairs(call('HKEYS', own .. 'records')) do free_id(id, encoded) end
for _, name in ipairs({'records', 'index', 'current', 'superseded', 'streams', 'digests', 'expiry', 'history',
  'idempotency', 'damaged'}) do
  keys[#keys + 1] = own .. name
end
call('UNLINK', unpack(keys))
call('ZREM', root .. 'owners', owner)
counts[#counts + 1] = call('HINCRBY', own .. 'head', 'epoch', 1)
trim_feed(retention)
remember(request, table.concat(counts, ' '))
return counts
