-- Leased and queued tasks, and the entry point of the script.
function verbs.renew()
  local answers = {}
  for i, one in ipairs(A.claims) do
    local name = held(one)
    if name then call('ZADD', LEASES, now + A.ttl, name) end
    answers[i] = name and 1 or 0
  end
  return answers
end

function verbs.progress()
  local name = held(A.claim)
  if not name then return 0 end
  for _, event in ipairs(A.events) do
    call('HSET', task_key(name), 'step', event.step, 'steps', event.steps)
    publish(A.claim.request, event)
  end
  if A.used then
    local known = used_by(A.claim.attempt, call('HGET', task_key(name), 'used'))
    if not known or known.share_s <= A.used.share_s then
      call('HSET', task_key(name), 'used', cmsgpack.pack({A.claim.attempt, A.used}))
    end
  end
  return 1
end

function verbs.hand_back()
  local name = held(A.claim)
  if not name then return 0 end
  put_back(name, A.claim.request, A.undo)
  return 1
end

-- After a gap, every lease lasts at least a full ttl from now; after the clock was set back, exactly that.
function verbs.sweep_expired()
  local swept = tonumber(call('HGET', META, 'swept'))
  if not swept or math.abs(now - swept) > A.ttl / 2 then
    local most = swept and now < swept and '+inf' or '(' .. exact(now + A.ttl)
    for _, name in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', most)) do call('ZADD', LEASES, now + A.ttl, name) end
  end
  call('HSET', META, 'worked', exact(worked()), 'swept', exact(now), 'most_between', exact(A.ttl / 2))
  local late, found = call('ZRANGEBYSCORE', LEASES, '-inf', now, 'WITHSCORES'), {}
  for i = 1, #late, 2 do
    local words = sound(call, 'HMGET', task_key(late[i]), 'task', 'attempt', 'worker', 'mark') or {}
    if words[1] and tonumber(words[2]) and words[3] and words[4] then
      found[#found + 1] = {words[1], words[2], words[3], words[4], late[i + 1], late[i]}
    else
      call('ZREM', LEASES, late[i])
      call('HSET', DAMAGED, late[i], 'lease')
    end
  end
  return found
end

function verbs.peek()
  sound(ripen, A.pool)
  local found = {}
  for i, member in ipairs(sound(call, 'ZRANGE', ready_key(A.pool), 0, A.limit - 1) or {}) do
    found[i] = sound(call, 'HMGET', task_of(member), 'task', 'attempt') or {}
  end
  return found
end

function verbs.now() return exact(now) end

-- Raises the server's error if it accepts no changes, for example without memory.
function verbs.check() call('HSET', META, 'checked', exact(now)) end

-- Refuses keys of another queue, shard or schema version. The first call in an empty namespace stores schema and part.
local function misplaced()
  local found = sound(call, 'HMGET', META, 'schema', 'part')
  if not found then return end -- META is damaged
  local schema, part = unpack(found)
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
  local none = 'a queue without shards'
  return refuse('MISPLACED the keys with this prefix are of %s, not of %s: use the same number of shards and ' ..
    'the same order of servers as before, or another prefix', part == '' and none or part,
    A.part == '' and none or A.part)
end

local function run(verb)
  return misplaced() or verbs[verb]()
end

local time = call('TIME')
local answers = {}
for i = 1, #ARGV, 2 do
  A = cmsgpack.unpack(string.sub(ARGV[i + 1], 2))
  wall = A.wall or time[1] + time[2] / 1000000
  now = A.now or wall
  local is_done, answer = pcall(run, ARGV[i])
  if not is_done then answer = {err = type(answer) == 'table' and answer.err or tostring(answer)} end
  answers[#answers + 1] = answer or false
end
tell()
return answers
