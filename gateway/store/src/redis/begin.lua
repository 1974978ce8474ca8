-- Joins the era, or begins one where the server has lost its own: it is empty, or runs anew, perhaps with what it had some time ago.
-- KEYS: the era, and the time in which nothing is granted yet. ARGV: the id of a new era, the server's run, milliseconds of that time.
local era = redis.call('HMGET', KEYS[1], 'id', 'run')
if era[1] and era[2] == ARGV[2] then
  return { era[1], tostring(math.max(redis.call('PTTL', KEYS[2]), 0)) }
end
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'run', ARGV[2])
redis.call('SET', KEYS[2], '1', 'PX', ARGV[3])
return { ARGV[1], ARGV[3] }
