-- Mends what other keys say of one fact. The record has to be `expected` still, '' being none. Replies 1; 0 where it is not;
-- -1 where another current fact has the same content. Without a record, what is left of the fact goes.

local now, encoded, owner, id, expected = take(), take(), take(), take(), take()
local kind, seq, version = take(), take(), take()
local aside, has_entry = take() == '1', take() == '1'
local new = has_entry and take_entry()
local num_strays = tonumber(take())

if (call('HGET', own .. 'records', id) or '') ~= expected then return 0 end
if new and new.state == 'c' then
  local other = call('HGET', own .. 'digests', new.digest)
  if other and other ~= id and call('HEXISTS', own .. 'records', other) == 1 then return -1 end
end

if kind ~= '' then
  announce(1)
  change(now, encoded, kind, id, seq, version)
  note_position()
end
local known, old = pcall(parse, call('HGET', own .. 'index', id) or '', id)
if known then unlink(id, old) end
call('HDEL', own .. 'index', id)
for _, name in ipairs({'current', 'superseded', 'expiry'}) do call('ZREM', own .. name, id) end
for _ = 1, num_strays do
  local name, stray = take(), take()
  if name == 'streams' then
    call('ZREM', own .. 'streams', stray)
  elseif call('HGET', own .. 'digests', stray) == id then
    call('HDEL', own .. 'digests', stray)
  end
end
if aside then
  call('HSET', own .. 'damaged', id, expected)
  call('HDEL', own .. 'records', id)
  drop_vectors(seq)
end
if new then
  link(id, new)
  put('HSET', root .. 'ids', id, encoded)
  flush()
else
  free_id(id, encoded)
end
list_owner(owner)
return 1
