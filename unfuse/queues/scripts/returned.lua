local TASK_FIELDS = {'request', 'stage', 'pool', 'task', 'attempt', 'room', 'priority', 'since', 'preferred_node',
  'affinity', 'needs'}
-- The first 8 fields are required. Of these, the first 4 are texts and the others numbers.
local REQUIRED, TEXTS = 8, 4

-- Returns the fields of a queued task that leasing needs. `seen` caches them for one lease request.
local function task_at(member, seen)
  local task = seen[member]
  if task then return task end
  task = {}
  local arguments = {'HMGET', task_of(member), seen.returned, unpack(TASK_FIELDS)}
  local values = try(call, unpack(arguments)) or {}
  local refusals = tonumber(values[1])
  task.is_whole, task.is_excluded = true, refusals and refusals >= A.most_returns
  for i, field in ipairs(TASK_FIELDS) do
    local value = values[i + 1]
    task[field] = value
    if i <= REQUIRED and (not value or i > TEXTS and not tonumber(value)) then task.is_whole = false end
  end
  seen[member] = task
  return task
end

-- Returns the first task of a pool that the worker may lease. Damaged tasks leave the pool and are listed in DAMAGED.
local head_for
function head_for(pool, seen)
  local from, page = 0, 16 -- the first read has one task, since a worker is rarely excluded
  while true do
    local members = call('ZRANGE', ready_key(pool), from, from == 0 and 0 or from + page - 1)
    for _, member in ipairs(members) do
      local task = task_at(member, seen)
      if not task.is_whole then
        call('ZREM', ready_key(pool), member)
        call('HSET', DAMAGED, string.sub(member, RANK + 1), 'task')
        return head_for(pool, seen)
      end
      if not task.is_excluded then return member end
    end
    if #members < (from == 0 and 1 or page) then return nil end
    from = from + #members
  end
end

-- Returns a leased task to its old place, as the next attempt. With `undo` it has the same attempt, since no worker got
-- the lease.
local function hand_back(name, id, undo)
  local key = task_key(name)
  local pool, member, worker = unpack(call('HMGET', key, 'pool', 'member', 'worker'))
  end_lease(name, worker)
  call('HDEL', key, 'worker', 'mark', 'started', 'began', 'step', 'steps')
  if not undo then call('HINCRBY', key, 'attempt', 1) end
  call('HSET', key, 'since', put(pool, member, now))
  update_index(id)
end

function verbs.refuse()
  local name, claim = leased_task(A.claim), A.claim
  if not name then return lost(claim) end
  local key = task_key(name)
  local worker, step = unpack(call('HMGET', key, 'worker', 'step'))
  if tonumber(step) == 0 then call('HINCRBY', key, RETURNED .. worker, 1) end
  hand_back(name, claim.request)

  local excluded, fields = 0, call('HGETALL', key)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, #RETURNED) == RETURNED and tonumber(fields[i + 1]) >= A.most_returns then
      excluded = excluded + 1
    end
  end
  return excluded
end
