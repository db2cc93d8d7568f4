-- The encoder index: refs by cache key, and the keys sorted by last use (LRU).
local CACHED, USED = P .. ':cached', P .. ':used'

-- Returns the cached output of a key, or nil or false if there is none or it is damaged.
local function cached_output(key)
  local stored = call('HGET', CACHED, key)
  local output = stored and try(cmsgpack.unpack, stored)
  return type(output) == 'table' and tonumber(output.nbytes) and output.ref and output
end

local function mark_used(key) call('ZADD', USED, call('HINCRBY', META, 'uses', 1), key) end

local function evict(key)
  local output = cached_output(key)
  call('HDEL', CACHED, key)
  call('ZREM', USED, key)
  if output then call('HINCRBY', META, 'cached', 0 - output.nbytes) end -- not -output.nbytes: Redis refuses -0
end

function verbs.put_encoding()
  evict(A.key)
  if A.nbytes > A.room then return end
  call('HSET', CACHED, A.key, cmsgpack.pack({id = A.id, nbytes = A.nbytes, ref = A.ref}))
  mark_used(A.key)
  local bytes = call('HINCRBY', META, 'cached', A.nbytes)
  while (bytes > A.room or call('ZCARD', USED) > A.most) and call('ZCARD', USED) > 0 do
    evict(call('ZRANGE', USED, 0, 0)[1])
    bytes = tonumber(call('HGET', META, 'cached'))
  end
end

function verbs.find_encoding()
  local refs = {}
  for i, key in ipairs(A.keys) do
    local output = cached_output(key)
    refs[i] = output and output.ref or false
    if output and A.use then mark_used(key) end
  end
  return refs
end

function verbs.cached_bytes() return tonumber(call('HGET', META, 'cached') or 0) end

function verbs.remove_encoding()
  local output = cached_output(A.key)
  if output and output.id == A.id then evict(A.key) end
end
