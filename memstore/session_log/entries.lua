-- Replies first and last version and then every entry, in any order; false where this owner has no such session.

local id, owner = take(), take()
if call('HGET', session_key(id), 'owner') ~= owner then return false end
local reply = call('HVALS', log_key(id))
table.insert(reply, 1, call('HGET', session_key(id), 'last'))
table.insert(reply, 1, call('HGET', session_key(id), 'first'))
return reply
