-- Stores vectors, given as seq, version, rows, of current facts that still have that version. Replies how many.

local embedder, made_by, updates = take(), take(), tonumber(take())
refuse_foreign_keys()
local stored = 0
for _ = 1, updates do
  local seq, version, rows = take(), take(), take()
  local id = call('ZRANGEBYSCORE', own .. 'current', seq, seq)[1]
  local raw = id and call('HGET', own .. 'index', id)
  if raw and parse(raw, id).version == version then
    call('HSET', root .. 'embedders', made_by, embedder)
    call('HSET', own .. 'vectors:' .. made_by, seq, seal_rows(seq, version, rows))
    stored = stored + 1
  end
end
return stored
