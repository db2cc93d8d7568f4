-- The index of requests: for each index key (`IndexKey` in base.py) a sorted set of ids by number of arrival.
local ACTIVE, OVER, ALL, KEYED = P .. ':active', P .. ':over', P .. ':requests', P .. ':keyed'
local LISTED = P .. ':listed' -- the facts by which each request is indexed now, packed

local function index_key(tenant, field, value)
  if not tenant and field == '' then return ALL end
  if not tenant and field == 'is_over' then return ACTIVE end
  return P .. ':list:' .. (tenant and name_of(tenant, '') or '') .. '/' .. field .. '/' .. value
end

-- Returns the keys of all `RequestFilter.index_key`s that must find a request with these facts, except ALL and ACTIVE,
-- which `store` and `submit` maintain.
local function index_keys(number, tenant, status, over, dead, video, fingerprint, webhook_pending)
  local fields, keys = {{'status', status}}, {index_key(tenant, '', '')}
  for field, value in pairs({is_dead_letter = dead, video = video, webhook_pending = webhook_pending}) do
    if value == '1' then fields[#fields + 1] = {field, '1'} end
  end
  for _, field in ipairs(fields) do
    keys[#keys + 1] = index_key(nil, field[1], field[2])
    keys[#keys + 1] = index_key(tenant, field[1], field[2])
  end
  if over == '0' then keys[#keys + 1] = index_key(tenant, 'is_over', '0') end
  if fingerprint ~= '' then keys[#keys + 1] = index_key(tenant, 'fingerprint', fingerprint) end
  return keys
end

local FACTS = {'number', 'tenant', 'status', 'is_over', 'is_dead_letter', 'fingerprint', 'idempotency_key', 'webhook_pending'}

-- Returns the filterable fields of a request, as text; nil for an unknown or damaged one. The status is the displayed
-- one: without `is_leased`, the request's tasks are read to find out.
local function facts(id, is_leased)
  local values = redis.pcall('HMGET', request_key(id), unpack(FACTS))
  if values.err or not values[1] then return end
  local fact = {video = string.sub(id, 1, #A.video_id) == A.video_id and '1' or '0'}
  for i, field in ipairs(FACTS) do fact[field] = values[i] or '' end
  local is_unknown = is_leased == nil and fact.status == 'queued'
  for _, stage in ipairs(is_unknown and stages_of(id) or {}) do
    is_leased = is_leased or sound(call, 'HEXISTS', task_key(name_of(id, stage)), 'worker') == 1
  end
  if is_leased and fact.status == 'queued' then fact.status = 'in_progress' end
  return fact
end

-- Updates the index of a request. A request without facts, because it was dropped, is removed.
local function relist(id, is_leased)
  local fact, before, was = facts(id, is_leased), call('HGET', LISTED, id), {}
  local after = fact and {fact.number, fact.tenant, fact.status, fact.is_over, fact.is_dead_letter, fact.video, fact.fingerprint,
    fact.webhook_pending}
  local packed = after and cmsgpack.pack(after)
  if packed == before then return end
  local listed_by = before and sound(cmsgpack.unpack, before)
  for _, key in ipairs(type(listed_by) == 'table' and sound(index_keys, unpack(listed_by)) or {}) do was[key] = true end
  for _, key in ipairs(after and index_keys(unpack(after)) or {}) do
    if not was[key] then sound(call, 'ZADD', key, fact.number, id) end
    was[key] = nil
  end
  for key in pairs(was) do sound(call, 'ZREM', key, id) end
  if packed then call('HSET', LISTED, id, packed) else call('HDEL', LISTED, id) end
end

-- Returns at most `scan` pairs of id and number of an index key, starting after a number.
local function listed(heading, from)
  local tenant, field, value = heading[1], heading[2], heading[3]
  if field == 'idempotency_key' then
    local id = call('HGET', KEYED, name_of(tenant, value))
    local number = id and tonumber(call('HGET', request_key(id), 'number'))
    local start = tonumber(from) or (A.oldest_first and -1 or math.huge)
    if not number or number == start or (number < start) == A.oldest_first then return {} end
    return {id, number}
  end
  local key = index_key(tenant, field, value)
  if A.oldest_first then
    return call('ZRANGEBYSCORE', key, '(' .. from, '+inf', 'WITHSCORES', 'LIMIT', 0, A.scan)
  end
  return call('ZREVRANGEBYSCORE', key, '(' .. from, '-inf', 'WITHSCORES', 'LIMIT', 0, A.scan)
end
