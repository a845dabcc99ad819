-- Raises a counter, named after the prefix, to at least this value.

local key, least = root .. take(), take()
local value = tonumber(call('GET', key) or '0')
if not value or value < tonumber(least) then call('SET', key, least) end
return 1
