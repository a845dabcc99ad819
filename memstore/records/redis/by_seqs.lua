-- Replies a pair id, record for each of these seqs that a fact has.

local reply = {}
for i = 1, #ARGV do
  local seq = ARGV[i]
  local id = call('ZRANGEBYSCORE', own .. 'current', seq, seq)[1]
    or call('ZRANGEBYSCORE', own .. 'superseded', seq, seq)[1]
  if id then
    reply[#reply + 1] = id
    reply[#reply + 1] = call('HGET', own .. 'records', id)
  end
end
return reply
