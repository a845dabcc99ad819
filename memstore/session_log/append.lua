-- Adds the next version. Replies 'ok', 'gone', or the last version where it is not the one before, or where the log does not
-- have the one that this builds on, '0' being none.

local id, owner, version, base, entry, stamp = take(), take(), take(), take(), take(), take()
local session, log = session_key(id), log_key(id)

if call('HGET', session, 'owner') ~= owner then return 'gone' end
if call('HGET', log, version) == entry then return 'ok' end
local last = call('HGET', session, 'last') or ''
if tonumber(last) ~= tonumber(version) - 1 then return last end
if base ~= '0' and call('HEXISTS', log, base) == 0 then return last end

call('HSET', log, version, entry)
call('HSET', session, 'last', version)
note_use(id, stamp)
return 'ok'
