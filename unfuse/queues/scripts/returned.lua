-- Who handed which task back without a step of it: a count in the task for each worker.
local RETURNED = 'returned:'

-- Whether a worker gets a task no more.
local function is_kept_from(worker, name)
  local times = tonumber(sound(call, 'HGET', task_key(name), RETURNED .. worker))
  return times and times >= A.most_returns
end

-- Whether a task has all that leasing it takes.
local function is_whole(name)
  local words = sound(call, 'HMGET', task_key(name), 'request', 'stage', 'pool', 'task', 'attempt', 'room', 'priority', 'since')
  for i = 1, 8 do
    if not words or not words[i] or (i > 4 and not tonumber(words[i])) then return false end
  end
  return true
end

-- The first of a line that a worker may get.
local head_for
function head_for(worker, pool)
  local from, many = 0, 16
  while true do
    local members = call('ZRANGE', ready_key(pool), from, from == 0 and 0 or from + many - 1)
    for _, member in ipairs(members) do
      local name = string.sub(member, RANK + 1)
      if not is_whole(name) then
        call('ZREM', ready_key(pool), member)
        call('HSET', DAMAGED, name, 'task')
        return head_for(worker, pool)
      end
      if not is_kept_from(worker, name) then return member end
    end
    if #members < (from == 0 and 1 or many) then return nil end
    from = from + #members
  end
end

-- Puts a held task back into its old place, under the next attempt unless nobody has ever heard of this one.
local function put_back(name, undo)
  local key = task_key(name)
  local pool, member, worker = unpack(call('HMGET', key, 'pool', 'member', 'worker'))
  end_lease(name, worker)
  call('HDEL', key, 'worker', 'mark', 'started', 'step', 'steps')
  if not undo then call('HINCRBY', key, 'attempt', 1) end
  put(name, pool, member, now)
end

function verbs.turn_down()
  local name, claim = held(A.claim), A.claim
  if not name then
    return refuse('LEASELOST attempt %d of %s of %s does not hold its lease', claim.attempt, claim.stage, claim.request)
  end
  local key = task_key(name)
  local worker, step = unpack(call('HMGET', key, 'worker', 'step'))
  if tonumber(step) == 0 then call('HINCRBY', key, RETURNED .. worker, 1) end
  put_back(name)
  relist(claim.request, facts(claim.request))
  local done_with, fields = 0, call('HGETALL', key)
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, #RETURNED) == RETURNED and tonumber(fields[i + 1]) >= A.most_returns then
      done_with = done_with + 1
    end
  end
  return done_with
end
