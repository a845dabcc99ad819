-- Removes every session of one owner. Replies how many.

local request, owner = take(), take()
local before = remembered(request)
if before then return before end

local ids = call('ZRANGEBYLEX', owned_key(owner), '-', '+')
call('ZSCORE', KEYS[1], '')
if #ids == 0 then return 0 end
for _, id in ipairs(ids) do
  call('UNLINK', session_key(id), log_key(id))
  call('ZREM', KEYS[1], id)
end
call('UNLINK', owned_key(owner))
remember(request, tostring(#ids))
return #ids
