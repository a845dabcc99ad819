-- Makes an embedder the store's if every current fact has its vectors. Replies 1, or 0, or -1 where the owners given, all
-- that have a fact, are not all of them any more.

local embedder, made_by, owners = take(), take(), tonumber(take())
if call('ZCARD', root .. 'owners') ~= owners then return -1 end

local encoded = {}
for _ = 1, owners do
  local name, key = take(), take()
  if not call('ZSCORE', root .. 'owners', name) then return -1 end
  encoded[#encoded + 1] = root .. 'o:' .. key .. ':'
end

-- The vectors of an owner are those of current facts in their present version: equal numbers are the same facts.
for _, prefix in ipairs(encoded) do
  if call('HLEN', prefix .. 'vectors:' .. made_by) ~= call('ZCARD', prefix .. 'current') then return 0 end
end

call('HSET', KEYS[1], 'embedder', embedder)
for _, other in ipairs(call('HKEYS', root .. 'embedders')) do
  if other ~= made_by then
    for _, prefix in ipairs(encoded) do call('UNLINK', prefix .. 'vectors:' .. other) end
    call('HDEL', root .. 'embedders', other)
  end
end
return 1
