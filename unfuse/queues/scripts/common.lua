-- What every verb uses. The files are one script: it runs the verbs ARGV[1], ARGV[3], … one after the other, each a
-- transaction of its own, with the arguments ARGV[2], ARGV[4], …, which are codec messages. Keys share the hash tag
-- KEYS[1]. A task that waits is a member of its pool's sorted set, where all scores are equal, so that bytes decide: its
-- rank (8 bytes of priority, 8 of order, 16 of arrival), then its name.
local P, VERSION = KEYS[1], string.sub(ARGV[2], 1, 1)
local call, verbs, RANK = redis.call, {}, 32
local A, now, wall -- the arguments of the verb that runs, and its time
local pools, news = {}, {} -- what has changed, told by `tell` at the end; of a pool true, or that a task came

-- What a function answers, or nothing where what is stored is not what it should be: that costs one record, not all.
local function sound(f, ...)
  local is_done, answer = pcall(f, ...)
  if is_done then return answer end
  return nil
end

local function exact(number) return string.format('%.17g', number) end
local function refuse(...) return {err = string.format(...)} end
local function name_of(first, second) return #first .. ':' .. first .. ':' .. second end
local function request_key(id) return P .. ':request:' .. id end
local function stages_key(id) return P .. ':stages:' .. id end
local function events_key(id) return P .. ':events:' .. id end
local function droppable_key(id) return P .. ':droppable:' .. id end
local function task_key(name) return P .. ':task:' .. name end
local function task_of(member) return task_key(string.sub(member, RANK + 1)) end
local function ready_key(pool) return P .. ':ready:' .. pool end
local function delayed_key(pool) return P .. ':delayed:' .. pool end
local RETURNED = 'returned:' -- who handed which task back without a step of it: a count in the task for each worker
local LEASES, META, AWAITED, DAMAGED = P .. ':leases', P .. ':meta', P .. ':awaited', P .. ':damaged'

-- Whether a comes before b by rank: Lua's own < follows the server's locale. Whole words are compared first, since most
-- of them are equal.
local function before(a, b)
  for word = 1, RANK, 8 do
    if string.sub(a, word, word + 7) ~= string.sub(b, word, word + 7) then
      for i = word, word + 7 do
        local x, y = string.byte(a, i), string.byte(b, i)
        if x ~= y then return x < y end
      end
    end
  end
  return false
end

-- Seconds for which time limits count until now: between two looks for leases that ended, half a lease at most.
local function worked()
  local swept, sum, most = unpack(call('HMGET', META, 'swept', 'worked', 'most_between'))
  return (tonumber(sum) or 0) + math.min(math.max(0, now - (tonumber(swept) or now)), tonumber(most) or 0)
end

-- Tasks whose time has come join the line.
local function ripen(pool)
  local due = call('ZRANGEBYSCORE', delayed_key(pool), '-inf', now)
  for _, member in ipairs(due) do
    call('ZADD', ready_key(pool), 0, member)
    call('ZREM', delayed_key(pool), member)
  end
end

local function size(pool) return call('ZCARD', ready_key(pool)) + call('ZCARD', delayed_key(pool)) end

-- A task has left a pool: that matters if a pool that feeds it was held back, or somebody had no room for its first.
local function left(pool)
  if call('SREM', AWAITED, pool) == 1 then pools[pool] = true end
end

-- A task takes its place in the line, or waits for its time. Answers since when it may be leased.
local function put(pool, member, at)
  if at > now then call('ZADD', delayed_key(pool), at, member) else call('ZADD', ready_key(pool), 0, member) end
  pools[pool] = pools[pool] or 'came'
  return math.max(at, now)
end

local function end_lease(name, worker)
  call('ZREM', LEASES, name)
  if call('HINCRBY', P .. ':leased', worker, -1) <= 0 then call('HDEL', P .. ':leased', worker) end
end

