-- Requests: admission control, transitions, records and lists.
local IDLE = VERSION .. cmsgpack.pack({}) -- the running stages of a request that runs none

-- Returns the least number of tasks ahead of one of these tasks, which are pairs of pool and member.
local function position_of(tasks)
  local position = false
  for _, task in ipairs(tasks) do
    release_due(task[1])
    local count = call('ZLEXCOUNT', ready_key(task[1]), '-', '(' .. task[2])
    if not position or count < position then position = count end
  end
  return position
end

-- Returns the stored timings of an attempt, or nil if they are another attempt's.
local function used_by(attempt, used)
  local pair = used and try(cmsgpack.unpack, used) -- attempt and timings
  if type(pair) == 'table' and pair[1] == tonumber(attempt) then return pair[2] end
end

-- Returns the running stages of an active request, packed, and its position.
local function running_and_position(id)
  local running, waiting = {}, {}
  for _, stage in ipairs(call('ZRANGE', stages_key(id), 0, -1)) do
    local pool, member, attempt, worker, started, began, step, steps, used = unpack(call('HMGET',
      task_key(name_of(id, stage)), 'pool', 'member', 'attempt', 'worker', 'started', 'began', 'step', 'steps', 'used'))
    if worker then
      local clock = worked()
      running[#running + 1] = {stage = stage, attempt = tonumber(attempt), worker = worker, since = tonumber(started),
        step = tonumber(step), steps = tonumber(steps), ran_s = clock - (tonumber(began) or clock),
        timings = used_by(attempt, used)}
    elseif pool then
      waiting[#waiting + 1] = {pool, member}
    end
  end
  return VERSION .. cmsgpack.pack(running), #running == 0 and position_of(waiting)
end

-- Returns the record of a request: context, running stages, position, id, number of arrival.
local function record(id)
  local context, is_over, number = unpack(call('HMGET', request_key(id), 'context', 'is_over', 'number'))
  local running, position = IDLE, false
  if is_over == '0' then running, position = running_and_position(id) end
  return {context, running, position, id, number}
end

-- Stores the context of the verb's arguments. `old_share` is the request's last share in the remaining work, nil if it
-- is damaged. `was_active` is whether the request was active.
local function store(id, number, old_share, was_active)
  call('HSET', request_key(id), unpack(A.fields))
  local cost = tonumber(call('HGET', META, 'cost')) or 0
  if A.is_over then
    call('ZREM', ACTIVE, id)
    call('ZADD', OVER, A.completed_at or 0, id)
    if was_active then cost = cost - A.cost end
    if call('ZCARD', ACTIVE) == 0 then cost = 0 end -- sums of floats drift
  elseif not was_active then
    call('ZREM', OVER, id)
    call('ZADD', ACTIVE, number, id)
    cost = cost + A.cost
  end
  call('HSET', META, 'cost', exact(cost))
  if not (old_share and try(exchange, old_share, A.left)) then recount() end
end

local function overload()
  local active, cost, limits = call('ZCARD', ACTIVE), tonumber(call('HGET', META, 'cost')) or 0, A.limits
  local code, later = 'OVERLOADED %s', ': try again later'
  if active >= limits.max_active then
    return refuse(code, active .. ' requests are in progress, which is the limit' .. later)
  elseif limits.max_cost and active > 0 and cost + A.cost > limits.max_cost then
    return refuse(code, 'the predicted cost of all active requests would exceed ' .. limits.max_cost .. ' s' .. later)
  end
  for pool, added in pairs(A.more) do
    if size(pool) + added > limits.max_queue then
      local label = A.names[pool]
      return refuse(code, size(pool) .. ' tasks wait in pool ' .. label .. ', the limit is ' .. limits.max_queue
        .. later)
    end
  end
end

-- The rate limit of each tenant, as the microsecond at which all of it is available again.
local RATES = P .. ':rates'

local function in_microseconds(seconds) return math.floor(seconds * 1000000) end

-- Returns when the tenant's whole rate is available again if a request is accepted now, in microseconds.
local function whole_at(allowance)
  local refill = math.floor(allowance.per_s * 1000000 / allowance.rate)
  return math.max(tonumber(try(call, 'HGET', RATES, A.tenant)) or 0, in_microseconds(now)) + refill
end

-- Refuses a request beyond the tenant's limits.
local function beyond_allowance(allowance)
  if allowance.concurrent > 0 then
    local active = try(call, 'ZCARD', index_key(A.tenant, 'is_over', '0')) or 0
    if active >= allowance.concurrent then
      return refuse('LIMITED 0 tenant %s has %d requests in progress, its key allows %d: try again when one has ended',
        A.tenant, active, allowance.concurrent)
    end
  end
  local excess = allowance.rate > 0 and whole_at(allowance) - in_microseconds(now) - allowance.per_s * 1000000 or 0
  if excess > 0 then
    return refuse('LIMITED %s the key of %s allows %d requests in %d s: try again in %d s', exact(excess / 1000000),
      A.tenant, allowance.rate, allowance.per_s, math.ceil(excess / 1000000))
  end
end

function verbs.submit()
  local keyed = A.idempotency_key ~= '' and name_of(A.tenant, A.idempotency_key)
  local stored_id = call('EXISTS', request_key(A.id)) == 1 and A.id or keyed and call('HGET', KEYED, keyed)
  if stored_id and call('EXISTS', request_key(stored_id)) == 1 then
    return try(record, stored_id) or damaged(stored_id)
  end

  local allowance = A.limits.tenant
  local refusal = beyond_allowance(allowance) or overload()
  if refusal then return refusal end
  if allowance.rate > 0 then call('HSET', RATES, A.tenant, string.format('%d', whole_at(allowance))) end

  -- Unix microseconds, so that a queue of several shards can merge their lists by number.
  local number = math.max(call('HINCRBY', META, 'arrivals', 1), in_microseconds(wall))
  call('HSET', META, 'arrivals', exact(number))
  call('ZADD', ALL, number, A.id)
  call('HSET', request_key(A.id), 'number', number)
  if keyed then call('HSET', KEYED, keyed, A.id) end
  store(A.id, number, {}, false)
  local positions = push(A.id, A.push, true)
  for _, event in ipairs(A.events) do try(log, A.id, event) end -- no caller follows the request yet
  update_index(A.id, false)
  return {false, IDLE, position_of(positions), A.id, number} -- the caller has the context
end

-- Returns the record of a request whose context was stored just now, without the context, which the caller has.
local function stored_record(id, number)
  local running, position = running_and_position(id)
  return {false, running, position, id, number}
end

function verbs.commit()
  local id, claim = A.id, A.claim
  local version, was_over, done, number, share =
    unpack(call('HMGET', request_key(id), 'version', 'is_over', 'done', 'number', 'left'))
  local name
  if not version then return unknown(id) end
  if claim then
    local marks = try(cmsgpack.unpack, done)
    if type(marks) ~= 'table' or not tonumber(version) then return damaged(id) end
    if marks[claim.stage] == claim.mark then return record(id) end -- this commit was applied already
    name = leased_task(claim)
    if not name then return lost(claim) end
  end
  if A.version ~= version + 1 then
    return refuse('CONFLICT request %s is at version %d, not %d', id, version, A.version - 1)
  end

  store(id, number, unpacked(share), was_over == '0')
  if name then remove(name) end
  for _, key in ipairs(A.close) do remove(name_of(key[1], key[2])) end
  push(id, A.push)
  if A.is_over then
    for _, stage in ipairs(call('ZRANGE', stages_key(id), 0, -1)) do remove(name_of(id, stage)) end
    changed_requests[id] = true -- its streams end, even without an event
  end
  for _, event in ipairs(A.events) do publish(id, event) end
  update_index(id)
  return A.is_over and {false, IDLE, false, id, number} or try(stored_record, id, number) or damaged(id)
end

function verbs.load()
  if call('EXISTS', request_key(A.id)) == 0 then return unknown(A.id) end
  return try(record, A.id) or damaged(A.id)
end

-- Returns for each request 1 if it is over or unknown, else 0.
function verbs.ended_among()
  local results = {}
  for i, id in ipairs(A.ids) do
    local flag = try(call, 'HGET', request_key(id), 'is_over') -- nil if it is no hash
    local is_over = flag == '1' or (flag == false and call('EXISTS', request_key(id)) == 0)
    results[i] = is_over and 1 or 0
  end
  return results
end

-- Returns one page of matching records after a number: where the next page starts, the records, and the ids of damaged
-- ones.
function verbs.list()
  local from, records, damaged_ids = A.beyond, {}, {}
  if A.after then
    local after = facts(A.after)
    if not after or (A.which.tenant and after.tenant ~= A.which.tenant) then return unknown(A.after) end
    from = after.number
  end

  local ids = listed(A.heading, from)
  for i = 1, #ids, 2 do
    local fields, stored = facts(ids[i]), nil
    local matches = fields
    for field, value in pairs(A.which) do matches = matches and fields[field] == value end
    if matches then stored = try(record, ids[i]) end
    if stored then records[#records + 1] = stored end
    if not stored and (matches or not fields and call('EXISTS', request_key(ids[i])) == 1) then
      damaged_ids[#damaged_ids + 1] = ids[i]
    end
    from = ids[i + 1]
    if #records == A.limit then break end
  end
  return {(#ids == 2 * A.scan) and #records < A.limit and from, records, damaged_ids}
end
