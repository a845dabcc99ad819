-- Sets when sessions were last used, given as id, stamp, of those that there are.

for _ = 1, #ARGV, 2 do
  local id, stamp = take(), take()
  note_use(id, stamp)
end
return 'ok'
