-- Leased and queued tasks, and the entry point of the script.
function verbs.renew()
  local results = {}
  for i, claim in ipairs(A.claims) do
    local name = leased_task(claim)
    if name then call('ZADD', LEASES, now + A.ttl, name) end
    results[i] = name and 1 or 0
  end
  return results
end

function verbs.progress()
  local name = leased_task(A.claim)
  if not name then return 0 end
  for _, event in ipairs(A.events) do
    call('HSET', task_key(name), 'step', event.step, 'steps', event.steps)
    publish(A.claim.request, event)
  end
  if A.used then
    local last = used_by(A.claim.attempt, call('HGET', task_key(name), 'used'))
    if not last or last.share_s <= A.used.share_s then
      call('HSET', task_key(name), 'used', cmsgpack.pack({A.claim.attempt, A.used}))
    end
  end
  return 1
end

function verbs.hand_back()
  local name = leased_task(A.claim)
  if not name then return 0 end
  hand_back(name, A.claim.request, A.undo)
  return 1
end

-- After a gap, every lease lasts at least a full ttl from now; after the clock was set back, exactly that.
function verbs.sweep_expired()
  local swept = tonumber(call('HGET', META, 'swept'))
  if not swept or math.abs(now - swept) > A.ttl / 2 then
    local below = swept and now < swept and '+inf' or '(' .. exact(now + A.ttl)
    for _, name in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', below)) do call('ZADD', LEASES, now + A.ttl, name) end
  end
  call('HSET', META, 'worked', exact(worked()), 'swept', exact(now), 'most_between', exact(A.ttl / 2))

  local expired, leases = call('ZRANGEBYSCORE', LEASES, '-inf', now, 'WITHSCORES'), {}
  for i = 1, #expired, 2 do
    local fields = try(call, 'HMGET', task_key(expired[i]), 'task', 'attempt', 'worker', 'mark') or {}
    if fields[1] and tonumber(fields[2]) and fields[3] and fields[4] then
      leases[#leases + 1] = {fields[1], fields[2], fields[3], fields[4], expired[i + 1], expired[i]}
    else
      call('ZREM', LEASES, expired[i])
      call('HSET', DAMAGED, expired[i], 'lease')
    end
  end
  return leases
end

function verbs.peek()
  try(release_due, A.pool)
  local tasks = {}
  for i, member in ipairs(try(call, 'ZRANGE', ready_key(A.pool), 0, A.limit - 1) or {}) do
    tasks[i] = try(call, 'HMGET', task_of(member), 'task', 'attempt') or {}
  end
  return tasks
end

function verbs.now() return exact(now) end

-- Raises the server's error if it accepts no changes, for example without memory.
function verbs.check() call('HSET', META, 'checked', exact(now)) end

-- Refuses keys of another queue, shard or schema version. The first call in an empty namespace stores schema and part.
local function misplaced()
  local stored = try(call, 'HMGET', META, 'schema', 'part')
  if not stored then return end -- META is damaged
  local schema, part = unpack(stored)
  if not schema and call('EXISTS', META, P .. ':declared', P .. ':secrets') == 0 then
    call('HSET', META, 'schema', SCHEMA, 'part', A.part)
    return
  end
  if schema ~= SCHEMA then
    return refuse('MISPLACED the keys with this prefix were written by another version of unfuse (schema %s, this ' ..
      'version needs %s): use another prefix, as in ?prefix=NAME, or delete the keys that begin with %s:',
      schema or 'unknown', SCHEMA, P)
  end
  if part == A.part then return end
  local no_shards = 'a queue without shards'
  return refuse('MISPLACED the keys with this prefix are of %s, not of %s: use the same number of shards and ' ..
    'the same order of servers as before, or another prefix', part == '' and no_shards or part,
    A.part == '' and no_shards or A.part)
end

local function run(verb)
  return misplaced() or verbs[verb]()
end

local time = call('TIME')
local replies = {}
for i = 1, #ARGV, 2 do
  A = cmsgpack.unpack(string.sub(ARGV[i + 1], 2))
  wall = A.wall or time[1] + time[2] / 1000000
  now = A.now or wall
  -- An error of one verb is its reply, since the other verbs of this run are calls of other callers.
  local is_done, reply = pcall(run, ARGV[i])
  if not is_done then reply = {err = type(reply) == 'table' and reply.err or tostring(reply)} end
  replies[#replies + 1] = reply or false
end
publish_changes()
return replies
