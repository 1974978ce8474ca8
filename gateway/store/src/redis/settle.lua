-- Ends leases and notes what was spent.
-- KEYS: the era; the counters. ARGV: holder, the teller's era; per counter: leased, spent, seconds, seconds to live.
local MAX = 9007199254740991
local holder = ARGV[1]
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[2] then return redis.error_reply('LOST what was counted') end
for i = 2, #KEYS do
  local key, at = KEYS[i], 2 + (i - 2) * 4
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
