-- What every verb uses. The files are one script: ARGV[1] is the verb, ARGV[2] its arguments as a codec message.
-- Keys share the hash tag KEYS[1]. A task that waits is a member of its pool's sorted set, where all scores are equal,
-- so that bytes decide: its rank (8 bytes of priority, 8 of order, 16 of arrival), then its name.
local P, VERSION, A = KEYS[1], string.sub(ARGV[2], 1, 1), cmsgpack.unpack(string.sub(ARGV[2], 2))
local call, verbs, RANK = redis.call, {}, 32
local now, wall = A.now, A.wall
if not now then
  local time = call('TIME')
  now = time[1] + time[2] / 1000000
  wall = now
end
local pools, news = {}, {} -- what this call has changed, told by `tell` at its end

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
local LEASES, META, AWAITED = P .. ':leases', P .. ':meta', P .. ':awaited'

-- Whether a comes before b in their first `count` bytes: Lua's own < follows the server's locale.
local function before(a, b, count)
  for i = 1, count do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return false
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

-- A task takes its place in the line, or waits for its time.
local function put(name, pool, member, at)
  if at > now then call('ZADD', delayed_key(pool), at, member) else call('ZADD', ready_key(pool), 0, member) end
  call('HSET', task_key(name), 'since', math.max(at, now))
  pools[pool] = true
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

local function push(id, tasks)
  for _, task in ipairs(tasks) do
    local name = name_of(id, task.stage)
    remove(name)
    local member = task.rank .. string.format('%016x', call('HINCRBY', META, 'arrivals', 1)) .. name
    call('ZADD', stages_key(id), 'NX', call('ZCARD', stages_key(id)), task.stage)
    call('HSET', task_key(name), 'request', id, 'stage', task.stage, 'attempt', task.attempt, 'pool', task.pool,
      'member', member, 'room', task.room, 'priority', task.priority, 'near', task.near, 'affinity', task.affinity,
      'task', task.task)
    put(name, task.pool, member, task.not_before)
  end
end

-- Numbers an event, dates it if it is not dated, and drops the oldest progress of a log that is full.
local function publish(id, event)
  event.seq = call('HINCRBY', request_key(id), 'seq', 1)
  if not event.at or event.at == 0 then event.at = wall end
  call('ZADD', events_key(id), event.seq, VERSION .. cmsgpack.pack(event))
  if event.type == 'progress' or event.type == 'preview' then call('RPUSH', droppable_key(id), event.seq) end
  if call('ZCARD', events_key(id)) > A.max_events then
    local old = call('LPOP', droppable_key(id))
    if old then
      call('ZREMRANGEBYSCORE', events_key(id), old, old)
    else
      call('ZREMRANGEBYRANK', events_key(id), 0, 0)
    end
  end
  news[id] = true
end

local function unknown(id) return refuse('NOTFOUND no request %s', id) end

-- The name of a task whose lease somebody holds who can show this.
local function held(claim)
  local name = name_of(claim.request, claim.stage)
  return call('HGET', task_key(name), 'mark') == claim.mark and name
end

local function tell()
  for pool in pairs(pools) do call('PUBLISH', P .. ':changes', 'pool:' .. pool) end
  for id in pairs(news) do call('PUBLISH', P .. ':changes', 'request:' .. id) end
end

-- What requests are found under: for each heading a sorted set of ids by number. An earlier version knows only the four
-- keys of the next line, and may still write: what it stored or ended is listed anew before anybody is answered.
local ACTIVE, OVER, ALL, KEYED = P .. ':active', P .. ':over', P .. ':requests', P .. ':keyed'
local LISTED = P .. ':listed' -- the facts, packed, by which each request is listed now

local function heading_key(tenant, field, value)
  if not tenant and field == '' then return ALL end
  if not tenant and field == 'over' then return ACTIVE end
  return P .. ':list:' .. (tenant and name_of(tenant, '') or '') .. '/' .. field .. '/' .. value
end

