-- The encoder index: refs by cache key, and the keys sorted by last use (LRU).
local CACHED, USED = P .. ':cached', P .. ':used'

local function found(key)
  local entry = call('HGET', CACHED, key)
  local kept = entry and sound(cmsgpack.unpack, entry)
  return type(kept) == 'table' and tonumber(kept.nbytes) and kept.ref and kept
end

local function used(key) call('ZADD', USED, call('HINCRBY', META, 'uses', 1), key) end

local function give_up(key)
  local entry = found(key)
  call('HDEL', CACHED, key)
  call('ZREM', USED, key)
  if entry then call('HINCRBY', META, 'cached', 0 - entry.nbytes) end -- not -entry.nbytes: Redis refuses -0
end

function verbs.put_encoding()
  give_up(A.key)
  if A.nbytes > A.room then return end
  call('HSET', CACHED, A.key, cmsgpack.pack({id = A.id, nbytes = A.nbytes, ref = A.ref}))
  used(A.key)
  local bytes = call('HINCRBY', META, 'cached', A.nbytes)
  while (bytes > A.room or call('ZCARD', USED) > A.most) and call('ZCARD', USED) > 0 do
    give_up(call('ZRANGE', USED, 0, 0)[1])
    bytes = tonumber(call('HGET', META, 'cached'))
  end
end

function verbs.find_encoding()
  local refs = {}
  for i, key in ipairs(A.keys) do
    local entry = found(key)
    refs[i] = entry and entry.ref or false
    if entry and A.use then used(key) end
  end
  return refs
end

function verbs.cached_bytes() return tonumber(call('HGET', META, 'cached') or 0) end

function verbs.remove_encoding()
  local entry = found(A.key)
  if entry and entry.id == A.id then give_up(A.key) end
end
