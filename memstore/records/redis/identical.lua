-- Replies, for each of these content digests, id and record of the current fact that has it, or two times false.

local reply = {}
for i = 1, #ARGV do
  local id = call('HGET', own .. 'digests', ARGV[i])
  reply[2 * i - 1] = id
  reply[2 * i] = id and call('HGET', own .. 'records', id)
end
return reply
