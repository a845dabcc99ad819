-- Stores vectors, given as seq, version, rows, of current facts that still have that version. Replies how many, or the
-- store's embedder where it is another one and this is no reindex.

local embedder, made_by, is_reindex, updates = take(), take(), take() == '1', tonumber(take())
local stored_embedder = call('HGET', KEYS[1], 'embedder') or 'none'
if stored_embedder ~= embedder and not is_reindex then return stored_embedder end
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
