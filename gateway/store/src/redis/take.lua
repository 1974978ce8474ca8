-- Grants portions of counters: the rule of counters::granted, for all asks at once.
-- KEYS: the era, and the time in which nothing is granted yet; what is known of the holder; per ask the counter, and the counter of the window before (or the same, if that does not count).
-- ARGV: holder, now, whole, the asker's era, the number of the holder's last word; per ask: most, want, fewest, until, seconds, part of the window before, seconds to live.
-- A counter is a hash: s = spent; a:HOLDER = what it leases, u:HOLDER = until when.
local MAX = 9007199254740991
local holder, now, whole = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1'

if redis.call('HGET', KEYS[1], 'id') ~= ARGV[4] then return redis.error_reply('LOST what was counted') end
if tonumber(redis.call('HGET', KEYS[3], 'w') or '0') > tonumber(ARGV[5]) then
  return redis.error_reply('LOST it was asked before what counts now')
end
if redis.call('EXISTS', KEYS[2]) == 1 then return redis.error_reply('YOUNG counters, wait') end

local function read(key)
  local flat, fields = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  local used = tonumber(fields['s'] or '0')
  for field, value in pairs(fields) do
    if string.sub(field, 1, 2) == 'a:' and tonumber(fields['u:' .. string.sub(field, 3)] or '0') > now then
      used = used + tonumber(value)
    end
  end
  return math.min(used, MAX), fields
end

local asks, enough = {}, true
for i = 1, (#KEYS - 3) / 2 do
  local at = 5 + (i - 1) * 7
  local ask = { key = KEYS[2 * i + 2], until_ = tonumber(ARGV[at + 4]), seconds = tonumber(ARGV[at + 5]), live = ARGV[at + 7] }
  ask.used, ask.fields = read(ask.key)
  local part = tonumber(ARGV[at + 6])
  if part > 0 then
    local before = read(KEYS[2 * i + 3])
    ask.used = math.min(ask.used + math.ceil(before * part / ask.seconds), MAX)
  end
  ask.got = math.min(tonumber(ARGV[at + 2]), math.max(tonumber(ARGV[at + 1]) - ask.used, 0))
  if ask.got < tonumber(ARGV[at + 3]) then
    ask.got = 0
    enough = false
  end
  asks[i] = ask
end

local answer = {}
for i, ask in ipairs(asks) do
  if whole and not enough then ask.got = 0 end
  local own, until_ = ask.got, ask.until_
  local held = tonumber(ask.fields['u:' .. holder] or '0')
  if held > now then
    own = own + tonumber(ask.fields['a:' .. holder] or '0')
    until_ = math.max(until_, held)
  end
  for field, value in pairs(ask.fields) do
    if string.sub(field, 1, 2) == 'u:' and tonumber(value) <= now then
      redis.call('HDEL', ask.key, field, 'a:' .. string.sub(field, 3))
    end
  end
  if own > 0 and until_ > now then
    redis.call('HSET', ask.key, 'a:' .. holder, string.format('%.0f', own), 'u:' .. holder, string.format('%.0f', until_))
    if ask.seconds > 0 then
      redis.call('EXPIRE', ask.key, ask.live)
    elseif ask.fields['s'] then
      redis.call('PERSIST', ask.key)
    else
      -- Nothing is spent for good: it may go when its last lease has.
      local live = math.min(until_ - now + 60, 315360000)
      if redis.call('TTL', ask.key) < live then redis.call('EXPIRE', ask.key, string.format('%.0f', live)) end
    end
  end
  answer[3 * i - 2], answer[3 * i - 1], answer[3 * i] = ask.got, own, ask.used + ask.got
end
return answer