-- The keys of all headings that `Filter.heading` may ask for these facts under.
local function headings(number, tenant, status, over, dead, video, fingerprint)
  local fields, keys = {{'', ''}, {'status', status}}, {}
  if over == '0' then fields[#fields + 1] = {'over', '0'} end
  if dead == '1' then fields[#fields + 1] = {'dead', '1'} end
  if video == '1' then fields[#fields + 1] = {'video', '1'} end
  for _, field in ipairs(fields) do
    keys[#keys + 1] = heading_key(nil, field[1], field[2])
    keys[#keys + 1] = heading_key(tenant, field[1], field[2])
  end
  if fingerprint ~= '' then keys[#keys + 1] = heading_key(tenant, 'fingerprint', fingerprint) end
  return keys
end

-- What may be asked of a request, as text; nothing of one that is gone, or is none. Its status is the one that is shown.
local function facts(id)
  local fields = {'number', 'tenant', 'status', 'over', 'dead', 'fingerprint', 'idempotency_key'}
  local values = redis.pcall('HMGET', request_key(id), unpack(fields))
  if values.err or not values[1] then return end
  local fact = {video = string.sub(id, 1, #A.video_id) == A.video_id and '1' or '0'}
  for i, field in ipairs(fields) do fact[field] = values[i] or '' end
  for _, stage in ipairs(fact.status == 'queued' and call('ZRANGE', stages_key(id), 0, -1) or {}) do
    if call('HEXISTS', task_key(name_of(id, stage)), 'worker') == 1 then fact.status = 'in_progress' end
  end
  return fact
end

-- Lists a request as these facts say, and one that has none, since it is gone, nowhere.
local function relist(id, fact)
  local before, stays = call('HGET', LISTED, id), {}
  local after = fact and {fact.number, fact.tenant, fact.status, fact.over, fact.dead, fact.video, fact.fingerprint}
  local packed = after and cmsgpack.pack(after)
  if packed == before then return end
  for _, key in ipairs(after and headings(unpack(after)) or {}) do
    call('ZADD', key, fact.number, id)
    stays[key] = true
  end
  for _, key in ipairs(before and headings(unpack(cmsgpack.unpack(before))) or {}) do
    if not stays[key] then call('ZREM', key, id) end
  end
  if packed then call('HSET', LISTED, id, packed) else call('HDEL', LISTED, id) end
end

-- Lists the next requests that came since this was last done; answers whether there may be more.
local function list_new()
  local last = call('HGET', META, 'listed') or '-inf'
  local new = call('ZRANGEBYSCORE', ALL, '(' .. last, '+inf', 'WITHSCORES', 'LIMIT', 0, A.scan)
  for i = 1, #new, 2 do relist(new[i], facts(new[i])) end
  if #new > 0 then call('HSET', META, 'listed', new[#new]) end
  return #new == 2 * A.scan
end

-- Lists anew what an earlier version has ended, which is the only reason for more to be listed than are active.
local function list_ended()
  local listed, lines = 0, {heading_key(nil, 'status', 'queued'), heading_key(nil, 'status', 'in_progress')}
  for _, line in ipairs(lines) do listed = listed + call('ZCARD', line) end
  for _, line in ipairs(listed > call('ZCARD', ACTIVE) and lines or {}) do
    for _, id in ipairs(call('ZDIFF', 2, line, ACTIVE)) do relist(id, facts(id)) end
  end
end

-- Looks through some of what is listed, if more is than is stored: an earlier version has dropped requests.
local function unlist_dropped()
  if call('HLEN', LISTED) <= call('ZCARD', ALL) then return end
  local scanned = call('HSCAN', LISTED, call('HGET', META, 'unlisted') or 0, 'COUNT', A.scan)
  call('HSET', META, 'unlisted', scanned[1])
  for i = 1, #scanned[2], 2 do
    if call('EXISTS', request_key(scanned[2][i])) == 0 then relist(scanned[2][i], facts(scanned[2][i])) end
  end
end

-- At most `scan` pairs of an id and its number under a heading, from behind a number.
local function listed(heading, from)
  local tenant, field, value = heading[1], heading[2], heading[3]
  if field == 'idempotency_key' then
    local id = call('HGET', KEYED, name_of(tenant, value))
    local number = id and tonumber(call('HGET', request_key(id), 'number'))
    local start = tonumber(from) or (A.oldest_first and -1 or math.huge)
    if not number or number == start or (number < start) == A.oldest_first then return {} end
    return {id, number}
  end
  local key = heading_key(tenant, field, value)
  if A.oldest_first then
    return call('ZRANGEBYSCORE', key, '(' .. from, '+inf', 'WITHSCORES', 'LIMIT', 0, A.scan)
  end
  return call('ZREVRANGEBYSCORE', key, '(' .. from, '-inf', 'WITHSCORES', 'LIMIT', 0, A.scan)
end

-- Requests: accepted, changed, read and forgotten.
-- A request as it stands: its context, what runs of it, and how many go before the first that waits.
local function record(id)
  local context, over = unpack(call('HMGET', request_key(id), 'context', 'over'))
  local running, position = {}, false
  local waiting = {}
  for _, stage in ipairs(over == '0' and call('ZRANGE', stages_key(id), 0, -1) or {}) do
    local pool, member, attempt, worker, started, step, steps =
      unpack(call('HMGET', task_key(name_of(id, stage)), 'pool', 'member', 'attempt', 'worker', 'started', 'step', 'steps'))
    if worker then
      running[#running + 1] = {stage = stage, attempt = tonumber(attempt), worker = worker, since = tonumber(started),
        step = tonumber(step), steps = tonumber(steps)}
    elseif pool then
      waiting[#waiting + 1] = {pool, member}
    end
  end
  for _, place in ipairs(#running == 0 and waiting or {}) do
    ripen(place[1])
    local ahead = call('ZLEXCOUNT', ready_key(place[1]), '-', '(' .. place[2])
    if not position or ahead < position then position = ahead end
  end
  return {context, VERSION .. cmsgpack.pack(running), position}
end

-- Writes a context with what queries ask of it; `was_active` says how it counted until now.
local function store(id, number, was_active)
  call('HSET', request_key(id), unpack(A.fields))
  local cost = tonumber(call('HGET', META, 'cost') or 0)
  if A.over then
    call('ZREM', ACTIVE, id)
    call('ZADD', OVER, A.completed_at or 0, id)
    if was_active then cost = cost - A.cost end
  else
    call('ZREM', OVER, id)
    call('ZADD', ACTIVE, number, id)
    if not was_active then cost = cost + A.cost end
  end
  call('HSET', META, 'cost', exact(call('ZCARD', ACTIVE) > 0 and cost or 0))
end

local function overload()
  local active, cost, most = call('ZCARD', ACTIVE), tonumber(call('HGET', META, 'cost') or 0), A.limits
  local say, later = 'OVERLOADED %s', ': try again later'
  if active >= most.max_active then
    return refuse(say, active .. ' requests are in progress, as many as are accepted' .. later)
  elseif most.max_cost and active > 0 and cost + A.cost > most.max_cost then
    return refuse(say, 'what is in progress and this together cost more than ' .. most.max_cost .. later)
  end
  for pool, more in pairs(A.more) do
    if size(pool) + more > most.max_queue then
      return refuse(say, size(pool) .. ' tasks wait in pool ' .. pool .. ', up to ' .. most.max_queue .. ' may' .. later)
    end
  end
end

function verbs.submit()
  local keyed = A.idempotency_key ~= '' and name_of(A.tenant, A.idempotency_key)
  local known = call('EXISTS', request_key(A.id)) == 1 and A.id or keyed and call('HGET', KEYED, keyed)
  if known then return record(known) end
  local overloaded = overload()
  if overloaded then return overloaded end
  local number = call('HINCRBY', META, 'arrivals', 1)
  call('ZADD', ALL, number, A.id)
  call('HSET', request_key(A.id), 'number', number)
  if keyed then call('HSET', KEYED, keyed, A.id) end
  store(A.id, number, false)
  push(A.id, A.push)
  for _, event in ipairs(A.events) do publish(A.id, event) end
  list_new()
  return record(A.id)
end

function verbs.commit()
  local id, claim = A.id, A.claim
  local version, over, done, number = unpack(call('HMGET', request_key(id), 'version', 'over', 'done', 'number'))
  if not version then return unknown(id) end
  if claim then
    if cmsgpack.unpack(done)[claim.stage] == claim.mark then return record(id) end
    if not held(claim) then
      return refuse('LEASELOST attempt %d of %s of %s does not hold its lease', claim.attempt, claim.stage, claim.request)
    end
  end
  if A.version ~= version + 1 then
    return refuse('CONFLICT %s is at version %d: %d does not follow it', id, version, A.version)
  end
  store(id, number, over == '0')
  if claim then remove(held(claim)) end
  for _, key in ipairs(A.close) do remove(name_of(key[1], key[2])) end
  push(id, A.push)
  if A.over then
    for _, stage in ipairs(call('ZRANGE', stages_key(id), 0, -1)) do remove(name_of(id, stage)) end
    news[id] = true
  end
  for _, event in ipairs(A.events) do publish(id, event) end
  relist(id, facts(id))
  return record(id)
end

function verbs.load()
  return call('EXISTS', request_key(A.id)) == 1 and record(A.id) or unknown(A.id)
end

-- One page of those asked for, from behind a number; answers where the next one begins, and what was found.
function verbs.list()
  local from, found = A.beyond, {}
  if A.after then
    local after = facts(A.after)
    if not after or (A.which.tenant and after.tenant ~= A.which.tenant) then return unknown(A.after) end
    from = after.number
  end
  if list_new() then return {from, found} end
  list_ended()
  local ids = listed(A.heading, from)
  for i = 1, #ids, 2 do
    local fact = facts(ids[i])
    local fits = fact
    for field, value in pairs(A.which) do fits = fits and fact[field] == value end
    if fits then found[#found + 1] = record(ids[i]) end
    relist(ids[i], fact) -- that an earlier version may have changed
    from = ids[i + 1]
    if #found == A.limit then break end
  end
  return {(#ids == 2 * A.scan) and #found < A.limit and from, found}
end

-- What is left of requests: their events, and nothing once they are dropped. Then the workers' registry.
local function drop(id)
  local tenant, key = unpack(call('HMGET', request_key(id), 'tenant', 'idempotency_key'))
  if key ~= '' then call('HDEL', KEYED, name_of(tenant, key)) end
  call('ZREM', ALL, id)
  call('ZREM', OVER, id)
  call('DEL', request_key(id), stages_key(id), events_key(id), droppable_key(id))
  relist(id, facts(id))
  news[id] = true
end

function verbs.events()
  local over = call('HGET', request_key(A.id), 'over')
  if not over then return unknown(A.id) end
  return {over, call('ZRANGEBYSCORE', events_key(A.id), '(' .. A.after, '+inf')}
end

function verbs.forget()
  unlist_dropped()
  local old = call('ZRANGEBYSCORE', OVER, '-inf', '(' .. exact(A.before), 'LIMIT', 0, A.scan)
  for _, id in ipairs(old) do drop(id) end
  return old
end

function verbs.drop()
  if call('HGET', request_key(A.id), 'over') == '1' then drop(A.id) end
end

function verbs.hello()
  call('ZADD', P .. ':joined', 'NX', call('HINCRBY', META, 'arrivals', 1), A.worker)
  call('HSET', P .. ':workers', A.worker, A.info)
  call('HSET', P .. ':seen', A.worker, now)
  if A.cards then call('HSET', P .. ':cards', A.worker, A.cards) end
end

function verbs.bye()
  call('ZREM', P .. ':joined', A.worker)
  for _, kind in ipairs({':workers', ':seen', ':cards'}) do call('HDEL', P .. kind, A.worker) end
end

function verbs.workers()
  local found = {}
  for i, worker in ipairs(call('ZRANGE', P .. ':joined', 0, -1)) do
    found[i] = {}
    for j, kind in ipairs({':workers', ':cards', ':seen', ':leased'}) do
      found[i][j] = call('HGET', P .. kind, worker)
    end
  end
  return found
end

-- Where outputs of encoders are that serve more than one request: handles by key, and the keys by when they were used.
local CACHED, USED = P .. ':cached', P .. ':used'

local function found(key)
  local entry = call('HGET', CACHED, key)
  return entry and cmsgpack.unpack(entry)
end

local function used(key) call('ZADD', USED, call('HINCRBY', META, 'uses', 1), key) end

local function give_up(key)
  local entry = found(key)
  if not entry then return end
  call('HDEL', CACHED, key)
  call('ZREM', USED, key)
  call('HINCRBY', META, 'cached', 0 - entry.nbytes) -- a zero of its own sign is no integer to Redis
end

function verbs.cache()
  give_up(A.key)
  if A.nbytes > A.room then return end
  call('HSET', CACHED, A.key, cmsgpack.pack({id = A.id, nbytes = A.nbytes, ref = A.ref}))
  used(A.key)
  local bytes = call('HINCRBY', META, 'cached', A.nbytes)
  while bytes > A.room or call('ZCARD', USED) > A.most do
    give_up(call('ZRANGE', USED, 0, 0)[1])
    bytes = tonumber(call('HGET', META, 'cached'))
  end
end

function verbs.cached()
  local refs = {}
  for i, key in ipairs(A.keys) do
    local entry = found(key)
    refs[i] = entry and entry.ref or false
    if entry and A.use then used(key) end
  end
  return refs
end

function verbs.uncache()
  local entry = found(A.key)
  if entry and entry.id == A.id then give_up(A.key) end
end

-- Who takes which task.

-- Whether one line's head goes before another's: by priority, then in the later pool, then by order and arrival.
local function ahead(a, b)
  if string.sub(a.head, 1, 8) == string.sub(b.head, 1, 8) and a.later ~= b.later then return a.later > b.later end
  return before(a.head, b.head, RANK)
end

-- The lines that a worker may take from. A pool is held back while more than so many wait in one it feeds.
local function open_lines(wanted)
  local full, lines = {}, {}
  for pool, fed in pairs(wanted.behind) do
    for name, most in pairs(fed) do
      if size(name) > most then
        full[pool] = true
        call('SADD', AWAITED, name)
      end
    end
  end
  for _, pool in ipairs(wanted.pools) do
    local head = not full[pool] and call('ZRANGE', ready_key(pool), 0, 0)[1]
    if head then
      lines[#lines + 1] = {pool = pool, head = head, later = wanted.later[pool] or 0, keep = wanted.keep[pool] or 0}
    end
  end
  return lines
end

-- Of the first tasks of the first one's priority, in lines as late as its own, the one the worker likes best: inputs
-- that are near, then company.
local function liked(wanted, lines, first)
  local among, best, most = {}, {first.head, first}, -1
  for _, line in ipairs(lines) do
    for _, member in ipairs(line.later == first.later and call('ZRANGE', ready_key(line.pool), 0, A.among - 1) or {}) do
      among[#among + 1] = {member, line}
    end
  end
  table.sort(among, function(a, b) return before(a[1], b[1], RANK) end)
  for i = 1, math.min(A.among, #among) do
    local near, affinity = unpack(call('HMGET', task_of(among[i][1]), 'near', 'affinity'))
    local liking = wanted.affinity ~= '' and affinity == wanted.affinity and 1 or 0
    if wanted.near ~= '' and near == wanted.near then liking = 2 end
    if liking > most and not before(first.head, among[i][1], 8) then best, most = among[i], liking end
  end
  return unpack(best)
end

-- The place of the task that a worker takes next, having taken `used` bytes. Where one has no room, only pools that are
-- later than its own go on; who waits is told when a task leaves that pool.
local function next_for(wanted, used)
  local lines = open_lines(wanted)
  while #lines > 0 do
    local line = lines[1]
    for _, other in ipairs(lines) do
      if ahead(other, line) then line = other end
    end
    local member, priority, since = line.head, unpack(call('HMGET', task_of(line.head), 'priority', 'since'))
    if wanted.above and tonumber(priority) <= wanted.above then return end
    if (wanted.near ~= '' or wanted.affinity ~= '') and now - since < A.moment then
      member, line = liked(wanted, lines, line)
    end
    local room = tonumber(call('HGET', task_of(member), 'room'))
    if not wanted.room or used + room + line.keep <= wanted.room then return member, room end
    call('SADD', AWAITED, line.pool)
    local later = {}
    for _, other in ipairs(lines) do
      if other.later > line.later then later[#later + 1] = other end
    end
    lines = later
  end
end

local function claim(ask, member, token)
  local name = string.sub(member, RANK + 1)
  local key = task_key(name)
  local id, stage, pool, attempt, task = unpack(call('HMGET', key, 'request', 'stage', 'pool', 'attempt', 'task'))
  call('ZREM', ready_key(pool), member)
  call('ZADD', LEASES, now + ask.ttl, name)
  call('HSET', key, 'worker', ask.worker, 'mark', attempt .. ':' .. token, 'started', wall, 'step', 0, 'steps', 0)
  call('HINCRBY', P .. ':leased', ask.worker, 1)
  left(pool)
  publish(id, {type = 'stage_started', stage = stage, attempt = tonumber(attempt), worker = ask.worker})
  relist(id, facts(id))
  return {task, attempt}
end

-- Serves those who ask, one after the other. Answers now, when the next task ripens for who got nothing, the claims.
function verbs.lease()
  local ripens, answers = false, {}
  for i, ask in ipairs(A.asks) do
    local claims, used, wanted = {}, 0, ask.wanted
    for _, pool in ipairs(wanted.pools) do ripen(pool) end
    while #claims < #ask.tokens / 16 do
      local member, room = next_for(wanted, used)
      if not member then break end
      used = used + room
      claims[#claims + 1] = claim(ask, member, string.sub(ask.tokens, #claims * 16 + 1, #claims * 16 + 16))
    end
    for _, pool in ipairs(#claims == 0 and wanted.pools or {}) do
      local at = tonumber(call('ZRANGE', delayed_key(pool), 0, 0, 'WITHSCORES')[2])
      if at and (not ripens or at < ripens) then ripens = at end
    end
    answers[i] = claims
  end
  return {exact(now), ripens and exact(ripens), answers}
end


-- Tasks: held, handed back, looked at.
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
  return 1
end

-- With `undo`, nobody has ever heard of the claim, and the attempt is the same again.
function verbs.hand_back()
  local name = held(A.claim)
  if not name then return 0 end
  local key = task_key(name)
  local pool, member, worker = unpack(call('HMGET', key, 'pool', 'member', 'worker'))
  end_lease(name, worker)
  call('HDEL', key, 'worker', 'mark', 'started', 'step', 'steps')
  if not A.undo then call('HINCRBY', key, 'attempt', 1) end
  put(name, pool, member, now)
  relist(A.claim.request, facts(A.claim.request))
  return 1
end

-- After a gap, no lease ends before a full time from now.
function verbs.expired()
  local swept = call('HGET', META, 'swept')
  if not swept or now - swept > A.ttl / 2 then
    for _, name in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', '(' .. exact(now + A.ttl))) do
      call('ZADD', LEASES, now + A.ttl, name)
    end
  end
  call('HSET', META, 'swept', exact(now))
  local late, found = call('ZRANGEBYSCORE', LEASES, '-inf', now, 'WITHSCORES'), {}
  for i = 1, #late, 2 do
    local task, attempt, worker, mark = unpack(call('HMGET', task_key(late[i]), 'task', 'attempt', 'worker', 'mark'))
    found[#found + 1] = {task, attempt, worker, mark, late[i + 1]}
  end
  return found
end

function verbs.size() return size(A.pool) end

function verbs.peek()
  ripen(A.pool)
  local found = {}
  for i, member in ipairs(call('ZRANGE', ready_key(A.pool), 0, A.limit - 1)) do
    found[i] = call('HMGET', task_of(member), 'task', 'attempt')
  end
  return found
end

function verbs.now() return exact(now) end

local answer = verbs[ARGV[1]]()
tell()
return answer
