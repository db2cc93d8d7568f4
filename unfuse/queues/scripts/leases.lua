-- Leasing: which worker gets which task.

-- Returns whether pool a's first task precedes b's: by priority, then the greater stage depth, then order and arrival.
local function is_ahead(a, b)
  if string.sub(a.head, 1, 8) == string.sub(b.head, 1, 8) and a.stage_depth ~= b.stage_depth then
    return a.stage_depth > b.stage_depth
  end
  return before(a.head, b.head)
end

-- Returns the pools from which a worker may lease, with their first tasks. A pool is held back while a pool that it
-- feeds has too many waiting tasks (back-pressure).
local function open_queues(wanted, seen)
  local is_held_back, queues = {}, {}
  for pool, offer in pairs(wanted.pools) do
    for fed, limit in pairs(offer.backpressure) do
      if (try(size, fed) or 0) > limit then
        is_held_back[pool] = true
        call('SADD', AWAITED, fed)
      end
    end
    local head = not is_held_back[pool] and try(head_for, pool, seen)
    if head then
      queues[#queues + 1] = {pool = pool, head = head, stage_depth = offer.stage_depth, amounts = offer.amounts}
    end
  end
  return queues
end

-- Returns the task that the worker prefers, near inputs before equal affinity, and its pool. Candidates are the first
-- tasks with the first one's priority, in pools with the same `stage_depth`.
local function preferred(wanted, queues, first, seen)
  local candidates, best, best_preference = {}, {first.head, first}, -1
  local priority, merged = string.sub(first.head, 1, 8), 0
  for _, queue in ipairs(queues) do
    if queue.stage_depth == first.stage_depth then
      merged = merged + 1
      for _, member in ipairs(call('ZRANGE', ready_key(queue.pool), 0, A.among - 1)) do
        candidates[#candidates + 1] = {member, queue}
      end
    end
  end
  if merged > 1 then table.sort(candidates, function(a, b) return before(a[1], b[1]) end) end

  for i = 1, math.min(A.among, #candidates) do
    local task = task_at(candidates[i][1], seen)
    local preference = wanted.affinity ~= '' and task.affinity == wanted.affinity and 1 or 0
    if wanted.preferred_node ~= '' and task.preferred_node == wanted.preferred_node then preference = 2 end
    local is_fit = string.sub(candidates[i][1], 1, 8) == priority and task.is_whole and not task.is_excluded
    if preference > best_preference and is_fit then best, best_preference = candidates[i], preference end
  end
  return unpack(best)
end

-- Returns the amounts of all resources that a task uses.
local function needs_of(task)
  local needs = task.needs and cmsgpack.unpack(task.needs) or {}
  needs.arena, needs.slots = tonumber(task.room), 1
  return needs
end

-- Returns the set of resources that are too scarce for a task, or nil if all suffice.
local function missing_resources(amounts, needs, used)
  local missing
  for name, free in pairs(amounts) do
    if (used[name] or 0) + (needs[name] or 0) > free then
      missing = missing or {}
      missing[name] = true
    end
  end
  return missing
end

-- Returns whether a pool's offer bounds one of these resources.
local function is_bounded_by(queue, resources)
  for name in pairs(resources) do
    if queue.amounts[name] then return true end
  end
  return false
end

-- Returns the next task for a worker whose new leases have `used` some resources. When a task lacks a resource, only
-- pools of a greater stage depth, and pools that do not use the resource, are considered further. Waiting workers are
-- woken when a task leaves that pool.
local function next_for(wanted, used, seen)
  local queues = open_queues(wanted, seen)
  while #queues > 0 do
    local queue = queues[1]
    for _, other in ipairs(queues) do
      if is_ahead(other, queue) then queue = other end
    end
    local member, task = queue.head, task_at(queue.head, seen)
    if wanted.priority_above and tonumber(task.priority) <= wanted.priority_above then return end
    if (wanted.preferred_node ~= '' or wanted.affinity ~= '') and now - task.since < A.moment then
      member, queue = preferred(wanted, queues, queue, seen)
    end
    local needs = needs_of(task_at(member, seen))
    local missing = missing_resources(queue.amounts, needs, used)
    if not missing then return member, needs end

    call('SADD', AWAITED, queue.pool)
    local others = {}
    for _, other in ipairs(queues) do
      if other.stage_depth > queue.stage_depth or not is_bounded_by(other, missing) then others[#others + 1] = other end
    end
    queues = others
  end
end

local function claim(ask, member, task, token)
  local name, id = string.sub(member, RANK + 1), task.request
  local mark = task.attempt .. ':' .. token
  call('ZREM', ready_key(task.pool), member)
  call('ZADD', LEASES, now + ask.ttl, name)
  call('HSET', task_key(name), 'worker', ask.worker, 'mark', mark, 'started', wall, 'began', exact(worked()),
    'step', 0, 'steps', 0)
  call('HINCRBY', P .. ':leased', ask.worker, 1)
  note_removal(task.pool)
  publish(id, {type = 'stage_started', stage = task.stage, attempt = tonumber(task.attempt), worker = ask.worker})
  update_index(id, true)
  return {task.task, task.attempt, count_pieces(name)}
end

-- Leases tasks for one lease request, without waiting.
local function serve(ask)
  local claims, used, seen = {}, {}, {returned = RETURNED .. ask.worker}
  for pool in pairs(ask.wanted.pools) do try(release_due, pool) end
  while #claims < #ask.tokens / 16 do
    local member, needs = next_for(ask.wanted, used, seen)
    if not member then break end
    for name, amount in pairs(needs) do used[name] = (used[name] or 0) + amount end
    local token = string.sub(ask.tokens, #claims * 16 + 1, #claims * 16 + 16)
    claims[#claims + 1] = claim(ask, member, seen[member], token)
  end
  return claims
end

function verbs.commit_and_lease()
  local reply = verbs.commit()
  if reply.err then return reply end
  local claims, is_repeat = serve(A.ask), reply[1] -- a repeated commit returns the stored context
  -- The worker may have leased tasks of this request: its record must have them as running.
  local current = #claims > 0 and (is_repeat or not A.is_over) and try(stored_record, A.id, reply[5]) or reply
  return {{reply[1], current[2], current[3], reply[4], reply[5]}, exact(now), claims, exact(wall)}
end

-- Leases tasks for several requests, in order. Returns the queue's time, the next `not_before` that concerns a request
-- without leases, all leases, and the Unix time.
function verbs.lease()
  local due, replies = false, {}
  for i, ask in ipairs(A.asks) do
    local claims = serve(ask)
    for pool in pairs(#claims == 0 and ask.wanted.pools or {}) do
      local not_before = tonumber((try(call, 'ZRANGE', delayed_key(pool), 0, 0, 'WITHSCORES') or {})[2])
      if not_before and (not due or not_before < due) then due = not_before end
    end
    replies[i] = claims
  end
  return {exact(now), due and exact(due), replies, exact(wall)}
end

