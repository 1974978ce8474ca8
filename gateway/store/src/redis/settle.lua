-- Ends leases and notes what was spent, once: what has the number of what was done, or one before it, is done.
-- KEYS: the era; what is known of the holder (n: the number of its last settlement, w: of its last word); the counters.
-- ARGV: holder, the teller's era, number; per counter: leased, spent, seconds, seconds to live.
local MAX = 9007199254740991
local holder = ARGV[1]
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[2] then return redis.error_reply('LOST what was counted') end
if tonumber(redis.call('HGET', KEYS[2], 'n') or '0') >= tonumber(ARGV[3]) then return 'OK' end
-- First: a server without memory refuses it, and then nothing is done.
redis.call('HSET', KEYS[2], 'n', ARGV[3])
-- 40 days: longer than anything is on its way.
redis.call('EXPIRE', KEYS[2], 3456000)
for i = 3, #KEYS do
  local key, at = KEYS[i], 3 + (i - 3) * 4
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
