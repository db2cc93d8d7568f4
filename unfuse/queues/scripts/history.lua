-- What is left of requests: their events, and nothing once they are dropped. Then the workers' registry.
local function drop(id)
  local tenant, key = unpack(call('HMGET', request_key(id), 'tenant', 'idempotency_key'))
  if key ~= '' then call('HDEL', KEYED, name_of(tenant, key)) end
  call('ZREM', ALL, id)
  call('ZREM', OVER, id)
  call('DEL', request_key(id), stages_key(id), events_key(id), droppable_key(id))
  news[id] = true
end

function verbs.events()
  local over = call('HGET', request_key(A.id), 'over')
  if not over then return unknown(A.id) end
  return {over, call('ZRANGEBYSCORE', events_key(A.id), '(' .. A.after, '+inf')}
end

function verbs.forget()
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
