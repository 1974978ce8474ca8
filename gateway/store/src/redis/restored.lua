-- Notes that what was spent before an era is restored, so that whoever comes later finds the counters whole.
-- KEYS: the era. ARGV: the teller's era.
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return redis.error_reply('LOST what was counted') end
redis.call('HDEL', KEYS[1], 'owed')
return 'OK'
