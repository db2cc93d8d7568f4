-- Functions that all verbs share. The files are one script: it runs the verbs ARGV[1], ARGV[3], … one after the other,
-- each as its own transaction, with the arguments ARGV[2], ARGV[4], …, which are codec messages. All keys have the hash
-- tag KEYS[1]. A waiting task is a member of its pool's sorted set, where all scores are equal, so that members sort by
-- their bytes: the rank (8 bytes of priority, 8 of order, 16 of arrival), then the task's name.
local P, VERSION = KEYS[1], string.sub(ARGV[2], 1, 1)
local call, verbs, RANK = redis.call, {}, 32
local A, now, wall -- the arguments of the verb that runs, its time on the queue's clock, and its Unix time
-- Changed pools (true, or 'came' after a push) and changed requests, which `publish_changes` publishes.
local pools, changed_requests = {}, {}

-- Returns the result of a function, or nil if it raises because a stored record is damaged. One damaged record must
-- not fail the whole verb.
local function try(f, ...)
  local is_done, result = pcall(f, ...)
  if is_done then return result end
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
local RETURNED = 'returned:' -- prefix of a task's fields that count the refusals of each worker
local LEASES, META, AWAITED, DAMAGED = P .. ':leases', P .. ':meta', P .. ':awaited', P .. ':damaged'

-- Returns whether member a sorts before b, by rank. Lua's own < depends on the server's locale. Words of 8 bytes are
-- compared for equality first, since most are equal.
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

-- The time-limit clock, in seconds: between two calls of `sweep_expired`, it advances by half a lease at most.
local function worked()
  local swept, sum, max_gap = unpack(call('HMGET', META, 'swept', 'worked', 'most_between'))
  return (tonumber(sum) or 0) + math.min(math.max(0, now - (tonumber(swept) or now)), tonumber(max_gap) or 0)
end

-- Moves delayed tasks whose `not_before` has passed to the ready tasks.
local function release_due(pool)
  local due = call('ZRANGEBYSCORE', delayed_key(pool), '-inf', now)
  for _, member in ipairs(due) do
    call('ZADD', ready_key(pool), 0, member)
    call('ZREM', delayed_key(pool), member)
  end
end

local function size(pool) return call('ZCARD', ready_key(pool)) + call('ZCARD', delayed_key(pool)) end

-- Notes that a task has left a pool, if a waiting worker could not lease because of this pool: a pool that feeds it was
-- held back, or the worker lacked resources for its first task.
local function note_removal(pool)
  if call('SREM', AWAITED, pool) == 1 then pools[pool] = true end
end

-- Adds a task to the ready or delayed tasks of its pool. Returns the time from which it may be leased.
local function put(pool, member, at)
  if at > now then call('ZADD', delayed_key(pool), at, member) else call('ZADD', ready_key(pool), 0, member) end
  pools[pool] = pools[pool] or 'came'
  return math.max(at, now)
end

local function end_lease(name, worker)
  call('ZREM', LEASES, name)
  if call('HINCRBY', P .. ':leased', worker, -1) <= 0 then call('HDEL', P .. ':leased', worker) end
end

-- Removes a queued task, or ends the lease of a leased one.
local function remove(name)
  local pool, member, worker = unpack(call('HMGET', task_key(name), 'pool', 'member', 'worker'))
  if not pool then return end
  if worker then
    end_lease(name, worker)
  else
    if call('ZREM', ready_key(pool), member) == 0 then call('ZREM', delayed_key(pool), member) end
    note_removal(pool)
  end
  call('DEL', task_key(name))
end

-- Queues tasks of a request, replacing earlier tasks of their stages, of which a new request has none. Returns the pool
-- and member of each.
local function push(id, tasks, is_new)
  local positions = {}
  local last_arrival = #tasks > 0 and call('HINCRBY', META, 'arrivals', #tasks)
  for i, task in ipairs(tasks) do
    local name = name_of(id, task.stage)
    if not is_new then remove(name) end
    local member = task.rank .. string.format('%016x', last_arrival - #tasks + i) .. name
    call('ZADD', stages_key(id), 'NX', is_new and i - 1 or call('ZCARD', stages_key(id)), task.stage)
    local since = put(task.pool, member, task.not_before)
    call('HSET', task_key(name), 'request', id, 'stage', task.stage, 'attempt', task.attempt, 'pool', task.pool,
      'member', member, 'room', task.room, 'priority', task.priority, 'preferred_node', task.preferred_node,
      'affinity', task.affinity, 'task', task.task, 'pushed', exact(wall), 'since', since)
    if task.avoid_worker ~= '' then call('HSET', task_key(name), RETURNED .. task.avoid_worker, A.most_returns) end
    if next(task.needs) then call('HSET', task_key(name), 'needs', cmsgpack.pack(task.needs)) end
    positions[i] = {task.pool, member}
  end
  return positions
end

-- Numbers and stores an event, sets its time if it has none, and drops the oldest progress of a full history.
local function log(id, event)
  event.seq = call('HINCRBY', request_key(id), 'seq', 1)
  if not event.at or event.at == 0 then event.at = wall end
  call('ZADD', events_key(id), event.seq, VERSION .. cmsgpack.pack(event))
  if event.type == 'progress' or event.type == 'preview' then call('RPUSH', droppable_key(id), event.seq) end
  if event.type == 'appended' then -- only the last event of a stage is stored
    local last = call('HGET', request_key(id), 'appended:' .. event.stage)
    if last then call('ZREMRANGEBYSCORE', events_key(id), last, last) end
    call('HSET', request_key(id), 'appended:' .. event.stage, event.seq)
  end
  if event.seq > A.max_events and call('ZCARD', events_key(id)) > A.max_events then
    local oldest = call('LPOP', droppable_key(id))
    if oldest then
      call('ZREMRANGEBYSCORE', events_key(id), oldest, oldest)
    else
      call('ZREMRANGEBYRANK', events_key(id), 0, 0)
    end
  end
end

local function publish(id, event)
  try(log, id, event)
  changed_requests[id] = true
end

local function damaged(id) return refuse('DAMAGED the stored record of request %s cannot be read', id) end

local function unknown(id) return refuse('NOTFOUND request %s does not exist', id) end

local function lost(claim)
  return refuse('LEASELOST attempt %d of %s of %s no longer has its lease', claim.attempt, claim.stage, claim.request)
end

-- Returns all stages of a request that ever had a task, in order; none if the record is damaged.
local function stages_of(id) return try(call, 'ZRANGE', stages_key(id), 0, -1) or {} end

-- Returns the name of the claim's task, or false if the claim holds no lease.
local function leased_task(claim)
  local name = name_of(claim.request, claim.stage)
  return call('HGET', task_key(name), 'mark') == claim.mark and name
end

-- Publishes all changes in one message. Pools whose pushed tasks are leased already are left out: their message would
-- wake waiting workers in vain.
local function publish_changes()
  local changes = {}
  for pool, reason in pairs(pools) do
    if reason == true or try(size, pool) ~= 0 then changes[#changes + 1] = 'pool:' .. pool end
  end
  for id in pairs(changed_requests) do changes[#changes + 1] = 'request:' .. id end
  if #changes > 0 then call('PUBLISH', P .. ':news', table.concat(changes, '\0')) end
end
