-- Lifts counters to what is known to be spent; or sets what a holder leases.
-- KEYS: the era; the counters. ARGV: the teller's era, holder or '' for what is spent; per counter: amount, until, seconds to live.
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return redis.error_reply('LOST what was counted') end
local holder = ARGV[2]
local field = holder == '' and 's' or ('a:' .. holder)
for i = 2, #KEYS do
  local key, at = KEYS[i], 2 + (i - 2) * 3
  local amount, until_, live = tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  if holder ~= '' and amount == 0 then
    redis.call('HDEL', key, field, 'u:' .. holder)
  elseif holder ~= '' then
    redis.call('HSET', key, field, string.format('%.0f', amount), 'u:' .. holder, string.format('%.0f', until_))
  elseif amount > tonumber(redis.call('HGET', key, field) or '0') then
    redis.call('HSET', key, field, string.format('%.0f', amount))
  end
  if redis.call('EXISTS', key) == 1 and redis.call('TTL', key) < live then redis.call('EXPIRE', key, live) end
end
return 'OK'
