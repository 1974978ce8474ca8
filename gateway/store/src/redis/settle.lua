-- Ends leases and notes what was spent.
-- KEYS: the counters. ARGV: holder; per counter: leased, spent, seconds, seconds to live.
local MAX = 9007199254740991
local holder = ARGV[1]
for i, key in ipairs(KEYS) do
  local at = 1 + (i - 1) * 4
  local amount = redis.call('HGET', key, 'a:' .. holder)
  if amount then
    local left = math.max(tonumber(amount) - tonumber(ARGV[at + 1]), 0)
    if left > 0 then
      redis.call('HSET', key, 'a:' .. holder, string.format('%.0f', left))
    else
      redis.call('HDEL', key, 'a:' .. holder, 'u:' .. holder)
    end
  end
  local spent = tonumber(ARGV[at + 2])
  if spent > 0 then
    local sum = math.min(tonumber(redis.call('HGET', key, 's') or '0') + spent, MAX)
    redis.call('HSET', key, 's', string.format('%.0f', sum))
    if tonumber(ARGV[at + 3]) > 0 then
      redis.call('EXPIRE', key, ARGV[at + 4])
    else
      redis.call('PERSIST', key)
    end
  end
end
return 'OK'
