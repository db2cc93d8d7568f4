-- Event histories, removal of requests, and the worker registry.
local function drop(id)
  local tenant, key = unpack(try(call, 'HMGET', request_key(id), 'tenant', 'idempotency_key') or {})
  if tenant and key and key ~= '' then call('HDEL', KEYED, name_of(tenant, key)) end
  call('ZREM', ALL, id)
  call('ZREM', OVER, id)
  for _, stage in ipairs(stages_of(id)) do call('DEL', pieces_key(name_of(id, stage))) end
  call('DEL', request_key(id), stages_key(id), events_key(id), droppable_key(id))
  update_index(id)
  changed_requests[id] = true
end

function verbs.events()
  if call('EXISTS', request_key(A.id)) == 0 then return unknown(A.id) end
  local is_over = try(call, 'HGET', request_key(A.id), 'is_over')
  if not is_over then return damaged(A.id) end
  return {is_over, try(call, 'ZRANGEBYSCORE', events_key(A.id), '(' .. A.after, '+inf') or {}}
end

function verbs.drop_ended_before()
  local ids = call('ZRANGEBYSCORE', OVER, '-inf', '(' .. exact(A.before), 'LIMIT', 0, A.scan)
  for _, id in ipairs(ids) do drop(id) end
  return ids
end

function verbs.drop()
  if try(call, 'HGET', request_key(A.id), 'is_over') == '1' then drop(A.id) end
end

-- Removes all records of this id, even damaged ones: a request with its tasks and leases, a worker, a declaration.
function verbs.discard()
  local id, cost = A.id, tonumber(try(call, 'HGET', request_key(A.id), 'cost'))
  for _, stage in ipairs(stages_of(id)) do
    local name = name_of(id, stage)
    try(remove, name)
    call('DEL', task_key(name))
    call('ZREM', LEASES, name)
  end
  if call('ZREM', ACTIVE, id) == 1 then
    local sum = tonumber(call('HGET', META, 'cost')) or 0
    call('HSET', META, 'cost', exact(call('ZCARD', ACTIVE) > 0 and sum - (cost or 0) or 0)) -- sums of floats drift
  end
  recount() -- the request's own share may be unreadable
  drop(id)
  for _, name in ipairs(call('HKEYS', DAMAGED)) do
    if name == id or string.sub(name, 1, #name_of(id, '')) == name_of(id, '') then call('HDEL', DAMAGED, name) end
  end
  call('DEL', task_key(id))
  call('ZREM', LEASES, id)
  call('HDEL', P .. ':declared', id)
  A.worker = id
  verbs.unregister()
end

function verbs.damaged() return call('HGETALL', DAMAGED) end

function verbs.register()
  call('ZADD', P .. ':joined', 'NX', call('HINCRBY', META, 'arrivals', 1), A.worker)
  call('HSET', P .. ':workers', A.worker, A.info)
  call('HSET', P .. ':seen', A.worker, now)
  if A.cards then call('HSET', P .. ':cards', A.worker, A.cards) end
end

function verbs.unregister()
  call('ZREM', P .. ':joined', A.worker)
  for _, kind in ipairs({':workers', ':seen', ':cards'}) do call('HDEL', P .. kind, A.worker) end
  for _, name in ipairs(call('ZRANGE', LEASES, 0, -1)) do
    if try(call, 'HGET', task_key(name), 'worker') == A.worker then call('ZADD', LEASES, 'LT', now, name) end
  end
end

-- Returns whether a stored declaration is current. Its first byte is the codec's version.
local function is_current(stored)
  local declared = try(cmsgpack.unpack, string.sub(stored, 2))
  return type(declared) == 'table' and #(declared.models or {}) > 0 and #(declared.withdrawn or {}) == 0
    and (declared.failure or '') == ''
end

function verbs.declare()
  local stored = A.new and call('HGET', P .. ':declared', A.by)
  if stored and is_current(stored) then return 0 end
  call('HSET', P .. ':declared', A.by, A.declaration)
  return 1
end

-- Returns the secret of a name: the first proposed one.
function verbs.secret()
  local stored = call('HGET', P .. ':secrets', A.name)
  if stored then return stored end
  call('HSET', P .. ':secrets', A.name, A.proposed)
  return A.proposed
end

function verbs.declarations() return call('HGETALL', P .. ':declared') end

function verbs.workers()
  local workers = {}
  for i, worker in ipairs(call('ZRANGE', P .. ':joined', 0, -1)) do
    workers[i] = {worker}
    for j, kind in ipairs({':workers', ':cards', ':seen', ':leased'}) do
      workers[i][j + 1] = call('HGET', P .. kind, worker)
    end
  end
  return workers
end
