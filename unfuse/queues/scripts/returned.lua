local WORDS = {'request', 'stage', 'pool', 'task', 'attempt', 'room', 'priority', 'since', 'preferred_node', 'affinity', 'needs'}
local NEEDED, TEXTS = 8, 4 -- so many fields are required; of these, all after the texts must be numbers

-- Returns the fields of a queued task that leasing needs. `seen` caches them for one lease request.
local function task_at(member, seen)
  local task = seen[member]
  if task then return task end
  task = {}
  local words = {'HMGET', task_of(member), seen.returned, unpack(WORDS)}
  local values = sound(call, unpack(words)) or {}
  local times = tonumber(values[1])
  task.is_whole, task.is_kept = true, times and times >= A.most_returns
  for i, word in ipairs(WORDS) do
    local value = values[i + 1]
    task[word] = value
    if i <= NEEDED and (not value or i > TEXTS and not tonumber(value)) then task.is_whole = false end
  end
  seen[member] = task
  return task
end

-- Returns the first task of a pool that the worker may lease. Damaged tasks are set aside.
local head_for
function head_for(pool, seen)
  local from, many = 0, 16
  while true do
    local members = call('ZRANGE', ready_key(pool), from, from == 0 and 0 or from + many - 1)
    for _, member in ipairs(members) do
      local task = task_at(member, seen)
      if not task.is_whole then
        call('ZREM', ready_key(pool), member)
        call('HSET', DAMAGED, string.sub(member, RANK + 1), 'task')
        return head_for(pool, seen)
      end
      if not task.is_kept then return member end
    end
    if #members < (from == 0 and 1 or many) then return nil end
    from = from + #members
  end
end

-- Returns a leased task to its old place, as the next attempt. `undo`: as the same attempt, since no worker got it.
local function put_back(name, id, undo)
  local key = task_key(name)
  local pool, member, worker = unpack(call('HMGET', key, 'pool', 'member', 'worker'))
  end_lease(name, worker)
  call('HDEL', key, 'worker', 'mark', 'started', 'began', 'step', 'steps')
  if not undo then call('HINCRBY', key, 'attempt', 1) end
  call('HSET', key, 'since', put(pool, member, now))
  relist(id)
end

function verbs.refuse()
  local name, claim = held(A.claim), A.claim
  if not name then return lost(claim) end
  local key = task_key(name)
  local worker, step = unpack(call('HMGET', key, 'worker', 'step'))
  if tonumber(step) == 0 then call('HINCRBY', key, RETURNED .. worker, 1) end
  put_back(name, claim.request)
  local done_with, fields = 0, call('HGETALL', key)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, #RETURNED) == RETURNED and tonumber(fields[i + 1]) >= A.most_returns then
      done_with = done_with + 1
    end
  end
  return done_with
end
