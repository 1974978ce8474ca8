-- Lifts counters to what is known to be spent; or sets what a holder leases, which is its word from then on: answers with the number of that.
-- KEYS: the era; what is known of the holder; the counters. ARGV: the teller's era, holder or '' for what is spent, the number of its word before;
-- per counter: amount, until, seconds to live.
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return redis.error_reply('LOST what was counted') end
local holder = ARGV[2]
local field = holder == '' and 's' or ('a:' .. holder)
local word = 0
if holder ~= '' then
  word = math.max(tonumber(redis.call('HGET', KEYS[2], 'w') or '0'), tonumber(ARGV[3])) + 1
  redis.call('HSET', KEYS[2], 'w', string.format('%.0f', word))
  -- 40 days: longer than anything is on its way.
  redis.call('EXPIRE', KEYS[2], 3456000)
end
for i = 3, #KEYS do
  local key, at = KEYS[i], 3 + (i - 3) * 3
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
return word
