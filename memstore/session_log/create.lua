-- Keeps a new session. Replies 'ok', or 'exists' where there is one of that id and it is not this very one.

local id, owner, header, stamp, version, entry = take(), take(), take(), take(), take(), take()
local session, log, owned = session_key(id), log_key(id), owned_key(owner)

local its_header = call('HGET', session, 'header')
local its_entry = call('HGET', log, version)
if its_header then return its_header == header and its_entry == entry and 'ok' or 'exists' end
-- A key of another program refuses this before anything is written.
call('ZSCORE', KEYS[1], id)
call('ZSCORE', owned, id)

if call('HLEN', log) > 0 then call('UNLINK', log) end
call('HSET', log, version, entry)
call('HSET', session, 'owner', owner, 'header', header, 'used', stamp, 'first', version, 'last', version)
call('ZADD', KEYS[1], 0, id)
call('ZADD', owned, 0, id)
return 'ok'
