-- Applies a batch to one owner. Replies {'ok', ...} with, in order, 'removed' id, 'created' seq id, 'twin' id record;
-- {'replayed', ...} where the key was used before; or {'stale'}, {'conflict', id}, {'shorter', id}, {'duplicate', id},
-- {'embedder', stored}, {'key-conflict'}, {'gone', id}, {'held', id}.

local request, now, encoded, owner, retention = take(), take(), take(), take(), tonumber(take())
local embedder, made_by = take(), take()
local key, key_digest, keys_before = take(), take(), tonumber(take())
local expired_by = tonumber(take())
local num_present, num_removals = tonumber(take()), tonumber(take())
local num_replacements, num_drafts = tonumber(take()), tonumber(take())

local function answer(lines)
  local reply = {'ok'}
  for verb, rest in string.gmatch(lines, '(%l+) ([^\n]+)\n') do
    reply[#reply + 1] = verb
    if verb == 'created' then
      local seq, id = string.match(rest, '^(%d+) (.+)$')
      reply[#reply + 1] = seq
      reply[#reply + 1] = id
    elseif verb == 'twin' then
      local record = call('HGET', own .. 'records', rest)
      if not record then return {'gone', rest} end
      reply[#reply + 1] = rest
      reply[#reply + 1] = record
    else
      reply[#reply + 1] = rest
    end
  end
  return reply
end

local before = remembered(request)
if before then return answer(before) end
refuse_foreign_keys()

local stored_embedder = call('HGET', KEYS[1], 'embedder')
if stored_embedder ~= embedder then return {'embedder', stored_embedder or 'none'} end

if key ~= '' then
  local known = call('HGET', own .. 'idempotency', key)
  if known then
    local digest, start = string.match(known, '^(%S+) %S+()')
    if digest ~= key_digest then return {'key-conflict'} end
    local lines = {}
    for id in string.gmatch(string.sub(known, start), '%S+') do lines[#lines + 1] = 'twin ' .. id .. '\n' end
    local reply = answer(table.concat(lines))
    if reply[1] == 'ok' then reply[1] = 'replayed' end
    return reply
  end
end

-- ---- decide ----

-- What the batch has changed so far; false for what is gone.
local entries, twins, seals = {}, {}, {}

local function entry(id)
  if entries[id] == nil then
    local raw = call('HGET', own .. 'index', id)
    entries[id] = raw and parse(raw, id)
    if raw and call('HEXISTS', own .. 'records', id) == 0 then error('DAMAGED fact ' .. id .. ' has no record') end
  end
  return entries[id]
end

local function twin(digest)
  if twins[digest] == nil then twins[digest] = call('HGET', own .. 'digests', digest) end
  return twins[digest]
end

-- Whether the record of a fact starts with `expected`: sequence number and checksum, of what was read.
local function is_as_read(id, expected)
  if seals[id] then return seals[id] == expected end
  local record = call('HGET', own .. 'records', id)
  return record and string.sub(record, 1, #expected) == expected
end

local writes, lines, added = {}, {}, {}
local num_new, next_seq = 0, nil

local function plan(write) writes[#writes + 1] = write end

local function free_digest(id, e)
  if e.state == 'c' and twin(e.digest) == id then twins[e.digest] = false end
end

local function plan_removal(id, e)
  entries[id] = false
  free_digest(id, e)
  plan(function()
    flush()
    change(now, encoded, 'deleted', id, e.seq, e.version)
    unlink(id, e)
    call('HDEL', own .. 'records', id)
    free_id(id, encoded)
    for version = 1, tonumber(e.version) - 1 do call('HDEL', own .. 'history', id .. ':' .. version) end
    drop_vectors(e.seq)
  end)
end

for _ = 1, num_present do
  local id, expected = take(), take()
  if not entry(id) or not is_as_read(id, expected) then return {'conflict', id} end
end

for _ = 1, num_removals do
  local id, expected = take(), take()
  local e = entry(id)
  if e and (not expired_by or e.expires ~= '-' and tonumber(e.expires) <= expired_by) then
    -- Whoever asked has to return what was removed, and has read another version.
    if not is_as_read(id, expected) then return {'stale'} end
    plan_removal(id, e)
    lines[#lines + 1] = 'removed ' .. id .. '\n'
  end
end

for _ = 1, num_replacements do
  local id, expected, new, body, rows, next_seal = take(), take(), take_entry(), take(), take(), take()
  local e = entry(id)
  if not e or not is_as_read(id, expected) then return {'conflict', id} end
  if new.state == 'c' then
    local other = twin(new.digest)
    if other and other ~= id then return {'duplicate', other} end
  end
  free_digest(id, e)
  if new.state == 'c' then twins[new.digest] = id end
  entries[id], seals[id] = new, next_seal
  plan(function()
    flush()
    change(now, encoded, new.state == 'c' and 'updated' or 'superseded', id, new.seq, new.version)
    if new.version ~= e.version then
      call('HSET', own .. 'history', id .. ':' .. e.version, call('HGET', own .. 'records', id))
    end
    unlink(id, e)
    call('HSET', own .. 'records', id, seal(new.seq, body))
    link(id, new)
    if new.state == 's' or rows ~= '' then
      drop_vectors(new.seq)
    elseif new.version ~= e.version then
      carry_vectors(new.seq, e.version, new.version)
    end
    if new.state == 'c' and rows ~= '' then
      put('HSET', own .. 'vectors:' .. made_by, new.seq, seal_rows(new.seq, new.version, rows))
    end
  end)
end

-- A draft has a new id; a restored fact has the one that it had, and its former versions.
for _ = 1, num_drafts do
  local id, supersedes, e, body, rows, num_former = take(), take(), take_entry(), take(), take(), take()
  local former = {}
  for i = 1, tonumber(num_former) or 0 do former[i] = {version = take(), body = take()} end
  local holder = num_former ~= '' and call('HGET', root .. 'ids', id)
  if holder and holder ~= encoded then return {'held', id} end
  local known = num_former ~= '' and entry(id)
  local other = known and id or e.state == 'c' and twin(e.digest)
  if other then
    local o = entry(other)
    if not o then error('DAMAGED fact ' .. other .. ' has no index entry') end
    if not known and o.expires ~= '-' and tonumber(o.expires) <= tonumber(now) then
      plan_removal(other, o)
      other = false
    elseif supersedes ~= '' then
      return {'conflict', supersedes}
    elseif num_former == '' and o.expires ~= '-' and (e.expires == '-' or tonumber(e.expires) > tonumber(o.expires)) then
      return {'shorter', other}
    elseif not o.is_new and not is_intact(call('HGET', own .. 'records', other)) then
      error('DAMAGED record of fact ' .. other)
    end
  end
  if other then
    lines[#lines + 1] = 'twin ' .. other .. '\n'
    added[#added + 1] = other
  else
    local place = #lines + 1
    lines[place] = ''
    added[#added + 1] = id
    e.is_new = true
    num_new = num_new + 1
    entries[id] = e
    if e.state == 'c' then twins[e.digest] = id end
    plan(function()
      e.seq = digits(next_seq)
      next_seq = next_seq + 1
      lines[place] = 'created ' .. e.seq .. ' ' .. id .. '\n'
      change(now, encoded, 'added', id, e.seq, e.version)
      put('HSET', own .. 'records', id, seal(e.seq, body))
      put('HSET', root .. 'ids', id, encoded)
      link(id, e)
      if num_former ~= '' then
        local version = 1
        -- Damage may have left some.
        while call('HDEL', own .. 'history', id .. ':' .. version) == 1 or version < tonumber(e.version) do
          version = version + 1
        end
        for _, f in ipairs(former) do call('HSET', own .. 'history', id .. ':' .. f.version, seal(e.seq, f.body)) end
      end
      if e.state == 'c' then put('HSET', own .. 'vectors:' .. made_by, e.seq, seal_rows(e.seq, e.version, rows)) end
    end)
  end
end

-- ---- write ----

if #writes > 0 then
  if num_replacements + num_drafts == 0 then write_despite_full_memory() end
  announce(#writes)
  if num_new > 0 then next_seq = call('INCRBY', root .. 'seq', num_new) - num_new + 1 end
  for _, write in ipairs(writes) do write() end
  flush()
  call('HSET', root .. 'embedders', made_by, embedder)
  note_position()
end
if key ~= '' then
  -- More than one at a time, so that what is too old dwindles; the rest is up to the next key.
  local some = call('HRANDFIELD', own .. 'idempotency', 20, 'WITHVALUES')
  for i = 1, #some, 2 do
    local at = tonumber(string.match(some[i + 1], '^%S+ (%S+)'))
    if at and at < keys_before then call('HDEL', own .. 'idempotency', some[i]) end
  end
  call('HSET', own .. 'idempotency', key, key_digest .. ' ' .. now .. ' ' .. table.concat(added, ' '))
end
local told = table.concat(lines)
if #writes > 0 or key ~= '' then
  list_owner(owner)
  trim_feed(retention)
  remember(request, told)
end
return answer(told)
