-- Removes a session. Replies 1, or 0 where this owner has no such session.

local request, id, owner = take(), take(), take()
local before = remembered(request)
if before then return before end
if call('HGET', session_key(id), 'owner') ~= owner then return 0 end
call('ZSCORE', KEYS[1], id)
call('ZSCORE', owned_key(owner), id)

call('UNLINK', session_key(id), log_key(id))
call('ZREM', KEYS[1], id)
call('ZREM', owned_key(owner), id)
remember(request, '1')
return 1
