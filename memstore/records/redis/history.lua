-- Replies the records of former versions of one fact, oldest first.

local id = take()
local raw = call('HGET', own .. 'index', id)
local present = raw and tonumber(parse(raw, id).version) or 1
local reply, version = {}, 1
while true do
  local record = call('HGET', own .. 'history', id .. ':' .. version)
  if record then
    reply[#reply + 1] = record
  elseif version >= present then
    return reply
  end
  version = version + 1
end