-- Takes a task out of the queue, and ends its lease.
local function remove(name)
  local pool, member, worker = unpack(call('HMGET', task_key(name), 'pool', 'member', 'worker'))
  if not pool then return end
  if worker then
    end_lease(name, worker)
  else
    if call('ZREM', ready_key(pool), member) == 0 then call('ZREM', delayed_key(pool), member) end
    left(pool)
  end
  call('DEL', task_key(name))
end

-- Queues tasks of a request, each in place of an earlier one of its stage, and answers their places. Of a new request
-- there is none yet.
local function push(id, tasks, is_new)
  local places = {}
  local last = #tasks > 0 and call('HINCRBY', META, 'arrivals', #tasks)
  for i, task in ipairs(tasks) do
    local name = name_of(id, task.stage)
    if not is_new then remove(name) end
    local member = task.rank .. string.format('%016x', last - #tasks + i) .. name
    call('ZADD', stages_key(id), 'NX', is_new and i - 1 or call('ZCARD', stages_key(id)), task.stage)
    local since = put(task.pool, member, task.not_before)
    call('HSET', task_key(name), 'request', id, 'stage', task.stage, 'attempt', task.attempt, 'pool', task.pool,
      'member', member, 'room', task.room, 'priority', task.priority, 'near', task.near, 'affinity', task.affinity,
      'task', task.task, 'pushed', exact(wall), 'since', since)
    if task.avoids ~= '' then call('HSET', task_key(name), RETURNED .. task.avoids, A.most_returns) end
    if next(task.needs) then call('HSET', task_key(name), 'needs', cmsgpack.pack(task.needs)) end
    places[i] = {task.pool, member}
  end
  return places
end

-- Numbers an event, dates it if it is not dated, and drops the oldest progress of a log that is full.
local function log(id, event)
  event.seq = call('HINCRBY', request_key(id), 'seq', 1)
  if not event.at or event.at == 0 then event.at = wall end
  call('ZADD', events_key(id), event.seq, VERSION .. cmsgpack.pack(event))
  if event.type == 'progress' or event.type == 'preview' then call('RPUSH', droppable_key(id), event.seq) end
  if event.type == 'appended' then -- of a stage only the last is kept
    local last = call('HGET', request_key(id), 'appended:' .. event.stage)
    if last then call('ZREMRANGEBYSCORE', events_key(id), last, last) end
    call('HSET', request_key(id), 'appended:' .. event.stage, event.seq)
  end
  if event.seq > A.max_events and call('ZCARD', events_key(id)) > A.max_events then
    local old = call('LPOP', droppable_key(id))
    if old then
      call('ZREMRANGEBYSCORE', events_key(id), old, old)
    else
      call('ZREMRANGEBYRANK', events_key(id), 0, 0)
    end
  end
end

local function publish(id, event)
  sound(log, id, event)
  news[id] = true
end

local function damaged(id) return refuse('DAMAGED the stored record of request %s cannot be read', id) end

local function unknown(id) return refuse('NOTFOUND no request %s', id) end

local function lost(claim)
  return refuse('LEASELOST attempt %d of %s of %s does not hold its lease', claim.attempt, claim.stage, claim.request)
end

-- All stages of a request that had a task so far, in order; none where they cannot be read.
local function stages_of(id) return sound(call, 'ZRANGE', stages_key(id), 0, -1) or {} end

-- The name of a task whose lease somebody holds who can show this.
local function held(claim)
  local name = name_of(claim.request, claim.stage)
  return call('HGET', task_key(name), 'mark') == claim.mark and name
end

-- Tells all of it in one message, but for pools whose tasks came and are taken already, which would wake all who wait
-- for nothing.
local function tell()
  local told = {}
  for pool, why in pairs(pools) do
    if why == true or sound(size, pool) ~= 0 then told[#told + 1] = 'pool:' .. pool end
  end
  for id in pairs(news) do told[#told + 1] = 'request:' .. id end
  if #told > 0 then call('PUBLISH', P .. ':news', table.concat(told, '\0')) end
end
