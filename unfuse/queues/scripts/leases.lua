-- Leasing: which worker gets which task.

-- Returns whether pool a's first task precedes b's: by priority, then the later pool, then order and arrival.
local function ahead(a, b)
  if string.sub(a.head, 1, 8) == string.sub(b.head, 1, 8) and a.stage_depth ~= b.stage_depth then return a.stage_depth > b.stage_depth end
  return before(a.head, b.head)
end

-- Returns the pools from which a worker may lease, with their first tasks. A pool is held back while a pool that it
-- feeds has too many waiting tasks (back-pressure).
local function open_lines(wanted, seen)
  local full, lines = {}, {}
  for pool, offer in pairs(wanted.pools) do
    for name, most in pairs(offer.backpressure) do
      if (sound(size, name) or 0) > most then
        full[pool] = true
        call('SADD', AWAITED, name)
      end
    end
    local head = not full[pool] and sound(head_for, pool, seen)
    if head then lines[#lines + 1] = {pool = pool, head = head, stage_depth = offer.stage_depth, amounts = offer.amounts} end
  end
  return lines
end

-- Returns the task that the worker prefers, near inputs before equal affinity, and its pool. Candidates are the first
-- tasks with the first one's priority, in pools with the same `stage_depth`.
local function liked(wanted, lines, first, seen)
  local among, best, most = {}, {first.head, first}, -1
  local priority, drawn = string.sub(first.head, 1, 8), 0
  for _, line in ipairs(lines) do
    if line.stage_depth == first.stage_depth then
      drawn = drawn + 1
      for _, member in ipairs(call('ZRANGE', ready_key(line.pool), 0, A.among - 1)) do
        among[#among + 1] = {member, line}
      end
    end
  end
  if drawn > 1 then table.sort(among, function(a, b) return before(a[1], b[1]) end) end
  for i = 1, math.min(A.among, #among) do
    local task = task_at(among[i][1], seen)
    local liking = wanted.affinity ~= '' and task.affinity == wanted.affinity and 1 or 0
    if wanted.preferred_node ~= '' and task.preferred_node == wanted.preferred_node then liking = 2 end
    local is_fit = string.sub(among[i][1], 1, 8) == priority and task.is_whole and not task.is_kept
    if liking > most and is_fit then best, most = among[i], liking end
  end
  return unpack(best)
end

-- Returns the amounts of all resources that a task uses.
local function needs_of(task)
  local all = task.needs and cmsgpack.unpack(task.needs) or {}
  all.arena, all.slots = tonumber(task.room), 1
  return all
end

-- Returns the set of resources that are too scarce for a task, or nil if all suffice.
local function lacks(amounts, needs, used)
  local found
  for name, most in pairs(amounts) do
    if (used[name] or 0) + (needs[name] or 0) > most then
      found = found or {}
      found[name] = true
    end
  end
  return found
end

-- Returns whether a pool's offer bounds one of these resources.
local function draws_on(line, resources)
  for name in pairs(resources) do
    if line.amounts[name] then return true end
  end
  return false
end

-- Returns the next task for a worker whose new leases have `used` some resources. When a task lacks a resource, only
-- later pools, and pools that do not use the resource, are considered further, and waiting workers are woken when a
-- task leaves that pool.
local function next_for(wanted, used, seen)
  local lines = open_lines(wanted, seen)
  while #lines > 0 do
    local line = lines[1]
    for _, other in ipairs(lines) do
      if ahead(other, line) then line = other end
    end
    local member, task = line.head, task_at(line.head, seen)
    if wanted.priority_above and tonumber(task.priority) <= wanted.priority_above then return end
    if (wanted.preferred_node ~= '' or wanted.affinity ~= '') and now - task.since < A.moment then
      member, line = liked(wanted, lines, line, seen)
    end
    local needs = needs_of(task_at(member, seen))
    local missing = lacks(line.amounts, needs, used)
    if not missing then return member, needs end
    call('SADD', AWAITED, line.pool)
    local others = {}
    for _, other in ipairs(lines) do
      if other.stage_depth > line.stage_depth or not draws_on(other, missing) then others[#others + 1] = other end
    end
    lines = others
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
  left(task.pool)
  publish(id, {type = 'stage_started', stage = task.stage, attempt = tonumber(task.attempt), worker = ask.worker})
  relist(id, true)
  return {task.task, task.attempt, count_pieces(name)}
end

-- Leases tasks for one lease request, without waiting.
local function serve(ask)
  local claims, used, seen = {}, {}, {returned = RETURNED .. ask.worker}
  for pool in pairs(ask.wanted.pools) do sound(ripen, pool) end
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
  local answer = verbs.commit()
  if answer.err then return answer end
  local claims, is_repeat = serve(A.ask), answer[1] -- a repeated commit returns the stored context
  local stands = #claims > 0 and (is_repeat or not A.is_over) and sound(stored, A.id, answer[5]) or answer
  return {{answer[1], stands[2], stands[3], answer[4], answer[5]}, exact(now), claims, exact(wall)}
end

-- Leases tasks for several requests, in order. Returns the queue's time, the next `not_before` that concerns a request
-- without leases, all leases, and the Unix time.
function verbs.lease()
  local ripens, answers = false, {}
  for i, ask in ipairs(A.asks) do
    local claims = serve(ask)
    for pool in pairs(#claims == 0 and ask.wanted.pools or {}) do
      local at = tonumber((sound(call, 'ZRANGE', delayed_key(pool), 0, 0, 'WITHSCORES') or {})[2])
      if at and (not ripens or at < ripens) then ripens = at end
    end
    answers[i] = claims
  end
  return {exact(now), ripens and exact(ripens), answers, exact(wall)}
end

