-- Joins the era, or begins one where the server has lost its own: it is empty, or runs anew, perhaps with what it had some time ago.
-- KEYS: the era, and the time in which nothing is granted yet. ARGV: the id of a new era, the server's run, milliseconds of that time.
-- Answers with the era's id, the milliseconds left, and whether what was spent before the era is still to be restored.
-- The field 'owed' is the id of the last era that nobody has restored: gateways of earlier versions begin eras without it.
local era = redis.call('HMGET', KEYS[1], 'id', 'run', 'owed')
if era[1] and era[2] == ARGV[2] then
  return { era[1], tostring(math.max(redis.call('PTTL', KEYS[2]), 0)), era[3] == era[1] and '1' or '0' }
end
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'run', ARGV[2], 'owed', ARGV[1])
redis.call('SET', KEYS[2], '1', 'PX', ARGV[3])
return { ARGV[1], ARGV[3], '1' }
