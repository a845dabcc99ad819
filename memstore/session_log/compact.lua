-- Replaces every entry by one. Replies 'ok', 'gone', or the last version where it is another one.

local id, owner, version, entry = take(), take(), take(), take()
local session, log = session_key(id), log_key(id)

if call('HGET', session, 'owner') ~= owner then return 'gone' end
local last = call('HGET', session, 'last') or ''
if last ~= version then return last end
call('HLEN', log)

-- What gives back memory comes first: then a server without any allows the rest.
call('UNLINK', log)
call('HSET', log, version, entry)
call('HSET', session, 'first', version)
return 'ok'
