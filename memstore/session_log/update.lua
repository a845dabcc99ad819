-- Replaces a header. Replies 'ok' or 'gone'.

local id, owner, header, stamp = take(), take(), take(), take()
if call('HGET', session_key(id), 'owner') ~= owner then return 'gone' end
call('HSET', session_key(id), 'header', header)
note_use(id, stamp)
return 'ok'
