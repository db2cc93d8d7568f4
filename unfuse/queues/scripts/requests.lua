-- Requests: admission control, transitions, records and lists.
local IDLE = VERSION .. cmsgpack.pack({})

-- Returns the least number of tasks ahead of one of these tasks.
local function position_of(places)
  local position = false
  for _, place in ipairs(places) do
    ripen(place[1])
    local ahead = call('ZLEXCOUNT', ready_key(place[1]), '-', '(' .. place[2])
    if not position or ahead < position then position = ahead end
  end
  return position
end

-- Returns the stored timings of an attempt, or nil if they are another attempt's.
local function used_by(attempt, used)
  local stored = used and sound(cmsgpack.unpack, used)
  if type(stored) == 'table' and stored[1] == tonumber(attempt) then return stored[2] end
end

-- Returns the running stages of an active request, packed, and its position.
local function standing(id)
  local running, waiting = {}, {}
  for _, stage in ipairs(call('ZRANGE', stages_key(id), 0, -1)) do
    local pool, member, attempt, worker, started, began, step, steps, used = unpack(call('HMGET',
      task_key(name_of(id, stage)), 'pool', 'member', 'attempt', 'worker', 'started', 'began', 'step', 'steps', 'used'))
    if worker then
      local by_now = worked()
      running[#running + 1] = {stage = stage, attempt = tonumber(attempt), worker = worker, since = tonumber(started),
        step = tonumber(step), steps = tonumber(steps), ran_s = by_now - (tonumber(began) or by_now),
        timings = used_by(attempt, used)}
    elseif pool then
      waiting[#waiting + 1] = {pool, member}
    end
  end
  return VERSION .. cmsgpack.pack(running), #running == 0 and position_of(waiting)
end

-- Returns the record of a request: context, running stages, position, id, number of arrival.
local function record(id)
  local context, over, number = unpack(call('HMGET', request_key(id), 'context', 'is_over', 'number'))
  local running, position = IDLE, false
  if over == '0' then running, position = standing(id) end
  return {context, running, position, id, number}
end

-- Stores the context of the verb's arguments. `was` is the last share in the remaining work, `was_active` whether the
-- request was active.
local function store(id, number, was, was_active)
  call('HSET', request_key(id), unpack(A.fields))
  local cost = tonumber(call('HGET', META, 'cost')) or 0
  if A.is_over then
    call('ZREM', ACTIVE, id)
    call('ZADD', OVER, A.completed_at or 0, id)
    if was_active then cost = cost - A.cost end
    if call('ZCARD', ACTIVE) == 0 then cost = 0 end
  elseif not was_active then
    call('ZREM', OVER, id)
    call('ZADD', ACTIVE, number, id)
    cost = cost + A.cost
  end
  call('HSET', META, 'cost', exact(cost))
  if not (was and sound(exchange, was, A.left)) then recount() end
end

local function overload()
  local active, cost, most = call('ZCARD', ACTIVE), tonumber(call('HGET', META, 'cost')) or 0, A.limits
  local say, later = 'OVERLOADED %s', ': try again later'
  if active >= most.max_active then
    return refuse(say, active .. ' requests are in progress, which is the limit' .. later)
  elseif most.max_cost and active > 0 and cost + A.cost > most.max_cost then
    return refuse(say, 'the predicted cost of all active requests would exceed ' .. most.max_cost .. ' s' .. later)
  end
  for pool, more in pairs(A.more) do
    if size(pool) + more > most.max_queue then
      local shown = A.names[pool]
      return refuse(say, size(pool) .. ' tasks wait in pool ' .. shown .. ', the limit is ' .. most.max_queue .. later)
    end
  end
end

-- The rate limit of each tenant, as the microsecond at which all of it is available again.
local RATES = P .. ':rates'

local function in_microseconds(seconds) return math.floor(seconds * 1000000) end

-- Returns when the tenant's whole rate is available again if a request is accepted now.
local function whole_at(may)
  local each = math.floor(may.per_s * 1000000 / may.rate)
  return math.max(tonumber(sound(call, 'HGET', RATES, A.tenant)) or 0, in_microseconds(now)) + each
end

-- Refuses a request beyond the tenant's limits.
local function beyond_allowance(may)
  if may.concurrent > 0 then
    local has = sound(call, 'ZCARD', index_key(A.tenant, 'is_over', '0')) or 0
    if has >= may.concurrent then
      return refuse('LIMITED 0 tenant %s has %d requests in progress, its key allows %d: try again when one has ended',
        A.tenant, has, may.concurrent)
    end
  end
  local early = may.rate > 0 and whole_at(may) - in_microseconds(now) - may.per_s * 1000000 or 0
  if early > 0 then
    return refuse('LIMITED %s the key of %s allows %d requests in %d s: try again in %d s', exact(early / 1000000),
      A.tenant, may.rate, may.per_s, math.ceil(early / 1000000))
  end
end

function verbs.submit()
  local keyed = A.idempotency_key ~= '' and name_of(A.tenant, A.idempotency_key)
  local known = call('EXISTS', request_key(A.id)) == 1 and A.id or keyed and call('HGET', KEYED, keyed)
  if known and call('EXISTS', request_key(known)) == 1 then return sound(record, known) or damaged(known) end
  local may = A.limits.tenant
  local refused = beyond_allowance(may) or overload()
  if refused then return refused end
  if may.rate > 0 then call('HSET', RATES, A.tenant, string.format('%d', whole_at(may))) end
  local number = math.max(call('HINCRBY', META, 'arrivals', 1), in_microseconds(wall))
  call('HSET', META, 'arrivals', exact(number))
  call('ZADD', ALL, number, A.id)
  call('HSET', request_key(A.id), 'number', number)
  if keyed then call('HSET', KEYED, keyed, A.id) end
  store(A.id, number, {}, false)
  local places = push(A.id, A.push, true)
  for _, event in ipairs(A.events) do sound(log, A.id, event) end -- no caller follows it yet
  relist(A.id, false)
  return {false, IDLE, position_of(places), A.id, number} -- the caller has the context
end

-- Returns the record of a request whose context was stored just now, without the context, which the caller has.
local function stored(id, number)
  local running, position = standing(id)
  return {false, running, position, id, number}
end

function verbs.commit()
  local id, claim = A.id, A.claim
  local version, over, done, number, share =
    unpack(call('HMGET', request_key(id), 'version', 'is_over', 'done', 'number', 'left'))
  local name
  if not version then return unknown(id) end
  if claim then
    local marks = sound(cmsgpack.unpack, done)
    if type(marks) ~= 'table' or not tonumber(version) then return damaged(id) end
    if marks[claim.stage] == claim.mark then return record(id) end
    name = held(claim)
    if not name then return lost(claim) end
  end
  if A.version ~= version + 1 then
    return refuse('CONFLICT request %s is at version %d, not %d', id, version, A.version - 1)
  end
  store(id, number, unpacked(share), over == '0')
  if name then remove(name) end
  for _, key in ipairs(A.close) do remove(name_of(key[1], key[2])) end
  push(id, A.push)
  if A.is_over then
    for _, stage in ipairs(call('ZRANGE', stages_key(id), 0, -1)) do remove(name_of(id, stage)) end
    news[id] = true
  end
  for _, event in ipairs(A.events) do publish(id, event) end
  relist(id)
  return A.is_over and {false, IDLE, false, id, number} or sound(stored, id, number) or damaged(id)
end

function verbs.load()
  if call('EXISTS', request_key(A.id)) == 0 then return unknown(A.id) end
  return sound(record, A.id) or damaged(A.id)
end

-- Returns for each request 1 if it is over or unknown, else 0.
function verbs.ended_among()
  local answers = {}
  for i, id in ipairs(A.ids) do
    local over = sound(call, 'HGET', request_key(id), 'is_over') -- nil if it is no hash
    local is_over = over == '1' or (over == false and call('EXISTS', request_key(id)) == 0)
    answers[i] = is_over and 1 or 0
  end
  return answers
end

-- Returns one page of matching records after a number: where the next page starts, the records, and the ids of damaged
-- ones.
function verbs.list()
  local from, found, unsound = A.beyond, {}, {}
  if A.after then
    local after = facts(A.after)
    if not after or (A.which.tenant and after.tenant ~= A.which.tenant) then return unknown(A.after) end
    from = after.number
  end
  local ids = listed(A.heading, from)
  for i = 1, #ids, 2 do
    local fact, one = facts(ids[i]), nil
    local fits = fact
    for field, value in pairs(A.which) do fits = fits and fact[field] == value end
    if fits then one = sound(record, ids[i]) end
    if one then found[#found + 1] = one end
    if not one and (fits or not fact and call('EXISTS', request_key(ids[i])) == 1) then
      unsound[#unsound + 1] = ids[i]
    end
    from = ids[i + 1]
    if #found == A.limit then break end
  end
  return {(#ids == 2 * A.scan) and #found < A.limit and from, found, unsound}
end
