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
local function index_keys(number, tenant, status, is_over, is_dead_letter, video, fingerprint, webhook_pending)
  local fields, keys = {{'status', status}}, {index_key(tenant, '', '')}
  for field, value in pairs({is_dead_letter = is_dead_letter, video = video, webhook_pending = webhook_pending}) do
    if value == '1' then fields[#fields + 1] = {field, '1'} end
  end
  for _, field in ipairs(fields) do
    keys[#keys + 1] = index_key(nil, field[1], field[2])
    keys[#keys + 1] = index_key(tenant, field[1], field[2])
  end
  if is_over == '0' then keys[#keys + 1] = index_key(tenant, 'is_over', '0') end
  if fingerprint ~= '' then keys[#keys + 1] = index_key(tenant, 'fingerprint', fingerprint) end
  return keys
end

local FACTS = {'number', 'tenant', 'status', 'is_over', 'is_dead_letter', 'fingerprint', 'idempotency_key',
  'webhook_pending'}

-- Returns the filterable fields of a request, as text; nil for an unknown or damaged one. The status is the displayed
-- one: without `is_leased`, the request's tasks are read to find out.
local function facts(id, is_leased)
  local values = redis.pcall('HMGET', request_key(id), unpack(FACTS))
  if values.err or not values[1] then return end
  local fields = {video = string.sub(id, 1, #A.video_id) == A.video_id and '1' or '0'}
  for i, field in ipairs(FACTS) do fields[field] = values[i] or '' end

  local is_unknown = is_leased == nil and fields.status == 'queued'
  for _, stage in ipairs(is_unknown and stages_of(id) or {}) do
    is_leased = is_leased or try(call, 'HEXISTS', task_key(name_of(id, stage)), 'worker') == 1
  end
  if is_leased and fields.status == 'queued' then fields.status = 'in_progress' end
  return fields
end

-- Updates the index of a request. A request without facts, because it was dropped, is removed.
local function update_index(id, is_leased)
  local fields, old_packed, old_keys = facts(id, is_leased), call('HGET', LISTED, id), {}
  local new_facts = fields and {fields.number, fields.tenant, fields.status, fields.is_over, fields.is_dead_letter,
    fields.video, fields.fingerprint, fields.webhook_pending}
  local packed = new_facts and cmsgpack.pack(new_facts)
  if packed == old_packed then return end

  local old_facts = old_packed and try(cmsgpack.unpack, old_packed)
  for _, key in ipairs(type(old_facts) == 'table' and try(index_keys, unpack(old_facts)) or {}) do
    old_keys[key] = true
  end
  for _, key in ipairs(new_facts and index_keys(unpack(new_facts)) or {}) do
    if not old_keys[key] then try(call, 'ZADD', key, fields.number, id) end
    old_keys[key] = nil
  end
  for key in pairs(old_keys) do try(call, 'ZREM', key, id) end
  if packed then call('HSET', LISTED, id, packed) else call('HDEL', LISTED, id) end
end

-- Returns at most `scan` pairs of id and number of an index key, starting after a number.
local function listed(key_fields, from)
  local tenant, field, value = key_fields[1], key_fields[2], key_fields[3]
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
